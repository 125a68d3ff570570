"""The examples and commands of the guides in docs."""

import re
import shlex

import jax
import numpy as np
import pytest
import runs

import infcl_jax
from infcl_jax.data import SOURCES, load_source
from infcl_jax.ops.pairwise_lse.implementations import TABLE
from infcl_jax.run.callbacks import Callbacks
from infcl_jax.settings import make_config
from infcl_jax.training import LOSSES, make_loss

DOCS = runs.ROOT / "docs"


def commands(pattern):
    """Flags of the indented commands of all guides, without line continuations."""
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md"))).replace("\\\n", "")
    found = re.findall(rf"^ {{4,}}(?:\w+=\S+ +)*python -m {pattern} (.*?)(?: &)?$", text, re.MULTILINE)
    return [shlex.split(line) for line in dict.fromkeys(found)]


@pytest.mark.parametrize("page", ["dense_retrieval", "extending", "fastclip", "numerics", "planning", "verification"])
def test_examples_run(page, tmp_path, monkeypatch):
    """Runs are built up to their data and loss; `tests/run/test_train.py` trains."""
    trained = []

    def train(settings, workdir, callbacks=()):
        config = make_config(settings)
        assert len(load_source(config.dataset, config.split)) >= config.batch_size
        make_loss(config.loss, None)
        hooks = Callbacks(callbacks)
        hooks.on_start(config, tmp_path / workdir, 0)
        runs.save(tmp_path / workdir, {1: 1.0})
        hooks.on_checkpoint(1, tmp_path / workdir / "checkpoints" / "1")
        trained.append(workdir)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(infcl_jax, "train", train, raising=False)
    for table in (LOSSES, SOURCES, TABLE):
        for name in ("margin", "stripes", "xla_64"):
            monkeypatch.setitem(table, name, None)  # restores the table
            del table[name]
    names = {"__name__": page}
    examples = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        for example in examples:
            exec(example, names)
    assert examples
    if page == "extending":
        assert trained == ["runs/margin", "runs/stripes", "runs/apart"]
        assert np.isfinite(names["separation"].values[1])


@pytest.mark.parametrize("flags", commands(r"experiments\.train"), ids=" ".join)
def test_training_commands_have_right_settings(flags, tmp_path):
    # The data of the commands is not here; a batch of this one is small.
    dataset = "digits"
    if any(flag.startswith("--config=configs/dpr.py") for flag in flags):
        dataset = tmp_path / "train.jsonl"
        dataset.write_text('{"query": "who?", "pos": ["she"]}\n' * 4096)  # warm-up is shorter than training
    present = (f"--config.dataset={dataset}", "--config.split=train", "--config.batch_size=64")
    status, output, errors = runs.command("experiments.train", *flags, *present, "--print_config")
    assert status == 0 and "get_config" in output, errors
