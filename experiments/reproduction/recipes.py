"""Cells of training runs, on built-in data and with a paper's settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.reproduction.target import Cell, cell
from infcl_jax.evaluation.suites import IMAGENET_VARIANTS, RETRIEVAL

SEEDS = (0, 1, 2)
IMAGENET = ("imagenet1k",)
# ImageNet, its six distribution shifts, and the retrieval sets that can be evaluated. Each is named, not their suite:
# a run without the data of a set ends before it trains.
ALL_SETS = (*IMAGENET, *IMAGENET_VARIANTS, *RETRIEVAL)
DIGITS = 1255  # training samples of the digits
# A model that a CPU core trains in seconds.
TINY_TOWERS = (
    "embed_dim=16,vision.width=32,vision.layers=1,vision.image_size=16,text.width=16,text.layers=1,"
    "text.context_length=36"
)
WIDER_TOWERS = TINY_TOWERS.replace("vision.width=32,vision.layers=1", "vision.width=64,vision.layers=2")

_DIGITS_RUN: dict[str, Any] = {
    "dataset": "digits",
    "model": "tiny",
    "num_workers": 0,
    "eval_every": 0,
    "optimizer.learning_rate": 2e-3,
    "optimizer.warmup_steps": 10,
    "optimizer.clip_norm": 1.0,
    # A constant rate does not depend on the length of a run, so that runs of several lengths share their compilation.
    "optimizer.schedule": "constant",
    "evaluation.zero_shot_dataset": "digits",
    "evaluation.zero_shot_split": "zero_shot",
}


def digits(
    batch: int,
    *,
    epochs: int = 8,
    seed: int = 0,
    samples: int | None = None,
    devices: int = 1,
    towers: str = TINY_TOWERS,
    **changes: Any,
) -> Cell:
    """Return a short run on the handwritten digits.

    Args:
      batch: batch size.
      epochs: epochs; "total_steps" among the changes replaces them.
      seed: training seed.
      samples: first samples that are used; None: all.
      devices: devices over which the batch is sharded.
      towers: changes to the model.
      **changes: further settings, with "__" for the dot.
    """
    renamed = _renamed(changes)
    length = {} if "total_steps" in renamed else {"epochs": epochs}
    steps = renamed.get("total_steps", (samples or DIGITS) // batch * epochs)
    warmup = min(_DIGITS_RUN["optimizer.warmup_steps"], steps // 2)
    own = {"batch_size": batch, "seed": seed, "model_overrides": towers, "optimizer.warmup_steps": warmup}
    arguments: dict[str, Any] = {"changes": _DIGITS_RUN | length | own | renamed}
    arguments |= {} if devices == 1 else {"devices": devices}
    return cell("short_run", **arguments, **({} if samples is None else {"samples": samples}))


def shapes(batch: int, *, seed: int = 0, samples_seen: int = 256_000, **changes: Any) -> Cell:
    """Return a run on the built-in shapes with the model of the quickstart."""
    renamed = _renamed(changes)
    steps = samples_seen // batch
    own = {"batch_size": batch, "seed": seed, "total_steps": steps, "eval_every": 0, "cpu_devices": 1}
    own |= {"optimizer.warmup_steps": min(100, steps // 4)}
    return cell("full_run", config="quickstart", changes=own | renamed)


def paper_run(
    config: str, *, arguments: Mapping[str, Any] | None = None, sets: Sequence[str] = IMAGENET, **changes: Any
) -> Cell:
    """Return a run with the settings of a shipped recipe.

    It is evaluated once, at its end.

    Args:
      config: file of `configs` with the first word of its argument, such as "inf_cl:cc3m".
      arguments: changes that the recipe's argument has, such as {"batch_size": 16384}; None values are left out.
      sets: benchmarks of the evaluation.
      **changes: further settings, with "__" for the dot; None values are left out.
    """
    given = [f"{name}={value}" for name, value in (arguments or {}).items() if value is not None]
    own = {"eval_every": 0, "evaluations": tuple(sets)}
    further = {name: value for name, value in _renamed(changes).items() if value is not None}
    return cell("full_run", config=",".join([config, *given]), changes=own | further)


def _renamed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes with the names of settings, which have a dot for "__"."""
    return {name.replace("__", "."): value for name, value in changes.items()}
