"""Exact contrastive training of CLIP-like models with very large batches in JAX/Flax.

Names are imported on first use. The whole library takes seconds to import, and a process handles stop signals before.
"""

import importlib
from typing import TYPE_CHECKING, Any

from infcl_jax.runtime.printable import escape_log_records

if TYPE_CHECKING:
    from infcl_jax import data, distributed, evaluation, models, planner, report, run, settings, training, verification
    from infcl_jax.grad_cache import Replay, cached_value_and_grad, chunk_rows, pairwise_scores_lse
    from infcl_jax.inference.encoder import Encoder
    from infcl_jax.inference.text_encoder import TextEncoder
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
    from infcl_jax.run import notebook
    from infcl_jax.run.callbacks import Callback
    from infcl_jax.run.embed import embed
    from infcl_jax.run.evaluate import evaluate, evaluate_weights
    from infcl_jax.run.export import export
    from infcl_jax.run.load import load
    from infcl_jax.run.plan import plan
    from infcl_jax.run.train import train
    from infcl_jax.runtime import exit_codes
    from infcl_jax.verification import verify

    __version__: str

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
    "embed",
    "evaluate",
    "evaluate_weights",
    "evaluation",
    "exit_codes",
    "export",
    "global_contrastive_loss",
    "load",
    "matryoshka",
    "models",
    "notebook",
    "pairwise_lse",
    "pairwise_scores_lse",
    "plan",
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

# Modules of the public names that are not modules themselves.
_NAMES = {
    "grad_cache": ("Replay", "cached_value_and_grad", "chunk_rows", "pairwise_scores_lse"),
    "inference.encoder": ("Encoder",),
    "inference.text_encoder": ("TextEncoder",),
    "losses": (
        "SampleState",
        "clip_loss",
        "create_samples",
        "distillation_loss",
        "global_contrastive_loss",
        "matryoshka",
        "retrieval_loss",
        "siglip_loss",
    ),
    "ops.pairwise_lse": ("PairwiseLSE", "pairwise_lse"),
    "run.callbacks": ("Callback",),
    "run.embed": ("embed",),
    "run.evaluate": ("evaluate", "evaluate_weights"),
    "run.export": ("export",),
    "run.plan": ("plan",),
    "run.load": ("load",),
    "run.train": ("train",),
    "verification": ("verify",),
}
_SOURCES = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("grad_cache", "losses", "ops")  # further ones that `import infcl_jax` alone makes available
_SUBMODULES = {"exit_codes": "runtime.exit_codes", "notebook": "run.notebook"}


def __getattr__(name: str) -> Any:
    if name in _SOURCES:
        return getattr(importlib.import_module(f"{__name__}.{_SOURCES[name]}"), name)
    if name in __all__ or name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{_SUBMODULES.get(name, name)}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES, "__version__"})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"
