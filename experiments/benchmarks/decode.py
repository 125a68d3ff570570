"""Benchmark of image decoding on one core and on the GPU.

    python -m experiments.benchmarks.decode --decode_seconds=10

Decodes synthetic photographs (640 x 480 pixels, quality 90, 4:2:0, about 65 kB) and resizes a random crop of 90 to
100 % of their area to 224 x 224, bicubic. OpenCLIP's training transform runs on the same files where `open_clip_torch`
and torchvision are installed. The ways take turns, so that a slow moment of the machine affects all of them. On a GPU
with the extra `gpu-decode`, its decoder follows, in batches of `--decode_batch` images.
"""

import functools
import io
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import flags
from PIL import Image

from experiments import command_line
from experiments.benchmarks.photographs import QUALITY, encode, photograph
from infcl_jax import distributed
from infcl_jax.data import Augmentation
from infcl_jax.data.decode import choose_decoder, decode, gpu_decoder_installed
from infcl_jax.data.decode.device import DeviceDecoder
from infcl_jax.data.decode.nvimgcodec import open_decoders
from infcl_jax.data.decode.pillow import decode_crop

_SECONDS = flags.DEFINE_float("decode_seconds", 10.0, "Seconds for each way of decoding.", lower_bound=0.0)
_FILES = flags.DEFINE_integer("decode_files", 64, "Number of different files.", lower_bound=1)

_BATCH = flags.DEFINE_integer("decode_batch", 1024, "Images that the GPU decodes in a call.", lower_bound=1)

_IMAGE_SIZE = 224
_OPEN_CLIP = "OpenCLIP's training transform"

Way = Callable[[bytes, np.random.Generator], Any]


def ways() -> dict[str, Way]:
    """Return the ways of decoding by name; OpenCLIP's only where it is installed."""
    augmentation = Augmentation()
    decoders: dict[str, Way] = {
        "decode and crop, reduced by the DCT": lambda data, rng: decode_crop(
            data, functools.partial(augmentation.draw, rng=rng), _IMAGE_SIZE
        ),
        "decode in full, then crop": lambda data, rng: augmentation(decode(data), _IMAGE_SIZE, rng),
    }
    try:
        import torch
        from open_clip.transform import image_transform
    except ImportError:
        return decoders
    torch.set_num_threads(1)
    transform = image_transform(_IMAGE_SIZE, is_train=True)
    return decoders | {_OPEN_CLIP: lambda data, rng: transform(Image.open(io.BytesIO(data)))}


def rates(ways: Mapping[str, Way], files: list[bytes], seconds: float, rounds: int = 5) -> dict[str, float]:
    """Measure the median images/s of each way, over rounds in which they take turns."""
    rng = np.random.default_rng(0)
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            count, start = 0, time.perf_counter()
            while count == 0 or time.perf_counter() - start < seconds / rounds:
                way(files[count % len(files)], rng)
                count += 1
            measured[name].append(count / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in measured.items()}


def device_rate(decoder: DeviceDecoder, files: list[bytes], batch: int, seconds: float) -> float:
    """Measure the images/s of a device's decoder, after its first call."""
    rng = np.random.default_rng(0)
    encoded = [np.frombuffer(files[row % len(files)], np.uint8) for row in range(batch)]
    width, height = Image.open(io.BytesIO(files[0])).size  # of all files
    boxes = [Augmentation().draw(height, width, rng).box for _ in range(batch)]
    calls, start, previous = -1, 0.0, None
    while calls < 1 or time.perf_counter() - start < seconds:
        wait, refused = decoder(encoded, np.array(boxes, np.float32), _IMAGE_SIZE)
        if previous is not None:  # as in training, the next batch is being decoded
            previous()
        previous = wait
        if refused:
            raise ValueError(f"expected a decoder of JPEGs, got one that refuses {len(refused)} of {batch}")
        calls += 1
        start = start or time.perf_counter()  # the first call starts the decoder
    return calls * batch / (time.perf_counter() - start)


def main() -> None:
    """Print the rate of each way and its ratio to OpenCLIP's."""
    distributed.initialize(gpu_decode=gpu_decoder_installed())
    files = [encode(photograph(seed), quality=QUALITY, subsampling=2) for seed in range(_FILES.value)]
    print(f"{len(files)} JPEGs of {statistics.mean(map(len, files)) / 1e3:.0f} kB, one of {os.cpu_count()} CPU cores")
    measured = rates(ways(), files, _SECONDS.value)
    baseline = measured.get(_OPEN_CLIP)
    for name, rate in measured.items():
        ratio = f" ({rate / baseline:.2f} times OpenCLIP's)" if baseline else ""
        print(f"{rate:7.1f} images/s  {name}{ratio}")
    if baseline is None:
        print("OpenCLIP's transform is not installed: pip install open_clip_torch torchvision")
    if choose_decoder("auto", "none") == "nvimgcodec":
        device = jax.local_devices()[0]
        decoder = open_decoders([device], _BATCH.value, _IMAGE_SIZE)[device]
        rate = device_rate(decoder, files, _BATCH.value, _SECONDS.value)
        print(f"{rate:7.1f} images/s  nvImageCodec on one {device.device_kind}")


if __name__ == "__main__":
    command_line.run(main)
