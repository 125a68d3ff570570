"""Exact contrastive training of CLIP-like models with very large batches in JAX/Flax."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from infcl_jax.grad_cache import Replay, cached_value_and_grad, chunk_rows, pairwise_scores_lse
from infcl_jax.losses import (
    SampleState,
    clip_loss,
    create_samples,
    distillation_loss,
    global_contrastive_loss,
    matryoshka,
    retrieval_loss,
    siglip_loss,
)
from infcl_jax.ops.pairwise_lse import PairwiseLSE, pairwise_lse
from infcl_jax.runtime.printable import escape_log_records

if TYPE_CHECKING:
    from infcl_jax import data, distributed, evaluation, models, planner, report, run, settings, training, verification
    from infcl_jax.inference.encoder import Encoder, load
    from infcl_jax.inference.text_encoder import TextEncoder
    from infcl_jax.run import notebook
    from infcl_jax.run.callbacks import Callback
    from infcl_jax.run.train import train
    from infcl_jax.runtime import exit_codes
    from infcl_jax.verification import verify

__all__ = [
    "Callback",
    "Encoder",
    "PairwiseLSE",
    "Replay",
    "SampleState",
    "TextEncoder",
    "cached_value_and_grad",
    "chunk_rows",
    "clip_loss",
    "create_samples",
    "data",
    "distillation_loss",
    "distributed",
    "evaluation",
    "exit_codes",
    "global_contrastive_loss",
    "load",
    "matryoshka",
    "models",
    "notebook",
    "pairwise_lse",
    "pairwise_scores_lse",
    "planner",
    "report",
    "retrieval_loss",
    "run",
    "settings",
    "siglip_loss",
    "train",
    "training",
    "verification",
    "verify",
]

escape_log_records(__name__)

try:
    __version__ = importlib.metadata.version("infcl_jax")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

# Modules with a public name of their own.
_MODULES = {"exit_codes": "infcl_jax.runtime.exit_codes", "notebook": "infcl_jax.run.notebook"}

# Modules of names that are imported on first use, like all modules in `__all__`: the whole library takes seconds to
# import, and the losses need little of it.
_LAZY = {
    "Callback": "infcl_jax.run.callbacks",
    "Encoder": "infcl_jax.inference.encoder",
    "TextEncoder": "infcl_jax.inference.text_encoder",
    "load": "infcl_jax.inference.encoder",
    "train": "infcl_jax.run.train",
    "verify": "infcl_jax.verification",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in __all__:
        return importlib.import_module(_MODULES.get(name, f"{__name__}.{name}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
