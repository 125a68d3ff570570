"""Conversion of any source to tar files or array_record."""

import concurrent.futures
import contextlib
import functools
import io
import itertools
import json
import logging
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from infcl_jax.data.decode.api import decode_example, pixels
from infcl_jax.data.decode.pillow import MAX_PIXELS
from infcl_jax.data.encode import encode_jpeg, encode_png
from infcl_jax.data.prepare import check_writable
from infcl_jax.data.sources import load_source
from infcl_jax.data.sources.base import BadRecordError, Example, Source, dropped_samples, format_counts
from infcl_jax.data.sources.splits import parse_split
from infcl_jax.runtime.file_io import read_json, remove_unfinished, replace_text, replacing
from infcl_jax.runtime.progress import Progress

FILE_FORMATS = ("tar", "array_record")

_SETTINGS = ".conversion.json"
_VERSION = "1.0.0"  # of a TFDS dataset
_READ_AHEAD = 256  # samples in memory
_SIGNATURES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
}

_logger = logging.getLogger(__name__)


def convert(
    dataset: str,
    output: str | Path,
    *,
    split: str = "train",
    data_dir: str | Path = "data",
    shard_samples: int = 10000,
    max_side: int | None = None,
    file_format: str = "tar",
    max_image_pixels: int = MAX_PIXELS,
) -> str:
    """Write a dataset as tar files with an index, or as array_record.

    Encoded images are copied, pixels become PNG files. Labels are left out. Tar files that exist are kept, so an
    interrupted conversion to tar continues. Each bad record is left out, with a warning that gives the reason.

    Examples:
      >>> summary = infcl_jax.data.convert("photos", "tars", shard_samples=4)
      >>> len(load_source("tars", "train"))
      8

    Args:
      dataset: dataset of `load_source`.
      output: folder of the files, created if missing. A folder of tar files is the dataset to train from. In
        array_record format, its last component is the TFDS dataset in the data directory before it.
      split: split of the dataset, which names the files.
      data_dir: directory of the prepared datasets.
      shard_samples: samples of each file.
      max_side: longest side of the images, in pixels. Larger images are resized (bicubic, antialiased) and become JPEG
        files. None: all images are copied, without decoding.
      file_format: one of `FILE_FORMATS`.
      max_image_pixels: largest number of pixels of an image to resize; larger ones are bad records.

    Returns:
      A one-line summary: samples, seconds, folder and the number of samples left out by reason.

    Raises:
      FileNotFoundError, ValueError: see `load_source`; an argument is out of range, or the folder has another
        conversion.
      OSError: the folder is not writable.
    """
    if shard_samples < 1:
        raise ValueError(f"expected at least 1 sample in a file, got {shard_samples}")
    if max_side is not None and max_side < 1:
        raise ValueError(f"expected max_side >= 1, got {max_side}")
    if file_format not in FILE_FORMATS:
        raise ValueError(f"expected file_format to be one of {', '.join(FILE_FORMATS)}, got {file_format!r}")
    start = time.monotonic()
    source, output, name = load_source(dataset, split, data_dir), Path(output), parse_split(split).name
    check_writable(output, "--output")
    read = functools.partial(_read, source, max_side, max_image_pixels)
    shards = [range(first, min(first + shard_samples, len(source))) for first in range(0, len(source), shard_samples)]
    if file_format == "tar":
        path, settings = output / f"{name}{_SETTINGS}", [dataset, split, len(source), shard_samples, max_side]
        if path.exists() and (former := read_json(path, list)) != settings:
            raise ValueError(f"expected an output folder for {settings}, got one of {former}; choose another")
        replace_text(path, json.dumps(settings))
        _write_tars(output, name, source, shards, read)
        written = load_source(str(output), name)
    else:
        _write_records(output, name, _good_examples(range(len(source)), read), len(shards))
        written = load_source(output.name, name, output.parent)
    left_out = dropped_samples(source)
    if len(written) < len(source):  # also in the tar files that an interrupted conversion wrote
        left_out["bad record"] = len(source) - len(written)
    line = f"{dataset}: {len(written)} samples in {time.monotonic() - start:.1f} s, {output}"
    return f"{line}; left out: {format_counts(left_out)}" if left_out else line


