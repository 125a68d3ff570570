"""Datasets of synthetic photographs, for benchmarks that read files."""

import csv
import functools
import io
import multiprocessing
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from absl import flags
from PIL import Image
from pyarrow import parquet

_DISTINCT = 256  # distinct images by default; a larger dataset repeats them

DATA = flags.DEFINE_string("data", None, "Dataset to read, such as shards-{00000..00041}.tar.")
IMAGES = flags.DEFINE_integer("images", 4096, "Samples of a synthetic dataset.", lower_bound=1)
DISTINCT = flags.DEFINE_integer("distinct", _DISTINCT, "Largest number of distinct images in it.", lower_bound=1)

SIZE = (640, 480)  # width and height, in pixels
QUALITY = 90  # of JPEG; a file has 65 kB
_SERIAL = 256  # largest number of images that one process draws
_ROW_GROUP = 64  # rows of a parquet row group, which is decoded at once
_WORDS = ("a photo of", "two", "red", "old", "dog", "house", "in the rain", "on the beach", "near", "a small", "boat")

Sample = tuple[bytes, str]


def samples(count: int, size: tuple[int, int] = SIZE, distinct: int = _DISTINCT) -> list[Sample]:
    """Draw JPEG files and captions.

    Returns:
      (JPEG file, caption) pairs.
    """
    draw, seeds = functools.partial(_draw, size=size), range(min(count, distinct))
    if len(seeds) <= _SERIAL:
        images = list(map(draw, seeds))
    else:
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
            images = list(processes.map(draw, seeds, chunksize=64))
    rng = np.random.default_rng(0)
    captions = [" ".join(rng.choice(_WORDS, 8)) for _ in range(count)]
    return [(images[number % len(images)], caption) for number, caption in enumerate(captions)]


def _draw(seed: int, size: tuple[int, int]) -> bytes:
    width, height = size
    return encode(photograph(seed, height, width), quality=QUALITY)


def photograph(seed: int, height: int = 480, width: int = 640) -> Image.Image:
    """Make a synthetic photograph: detail of 4, 16 and 64 pixels, and noise."""
    rng, levels = np.random.default_rng(seed), np.zeros((height, width, 3), np.float32)
    for scale in (4, 16, 64):
        shape = (height // scale + 2, width // scale + 2, 3)
        coarse = Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8))
        levels += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) * (scale / 84)
    levels += rng.normal(0, 4, levels.shape)
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def encode(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """Encode an image as a file; options are those of Pillow's `save`."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def write(kind: str, folder: Path, pairs: Sequence[Sample], shards: int) -> str:
    """Write a dataset, in place of the folder's.

    Returns:
      The dataset, for `infcl_jax.data.load_source` with `folder` as the data directory.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return KINDS[kind](folder, pairs, shards)


def _write_tar(folder: Path, pairs: Sequence[Sample], shards: int) -> str:
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number, (image, caption) in list(enumerate(pairs))[shard::shards]:
                for extension, data in (("jpg", image), ("txt", caption.encode())):
                    member = tarfile.TarInfo(f"{number:09d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def _write_images(folder: Path, pairs: Sequence[Sample]) -> list[str]:
    names = [f"{number:09d}.jpg" for number in range(len(pairs))]
    for name, (image, _) in zip(names, pairs, strict=True):
        (folder / name).write_bytes(image)
    return names


def _write_table(folder: Path, pairs: Sequence[Sample], shards: int) -> str:
    names = _write_images(folder, pairs)
    path = folder / "captions.csv"
    with path.open("w", newline="") as file:
        rows = zip(names, (caption for _, caption in pairs), strict=True)
        csv.writer(file).writerows([("filepath", "caption"), *rows])
    return str(path)


def _write_folder(folder: Path, pairs: Sequence[Sample], shards: int) -> str:
    for name, (_, caption) in zip(_write_images(folder, pairs), pairs, strict=True):
        (folder / name).with_suffix(".txt").write_text(caption)
    return str(folder)


def _write_parquet(folder: Path, pairs: Sequence[Sample], shards: int) -> str:
    for shard in range(shards):
        images, captions = zip(*pairs[shard::shards], strict=True)
        table = pa.table({"image": pa.array(images, pa.binary()), "caption": pa.array(captions)})
        parquet.write_table(table, folder / f"{shard:05d}.parquet", row_group_size=_ROW_GROUP)
    return f"{folder}/*.parquet"


def _write_array_record(folder: Path, pairs: Sequence[Sample], shards: int) -> str:
    import tensorflow_datasets as tfds  # takes seconds to import

    class Photographs(tfds.core.GeneratorBasedBuilder):
        """Samples as a TFDS dataset."""

        VERSION = tfds.core.Version("1.0.0")
        url_infos = None

        def _info(self) -> Any:
            image = tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg")
            features = tfds.features.FeaturesDict({"image": image, "caption": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator[Any]:
            for number, (image, caption) in enumerate(pairs):
                yield number, {"image": io.BytesIO(image), "caption": caption}

    Photographs(data_dir=str(folder), file_format="array_record").download_and_prepare()
    return "photographs"


KINDS: dict[str, Callable[[Path, Sequence[Sample], int], str]] = {
    "tar": _write_tar,
    "table": _write_table,
    "folder": _write_folder,
    "parquet": _write_parquet,
    "array_record": _write_array_record,
}
