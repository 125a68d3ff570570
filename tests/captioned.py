"""Small captioned images in folders, tables and tar files."""

import csv
import io
import tarfile

import numpy as np
from PIL import Image

from infcl_jax.data import BadRecordError, load_source


def jpeg(number, size=(12, 10)):
    """JPEG whose pixels depend on a number."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1] // 2, size[0] // 2, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(buffer, format="jpeg")
    return buffer.getvalue()


def samples(count, start=0):
    """(key, {extension: contents}) of samples whose captions tell their number."""
    return [(f"{i:06d}", {"jpg": jpeg(i), "txt": f"caption {i}".encode()}) for i in range(start, start + count)]


def members(samples):
    return [(f"{key}.{extension}", data) for key, contents in samples for extension, data in contents.items()]


def write_tar(path, members, format=tarfile.GNU_FORMAT):
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_folder(folder, samples):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in members(samples):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_csv(path, rows, columns=("filepath", "caption"), delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([columns, *rows])
    return path


def read_all(source):
    """Every example, or the message of its `BadRecordError`."""
    result = []
    for index in range(len(source)):
        try:
            result.append(source[index])
        except BadRecordError as error:
            result.append(str(error))
    return result


def load(path, split="train"):
    return load_source(str(path), split)


def captions(source):
    return [source[index]["caption"] for index in range(len(source))]


def keys(source):
    return [source.key(index) for index in range(len(source))]
