"""The examples and commands of the guides in docs."""

import functools
import re
import shlex

import jax
import numpy as np
import pytest
import retrieval_runs
import runs
from open_clip_folder import open_clip_folder

import infcl_jax
from infcl_jax import evaluation, models
from infcl_jax.data import SOURCES, load_source
from infcl_jax.ops.pairwise.implementations import TABLE
from infcl_jax.run.callbacks import Callbacks
from infcl_jax.settings import make_config
from infcl_jax.training import LOSSES, make_loss, save_config

pytestmark = pytest.mark.runs

DOCS = runs.ROOT / "docs"
PAGES = [runs.ROOT / "README.md", runs.ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES).replace("\\\n", "")
COMMAND = re.compile(r"(?:^ *(?:\w+=\S+ +)*|`)(?:\.venv/bin/)?python -m (experiments\.[\w.]+)( [^`\n]*)?", re.MULTILINE)


def commands():
    """Modules and flags of the commands on all pages, optional flags included."""
    unique, loops = {}, dict(re.findall(r"^ *for (\w+) in (\S+)[^;\n]*; do$", TEXT, re.MULTILINE))
    for module, flags in COMMAND.findall(TEXT):
        line = re.sub(r"\[(--[^]]*)\]", r"\1", flags).removesuffix(" &")
        line = re.sub(r"\$(\w+)", lambda variable: loops.get(variable[1], variable[0]), line)
        if "..." not in line:
            unique[(module, *shlex.split(line, comments=True))] = None
    return list(unique)


TRAINING = [flags for module, *flags in commands() if module == "experiments.train"]
OTHERS = {  # one command of each module and set of flags
    (module, *sorted(flag.partition("=")[0] for flag in flags)): (module, *flags)
    for module, *flags in commands()
    if module != "experiments.train"
}


def given(page, folder, monkeypatch):
    """Prepare what a page assumes and return its names."""
    if page == "dense_retrieval":
        retrieval_runs.save(folder / "runs" / "dpr", retrieval_runs.settings(retrieval_runs.write_corpus(folder)))
    if page == "probes":  # without the search of the regularization, which takes a minute
        probe, few_shot = evaluation.linear_probe, evaluation.few_shot
        monkeypatch.setattr(evaluation, "linear_probe", functools.partial(probe, regularization=1.0))
        monkeypatch.setattr(evaluation, "few_shot", functools.partial(few_shot, classifier="ridge"))
        features, labels = np.tile(np.eye(3, dtype=np.float32), (20, 1)), np.tile(np.arange(3), 20)
        return {"train_features": features, "train_labels": labels, "test_features": features, "test_labels": labels}
    if page == "models":
        clip = models.load_pretrained(open_clip_folder("vit", folder / "clip"))
        monkeypatch.setattr(models, "load_pretrained", lambda name: clip)
        size = clip[0].visual.image_size
        return {"images": np.zeros((2, size, size, 3), np.uint8)}
    return {}


PAGES_WITH_EXAMPLES = [
    "dense_retrieval",
    "evaluation",
    "extending",
    "memory",
    "models",
    "probes",
    "verification",
]


def test_every_page_with_examples_is_tested():
    """`tests/repository/test_readme.py` tests the examples of four further pages."""
    found = {page.stem for page in DOCS.glob("*.md") if "```python" in page.read_text()}
    assert found == {*PAGES_WITH_EXAMPLES, "get_started", "index", "training", "using_models"}
    assert not re.search(r"^ {4}(from|import) .*", TEXT.replace("```", ""), re.MULTILINE)  # Python is in fences


@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES)
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
    names = {"__name__": "__main__"} | given(page, tmp_path, monkeypatch)
    examples = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        for example in examples:
            exec(example, names)
    assert examples
    if page == "dense_retrieval":
        assert names["rows"].shape == (retrieval_runs.TOPICS, 96) and names["scores"].shape == (1, 2)
    if page == "evaluation":
        assert names["get_task"]().split == "test"
    if page == "probes":
        assert names["probe"].metrics["top1"] == names["result"].metrics["1_shot"] == 1
    if page == "models":
        assert len(names["features"]) == 2
    if page == "extending":
        assert trained == ["runs/margin", "runs/stripes"]


@pytest.mark.parametrize("flags", TRAINING, ids=" ".join)
def test_training_commands_have_right_settings(flags, tmp_path):
    # The data of the commands is not here; a batch of this one is small.
    dataset = "digits"
    if any(flag.startswith("--config=configs/dpr.py") for flag in flags):
        dataset = tmp_path / "train.jsonl"
        dataset.write_text('{"query": "who?", "pos": ["she"]}\n' * 4096)  # warm-up is shorter than training
    present = (f"--config.dataset={dataset}", "--config.split=train", "--config.batch_size=64")
    status, output, errors = runs.command("experiments.train", *flags, *present, "--print_config")
    assert status == 0 and "get_config" in output, errors


@pytest.mark.parametrize("command", OTHERS.values(), ids=" ".join)
def test_commands_have_right_flags(command, tmp_path):
    """`tests/experiments` runs the commands."""
    save_config(tmp_path, runs.config().to_dict())
    workdir = f"--workdir={tmp_path}"  # evaluations and exports read its settings
    flags = [workdir if flag.startswith("--workdir=runs/") else flag for flag in command]
    status, _, errors = runs.command(*flags, "--only_check_args")
    assert status == 0, errors


def test_targets_of_make_exist():
    makefile = (runs.ROOT / "Makefile").read_text()
    faults = re.findall(r"addprefix faults-,(.*?)\)", makefile)
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE) + [
        f"faults-{name}" for name in " ".join(faults).split()
    ]
    named = set(re.findall(r"(?:^ {4}|`)make (?:-k )?([a-z][\w-]*)", TEXT, re.MULTILINE))
    assert {"quickstart", "test", "docs"} <= named <= set(targets)


@pytest.mark.slow
def test_the_plan_on_the_page_of_memory_is_what_the_command_prints():
    page = (DOCS / "memory.md").read_text()
    given = {"--device=H200", "--config.model=ViT-B/32"}
    flags = next(command for command in OTHERS.values() if given <= {*command} and "--target" not in str(command))
    (table, *_) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert runs.command(*flags).stdout == table
