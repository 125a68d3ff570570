r"""Benchmark of OpenCLIP's data pipeline, for comparison with `experiments.benchmarks.data`, which runs it.

    python -m experiments.benchmarks.open_clip_data --data='shards-{00000..00041}.tar' --workers=16 --batch=1024

Reads tar files by `open_clip_train.data.get_wds_dataset` with the training transform. Prints a JSON object. Needs
`pip install open_clip_torch 'webdataset<=0.2.86' pandas absl-py`, not JAX.
"""

import functools
import importlib
import itertools
import json
import time
import types
from typing import Any

from absl import flags

from experiments import command_line

_SAMPLES = 10**9  # of an epoch; it never ends
_BUFFERED_BATCHES = 2  # of each worker, PyTorch's default


def open_data(pattern: str, batch: int, workers: int, image_size: int, *, train: bool = True) -> Any:
    """Open OpenCLIP's loader of batches.

    Args:
      pattern: tar files, at least as many as workers.
      batch: rows of a batch.
      workers: worker processes.
      image_size: side of the images, in pixels.
      train: whether to read for training, without end and with the training transform, or every sample once for an
        evaluation.
    """
    try:
        open_clip = importlib.import_module("open_clip")
        data = importlib.import_module("open_clip_train.data")
    except ImportError as error:
        raise ImportError(
            f"expected OpenCLIP's pipeline, got: {error}; pip install open_clip_torch 'webdataset<=0.2.86' pandas"
        ) from error
    shards = len(data.expand_urls(pattern)[0])
    if shards < workers:
        raise ValueError(f"expected at least as many tar files as the {workers} workers, got {shards}")
    args = types.SimpleNamespace(
        train_data=pattern,
        train_num_samples=_SAMPLES,
        val_data=pattern,
        val_num_samples=None,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        batch_size=batch,
        workers=workers,
        world_size=1,
        seed=0,
    )
    transform = open_clip.image_transform(image_size, is_train=train)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    return data.get_wds_dataset(args, transform, is_train=train, tokenizer=tokenizer).dataloader


def measure(loader: Any, workers: int, seconds: float) -> dict[str, float]:
    """Measure the rate of a loader."""
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first_batch = time.perf_counter() - start
    for _ in range(_BUFFERED_BATCHES * workers):  # read before the start
        next(batches)
    images, start = 0, time.perf_counter()
    for number in itertools.count(1):
        images += len(next(batches)[0])
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and number % workers == 0:  # the workers return batches in turn
            break
    return {"images_per_second": images / elapsed, "first_batch_s": first_batch}


def benchmark_from_flags(values: flags.FlagValues) -> None:
    """Run the benchmark with the settings of the flags."""
    if not values.data:
        raise ValueError("expected --data, the tar files, got none")
    loader = open_data(values.data, values.batch, values.workers, values.image_size)
    print(json.dumps(measure(loader, values.workers, values.seconds)))


if __name__ == "__main__":  # not at import: other commands define flags of the same names
    flags.DEFINE_string("data", None, "Tar files, such as shards-{00000..00041}.tar.")
    flags.DEFINE_integer("batch", 1024, "Rows of a batch.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Worker processes.", lower_bound=1)
    flags.DEFINE_integer("image_size", 224, "Side of the images, in pixels.", lower_bound=1)
    flags.DEFINE_float("seconds", 10.0, "Least duration of the measurement.", lower_bound=0.0)
    command_line.run(functools.partial(benchmark_from_flags, flags.FLAGS))
