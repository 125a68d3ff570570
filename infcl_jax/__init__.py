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

if TYPE_CHECKING:
    from infcl_jax import notebook
    from infcl_jax.encoder import Encoder, load
    from infcl_jax.run.callbacks import Callback
    from infcl_jax.run.train import train
    from infcl_jax.verification import verify

__all__ = [
    "Callback",
    "Encoder",
    "PairwiseLSE",
    "Replay",
    "SampleState",
    "cached_value_and_grad",
    "chunk_rows",
    "clip_loss",
    "create_samples",
    "distillation_loss",
    "global_contrastive_loss",
    "load",
    "matryoshka",
    "notebook",
    "pairwise_lse",
    "pairwise_scores_lse",
    "retrieval_loss",
    "siglip_loss",
    "train",
    "verify",
]

try:
    __version__ = importlib.metadata.version("infcl_jax")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

# Names that stand on the whole library, whose import takes seconds; the losses need little of it.
_LAZY = {
    "Callback": "infcl_jax.run.callbacks",
    "Encoder": "infcl_jax.encoder",
    "load": "infcl_jax.encoder",
    "notebook": "infcl_jax.notebook",
    "train": "infcl_jax.run.train",
    "verify": "infcl_jax.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
