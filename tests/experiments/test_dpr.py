"""The DPR recipe: frozen settings and the model that they describe."""

import jax
import pytest
import runs

from configs import base, dpr
from infcl_jax import run
from infcl_jax.models import build_model, variable_shapes
from infcl_jax.run.base import make_run
from infcl_jax.settings import check_config, make_config

BERT = 108_891_648  # parameters of bert-base-uncased without its pooler
PAPER = {
    "batch_size": 128,
    "checkpoint_every": 460,
    "dataset": "data/dpr/biencoder-nq-train.json",
    "epochs": 40,
    "eval_every": 0,
    "evaluation.batch_size": 1024,
    "init.text": "hf-hub:google-bert/bert-base-uncased",
    "loss": "retrieval",
    "model": "bert-base-uncased",
    "optimizer.beta2": 0.999,
    "optimizer.clip_norm": 2.0,
    "optimizer.eps": 1e-8,
    "optimizer.learning_rate": 2e-5,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 1237,
    "optimizer.weight_decay": 0.0,
    "precision": "fp32",
    "text_retrieval.corpus": "data/dpr/psgs_w100.tsv",
    "text_retrieval.questions": "data/dpr/nq-test.qa.csv",
    "text_retrieval.separator": " [SEP] ",
}


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ("nq", (16, 8)),
        ("query_chunk=32,nq,passage_chunk=4", (32, 4)),
        ("nq,gpus=4", (64, 32)),
        ("nq,gpus=8", (None, None)),
    ],
)
def test_settings_are_frozen(changes, chunks):
    config = dpr.get_config(changes)
    check_config(config)
    defaults = runs.flat(base.get_config())
    changed = {name: value for name, value in runs.flat(config).items() if value != defaults[name]}
    sizes = dict(zip(("grad_cache.chunk_size", "grad_cache.passage_chunk_size"), chunks, strict=True))
    assert changed == PAPER | {name: size for name, size in sizes.items() if size is not None}
    assert config.text_retrieval.hard_negatives == 1 and config.text_retrieval.positive == "first"


def test_the_model_has_two_berts():
    model = make_run(make_config(dpr.get_config())).model_config
    assert (model.text.dropout, model.text.context_length, model.text.pool) == (0.1, 256, "cls")
    shapes = variable_shapes(build_model(model))["params"]
    assert sum(shape.size for shape in jax.tree.leaves(shapes)) == 2 * BERT


def test_a_file_of_ones_own_needs_no_other_setting():
    own, paper = runs.flat(dpr.get_config()), runs.flat(dpr.get_config("nq"))
    check_config(dpr.get_config())
    assert {name for name, value in own.items() if value != paper[name]} == {
        "dataset",
        "optimizer.warmup_steps",
        "text_retrieval.corpus",
        "text_retrieval.questions",
    }
    assert own["optimizer.warmup_steps"] == 0 and own["text_retrieval.corpus"] is None


def test_the_tiny_model_needs_no_file_but_the_data():
    config = dpr.get_config("tiny")
    check_config(config)
    assert (config.tokenizer, config.init.text) == (None, None)
    tokenizer, model = run.text_tokenizer(config), make_run(make_config(config)).model_config
    assert (tokenizer.kind, tokenizer.context_length, model.text.vocab_size) == ("bytes", 256, 259)


@pytest.mark.parametrize("changes", ["steps=3", "gpus=0", "query_chunk=a", "nq=1"])
def test_a_mistake_in_an_argument_is_named(changes):
    with pytest.raises(ValueError, match=r"^expected nq, tiny, or gpus, query_chunk or passage_chunk as a positive"):
        dpr.get_config(changes)
