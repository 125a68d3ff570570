r"""Benchmark of OpenCLIP's encoding of images, for comparison with `experiments.embed`.

    python -m experiments.benchmarks.open_clip_encode --data='shards-{00000..00041}.tar' --model=ViT-B-32 --workers=16

Reads tar files by `open_clip_train.data.get_wds_dataset` with the transform of evaluations. Encodes all images to
normalized features in host memory, as OpenCLIP's evaluation does. The weights are random. Prints a JSON object.
Needs `pip install open_clip_torch 'webdataset<=0.2.86' pandas absl-py`, not JAX.
"""

import functools
import json
import time
from collections.abc import Iterable
from typing import Any

from absl import flags

from experiments import command_line
from experiments.benchmarks.open_clip import MODELS, PRECISIONS, autocast, import_packages
from experiments.benchmarks.open_clip_data import open_data


def encode(model: Any, batches: Iterable[tuple[Any, Any]], precision: str) -> dict[str, float]:
    """Encode the images of all batches.

    Returns:
      Figures by name: `images`; `seconds` from the start of the reading to the last feature; `first_batch_s`, until the
      features of the first batch; `images_per_second` after that batch.
    """
    torch, open_clip = import_packages()
    device = next(model.parameters()).device
    dtype = open_clip.get_input_dtype(precision)
    context = autocast(precision, device)
    rows, ends, start = [], [], time.perf_counter()
    with torch.inference_mode():
        for images, _ in batches:
            images = images.to(device=device, dtype=dtype, non_blocking=True)
            with context():
                features = model.encode_image(images, normalize=True)
            rows.append(len(features.float().cpu()))
            ends.append(time.perf_counter())
    if len(rows) < 2:
        raise ValueError(f"expected at least 2 batches, got {len(rows)}; pass more data or a smaller --batch")
    return {
        "images": sum(rows),
        "seconds": ends[-1] - start,
        "first_batch_s": ends[0] - start,
        "images_per_second": sum(rows[1:]) / (ends[-1] - ends[0]),
    }


def benchmark_from_flags(values: flags.FlagValues) -> None:
    """Run the benchmark with the settings of the flags."""
    if not values.data:
        raise ValueError("expected --data, the tar files, got none")
    torch, open_clip = import_packages()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = open_clip.create_model(values.model, precision=values.precision, device=device).eval()
    size = model.visual.image_size
    size = size if isinstance(size, int) else size[0]
    loader = open_data(values.data, values.batch, values.workers, size, train=False)
    print(json.dumps(encode(model, loader, values.precision)))


if __name__ == "__main__":  # not at import: other commands define flags of the same names
    flags.DEFINE_string("data", None, "Tar files, such as shards-{00000..00041}.tar.")
    flags.DEFINE_enum("model", MODELS[0], MODELS, "Model name of OpenCLIP.")
    flags.DEFINE_enum("precision", PRECISIONS[0], PRECISIONS, "Precision, as OpenCLIP's flag.")
    flags.DEFINE_integer("batch", 256, "Images encoded at once.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Worker processes.", lower_bound=1)
    command_line.run(functools.partial(benchmark_from_flags, flags.FLAGS))
