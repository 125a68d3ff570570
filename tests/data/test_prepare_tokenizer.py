"""Training of a tokenizer on a dataset, and a run that uses it."""

import json
import re

import captioned
import jax
import numpy as np
import pytest
import runs

from infcl_jax import train
from infcl_jax.data import load_tokenizer, prepare_tokenizer

pytestmark = pytest.mark.runs

WORDS = ("red", "blue", "cat", "lighthouse")
NOTHING = {"evaluation.retrieval_dataset": None, "evaluation.zero_shot_dataset": None}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of 40 images. One caption is not UTF-8."""
    folder = tmp_path_factory.mktemp("table")
    captioned.write_folder(folder, captioned.samples(40))
    rows = [(f"{i:06d}.jpg", f"A {WORDS[i % 2]} {WORDS[2 + i // 2 % 2]} {i}") for i in range(40)]
    path = captioned.write_csv(folder / "captions.csv", rows)
    path.write_bytes(path.read_bytes().replace(b"lighthouse 3\r", b"lighthous\xff 3\r"))
    return path


def command(*flags):
    status, out, err = runs.command("experiments.prepare_data", *flags)
    return status, out, err.splitlines()


def test_a_run_uses_a_tokenizer_trained_on_its_captions(table, tmp_path, capsys):
    folder = tmp_path / "tokenizer"
    status, out, _ = command(f"--source={table}", f"--train_tokenizer={folder}", "--vocab_size=600")
    assert status == 0
    summary = r".*: (\d+) token ids from 39 captions, 1 bad records left out, in .*--config.tokenizer=(.*) --config.*"
    size, spec = re.fullmatch(summary, out.strip()).groups()
    assert (load_tokenizer(folder)(WORDS) != 0).sum(axis=1).tolist() == [3] * len(WORDS)  # start, word, end
    overrides = f"{runs.OVERRIDES},text.vocab_size={size},text.context_length=6"
    config = runs.config(dataset=str(table), tokenizer=spec, model_overrides=overrides, total_steps=2, **NOTHING)
    with jax.numpy_dtype_promotion("standard"):
        train(config, tmp_path / "run")
    assert re.search(r"  truncated \d+ captions to 6 tokens\n", capsys.readouterr().out)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2 and np.isfinite(losses).all()
    with pytest.raises(ValueError, match=f"^expected a folder without a tokenizer, got {folder}; delete it or"):
        prepare_tokenizer(str(table), folder)


def test_the_split_chooses_the_captions(table, tmp_path):
    summary = prepare_tokenizer(str(table), tmp_path / "tokenizer", split="train[4:14]")
    assert " from 10 captions, 0 bad records left out" in summary


MISTAKES = {
    "two outputs": (("--source={table}", "--train_tokenizer={tmp}/x", "--output={tmp}/y"), "expected --source with ei"),
    "small vocabulary": (("--source={table}", "--train_tokenizer={tmp}/x", "--vocab_size=9"), "expected vocab_size > "),
    "no dataset": (("--source={tmp}/none.csv", "--train_tokenizer={tmp}/x"), "none.csv"),
    "a file": (("--source={table}", "--train_tokenizer={table}"), "cannot write to .*choose another --train_tokenizer"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line(mistake, table, tmp_path):
    flags, message = MISTAKES[mistake]
    status, out, err = command(*(flag.format(tmp=tmp_path, table=table) for flag in flags))
    assert (status, out) == (1, "")
    assert len(err) == 1 and re.match(f"error: .*{message}", err[0]), err
