"""Conversion of any source to tar files."""

from __future__ import annotations

import io
import json
import logging
import os
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from infcl_jax.data.prepare import check_writable
from infcl_jax.data.sources import load_source
from infcl_jax.data.sources.base import BadRecordError, Example, Source
from infcl_jax.data.sources.splits import parse_split

_SETTINGS = ".conversion.json"
_PROGRESS_SECONDS = 10.0
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
    dataset: str, output: str | Path, *, split: str = "train", data_dir: str | Path = "data", shard_samples: int = 10000
) -> str:
    """Write a dataset as tar files with an index.

    Encoded images are copied, pixels become PNG files. Labels are left out. Tar files that exist are kept, so an
    interrupted conversion continues.

    Args:
      dataset: dataset of `load_source`.
      output: folder of the tar files, created if missing; the dataset to train from.
      split: split of the dataset, which names the tar files.
      data_dir: directory of the prepared datasets.
      shard_samples: samples of each tar file.

    Returns:
      A one-line summary: samples, bad records, seconds and folder.

    Raises:
      FileNotFoundError, ValueError: see `load_source`; or the folder has another conversion.
      OSError: the folder is not writable.
    """
    if shard_samples < 1:
        raise ValueError(f"expected at least 1 sample in a tar file, got {shard_samples}")
    start = last = time.monotonic()
    source, output = load_source(dataset, split, data_dir), Path(output)
    check_writable(output, "--output")
    name = parse_split(split).name
    _check_settings(output / f"{name}{_SETTINGS}", [dataset, split, len(source), shard_samples])
    shards = [range(first, min(first + shard_samples, len(source))) for first in range(0, len(source), shard_samples)]
    bad = 0
    for number, samples in enumerate(shards):
        path = output / f"{name}-{number:05d}.tar"
        if not path.exists():
            bad += _write_shard(path, source, samples)
        if time.monotonic() - last > _PROGRESS_SECONDS:
            last = time.monotonic()
            _logger.info("%s: wrote %d of %d tar files, %.0f s", dataset, number + 1, len(shards), last - start)
    written = load_source(str(output), name)
    seconds = time.monotonic() - start
    return f"{dataset}: {len(written)} samples, {bad} bad records left out, in {seconds:.1f} s, {output}"


def _check_settings(path: Path, settings: Sequence[str | int]) -> None:
    if path.exists() and json.loads(path.read_text()) != settings:
        raise ValueError(f"expected an output folder for {settings}, got one of {path.read_text()}; choose another")
    path.write_text(json.dumps(settings))


def _write_shard(path: Path, source: Source, samples: range) -> int:
    """Write one tar file and return its number of bad records."""
    bad = 0
    temporary = path.with_name(f".{path.name}.tmp")
    with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for index in samples:
            try:
                example = source[index]
            except BadRecordError as error:
                _logger.warning("%s; left out", error)
                bad += 1
                continue
            for extension, data in _members(example):
                member = tarfile.TarInfo(f"{index:09d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    os.replace(temporary, path)
    return bad


def _members(example: Example) -> list[tuple[str, bytes]]:
    image = example["image"]
    data = image if isinstance(image, bytes) else _png(image)
    extension = next((name for signature, name in _SIGNATURES.items() if data.startswith(signature)), "webp")
    if len(example["captions"]) == 1:
        return [(extension, data), ("txt", example["caption"].encode())]
    # The caption for evaluation is the first one that is read.
    captions = [example["caption"], *(text for text in example["captions"] if text != example["caption"])]
    return [(extension, data), ("json", json.dumps({"captions": captions}).encode())]


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, format="png", compress_level=1)
    return buffer.getvalue()