def _write_tars(
    output: Path, split: str, source: Source, shards: Sequence[range], read: Callable[[int], Example]
) -> None:
    """Write the missing tar files and log the progress."""
    paths = {output / f"{split}-{number:05d}.tar": samples for number, samples in enumerate(shards)}
    missing = [path for path in paths if not path.exists()]
    done = len(shards) - len(missing)
    progress = Progress(f"{source.name}: wrote", len(shards), "tar files", _logger.info, done=done)
    remove_unfinished(output / f"{split}-?????.tar")
    for path in missing:
        with replacing(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
            for index, example in _good_examples(paths[path], read):
                for extension, data in _members(example):
                    member = tarfile.TarInfo(f"{index:09d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        progress.add()


def _good_examples(samples: range, read: Callable[[int], Example]) -> Iterator[tuple[int, Example]]:
    """Read good records with their indices in threads; log the bad ones.

    The caption for evaluation is the first one, where readers expect it.
    """
    with concurrent.futures.ThreadPoolExecutor() as threads:
        for indices in itertools.batched(samples, _READ_AHEAD):
            for index, future in [(index, threads.submit(read, index)) for index in indices]:
                try:
                    example = future.result()
                except BadRecordError as error:
                    _logger.warning("%s; left out", error)
                    continue
                others = (text for text in example["captions"] if text != example["caption"])
                yield index, {**example, "captions": (example["caption"], *others)}


def _read(source: Source, max_side: int | None, max_pixels: int, index: int) -> Example:
    """Read an example; resize its image to at most `max_side` pixels, if not None."""
    example = source[index]
    if max_side is None:
        return example
    image = decode_example(source, index, example, functools.partial(pixels, max_pixels=max_pixels))["image"]
    height, width, _ = image.shape
    if max(height, width) <= max_side:
        return example
    size = tuple(max(1, round(side * max_side / max(height, width))) for side in (width, height))
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    return {**example, "image": encode_jpeg(np.asarray(resized))}


def _members(example: Example) -> list[tuple[str, bytes]]:
    image = example["image"]
    data = image if isinstance(image, bytes) else encode_png(image)
    extension = next((name for signature, name in _SIGNATURES.items() if data.startswith(signature)), "webp")
    if len(example["captions"]) == 1:
        return [(extension, data), ("txt", example["caption"].encode())]
    return [(extension, data), ("json", json.dumps({"captions": example["captions"]}).encode())]


class _Captioned(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Encoded images with their captions, in the given order."""

    VERSION = tfds.core.Version(_VERSION)
    url_infos = None  # nothing is downloaded, so TFDS needs no checksums

    def __init__(self, name: str, split: str, examples: Iterable[tuple[int, Example]], **options: Any):
        self.name, self._split, self._examples = name, split, examples
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {"image": tfds.features.Image(), "captions": tfds.features.Sequence(tfds.features.Text())}
        )
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager  # nothing to download
        return {self._split: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, example in self._examples:
            image = example["image"]
            # TFDS copies the contents of a file, and needs TensorFlow to encode pixels.
            file = io.BytesIO(image if isinstance(image, bytes) else encode_png(image))
            yield index, {"image": file, "captions": list(example["captions"])}


def _write_records(output: Path, split: str, examples: Iterable[tuple[int, Example]], shards: int) -> None:
    """Write one split as the TFDS dataset `output.name` in the data directory `output.parent`.

    An interrupted call leaves no dataset that looks complete.
    """
    if not output.name.isidentifier():
        raise ValueError(f"expected letters, digits and _ in the name of a TFDS dataset, got {output.name!r}")
    if (output / _VERSION).exists():
        raise ValueError(f"expected a new dataset, got {output}, which exists; choose another --output")
    builder = _Captioned(output.name, split, examples, data_dir=str(output.parent), file_format="array_record")
    with contextlib.redirect_stdout(io.StringIO()):  # hides the progress of TFDS
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards))
