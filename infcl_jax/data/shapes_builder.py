"""TFDS dataset of shapes, rendered on all cores without TensorFlow."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import grain
import tensorflow_datasets as tfds

from infcl_jax.data import shapes
from infcl_jax.data.encode import encode_png
from infcl_jax.data.workers import worker_dataset

_ONE_THREAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)  # in each process


def _encode_group(split: str, image_size: int, indices: range) -> list[dict[str, Any]]:
    """Render samples, with their images as PNG bytes."""
    examples = []
    for index in indices:
        image, caption, label = shapes.render(split, index, image_size)
        examples.append({"image": encode_png(image), "caption": caption, "label": label})
    return examples


def _encode_all(split: str, count: int, image_size: int, group: int = 512) -> Iterator[list[dict[str, Any]]]:
    """Yield groups of encoded examples in order, encoded on all cores."""
    groups = [range(start, min(start + group, count)) for start in range(0, count, group)]
    encode = functools.partial(_encode_group, split, image_size)
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or len(groups) < 8:  # too few groups to amortize starting the processes
        yield from map(encode, groups)
        return
    dataset = worker_dataset(grain.MapDataset.source(groups).map(encode).to_iter_dataset(_ONE_THREAD), cores)
    with contextlib.closing(iter(dataset)) as encoded:
        yield from encoded


@dataclasses.dataclass(eq=False, kw_only=True)
class ShapesConfig(tfds.core.BuilderConfig):
    """Image side in pixels and number of examples per split."""

    image_size: int
    train: int
    validation: int
    zero_shot: int


class Shapes(tfds.core.GeneratorBasedBuilder):
    """TFDS dataset `shapes` of rendered samples.

    Record i of a split is `shapes.render(split, i, image_size)`.

    Prepare it with `file_format="array_record"`. Large configs are rendered by worker processes: call
    `download_and_prepare` from a module whose top level is guarded by `if __name__ == "__main__"`.
    """

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None  # nothing is downloaded, so TFDS needs no checksums
    BUILDER_CONFIGS: ClassVar[list[ShapesConfig]] = [
        ShapesConfig(name="quickstart", image_size=32, train=32768, validation=1024, zero_shot=1024),
        ShapesConfig(name="full", image_size=64, train=262144, validation=8192, zero_shot=8192),
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        side = self.builder_config.image_size
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(side, side, 3), encoding_format="png"),
                "caption": tfds.features.Text(),
                "label": tfds.features.ClassLabel(names=shapes.CLASS_NAMES),
            }
        )
        description = "Colored shapes, alone or in pairs, with captions from a grammar."
        return tfds.core.DatasetInfo(builder=self, description=description, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager  # nothing to download
        return {split: self._generate_examples(split) for split in shapes.SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        config = self.builder_config
        groups = _encode_all(split, getattr(config, split), config.image_size)
        yield from enumerate(itertools.chain.from_iterable(groups))
