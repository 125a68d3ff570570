"""Cells of training runs, on built-in data and with a paper's settings."""

from typing import Any

from experiments.reproduction.target import Cell, cell

SEEDS = (0, 1, 2)
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
    renamed = {name.replace("__", "."): value for name, value in changes.items()}
    length = {} if "total_steps" in renamed else {"epochs": epochs}
    steps = renamed.get("total_steps", (samples or DIGITS) // batch * epochs)
    warmup = min(_DIGITS_RUN["optimizer.warmup_steps"], steps // 2)
    own = {"batch_size": batch, "seed": seed, "model_overrides": towers, "optimizer.warmup_steps": warmup}
    arguments: dict[str, Any] = {"changes": _DIGITS_RUN | length | own | renamed}
    arguments |= {} if devices == 1 else {"devices": devices}
    return cell("short_run", **arguments, **({} if samples is None else {"samples": samples}))


def shapes(batch: int, *, seed: int = 0, samples_seen: int = 256_000, **changes: Any) -> Cell:
    """Return a run on the built-in shapes with the model of the quickstart.

    Args:
      batch: batch size.
      seed: training seed.
      samples_seen: samples of all steps.
      **changes: further settings, with "__" for the dot.
    """
    renamed = {name.replace("__", "."): value for name, value in changes.items()}
    steps = samples_seen // batch
    own = {"batch_size": batch, "seed": seed, "total_steps": steps, "eval_every": 0, "cpu_devices": 1}
    own |= {"optimizer.warmup_steps": min(100, steps // 4)}
    return cell("full_run", config="quickstart", changes=own | renamed)


def inf_cl_run(model: str, dataset: str, samples: int, batch: int, **changes: Any) -> Cell:
    """Return a run with the settings of Inf-CL, section 4.1.

    Args:
      model: name of the model.
      dataset: dataset in TFDS's format in the data folder.
      samples: samples of the dataset.
      batch: batch size.
      **changes: further settings, with "__" for the dot.
    """
    renamed = {name.replace("__", "."): value for name, value in changes.items()}
    steps = 8 * samples // batch
    return cell(
        "full_run",
        changes={
            "dataset": dataset,
            "model": model,
            "model_overrides": "dtype=bfloat16",
            "batch_size": batch,
            "total_steps": steps,
            "augmentation.scale": (0.08, 1.0),
            "optimizer.name": "adafactor",
            "optimizer.learning_rate": 1e-3,
            "optimizer.weight_decay": 1e-4,
            "optimizer.beta1": 0.9,
            "optimizer.beta2": 0.95,
            "optimizer.warmup_steps": max(1, steps // 16),
            "grad_cache.chunk_size": min(batch, 8192),
            "grad_cache.residency": "host",
            "eval_every": 0,
            "evaluations": ("imagenet1k",),
        }
        | renamed,
    )


def disco_run(dataset: str, samples: int, epochs: int, batch: int, **changes: Any) -> Cell:
    """Return a run with the settings of DisCo-CLIP, section 5.1.

    Args:
      dataset: dataset in TFDS's format in the data folder.
      samples: samples of the dataset.
      epochs: epochs.
      batch: batch size.
      **changes: further settings, with "__" for the dot.
    """
    renamed = {name.replace("__", "."): value for name, value in changes.items()}
    steps = epochs * samples // batch
    return cell(
        "full_run",
        changes={
            "dataset": dataset,
            "model": "ViT-B/32",
            "model_overrides": "dtype=bfloat16,vision.remat=full,text.remat=full",
            "batch_size": batch,
            "total_steps": steps,
            "implementation": "disco",
            "optimizer.learning_rate": 5e-4 * batch / 32_768,
            "optimizer.beta2": 0.98,
            "optimizer.warmup_steps": min(2000, steps),
            "eval_every": 0,
            "evaluations": ("imagenet1k",),
        }
        | renamed,
    )
