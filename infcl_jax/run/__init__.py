"""Parts of a run, built from its configuration (see `docs/settings.md`)."""

from infcl_jax.run.data import next_batch, precomputed_towers, sample_source, training_data, training_source
from infcl_jax.run.model import TOKENIZER_FOLDER, image_resize, read_model_config, saved_config, text_tokenizer
from infcl_jax.run.parts import evaluation_suite, initial_state, loss, workload
from infcl_jax.run.verification import verify_run

__all__ = [
    "TOKENIZER_FOLDER",
    "evaluation_suite",
    "image_resize",
    "initial_state",
    "loss",
    "next_batch",
    "precomputed_towers",
    "read_model_config",
    "sample_source",
    "saved_config",
    "text_tokenizer",
    "training_data",
    "training_source",
    "verify_run",
    "workload",
]
