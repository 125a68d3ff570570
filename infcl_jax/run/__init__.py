"""Parts of a run, built from its configuration (see `docs/settings.md`)."""

from infcl_jax.inference.pretrained_tokenizer import TOKENIZER_FOLDER
from infcl_jax.run.model import read_model_config, saved_config
from infcl_jax.run.parts import (
    evaluation_suite,
    initial_state,
    loss,
    next_batch,
    sample_source,
    text_tokenizer,
    training_data,
    training_source,
    workload,
)
from infcl_jax.run.verification import verify_run

__all__ = [
    "TOKENIZER_FOLDER",
    "evaluation_suite",
    "initial_state",
    "loss",
    "next_batch",
    "read_model_config",
    "sample_source",
    "saved_config",
    "text_tokenizer",
    "training_data",
    "training_source",
    "verify_run",
    "workload",
]
