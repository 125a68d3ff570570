"""Reader of PyTorch checkpoints without PyTorch and without running their code."""

import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from infcl_jax.models.convert.torch_pickle import StridedTensor, UnsupportedError, load_pickle
from infcl_jax.runtime.file_io import open_regular
from infcl_jax.runtime.printable import printable

_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_STATE_KEYS = ("state_dict", "model")  # where training scripts, OpenCLIP's among them, store the model's tensors
_ADVICE = "save its state_dict with safetensors.torch.save_file, in an environment with PyTorch"
_PICKLE_BYTES = 8 * 2**20  # 250 bytes a tensor; Python objects take up to 64 times the bytes of their pickle
_DIMENSIONS = 32  # the limit of NumPy 1; PyTorch's is 64
_SHOWN = 100  # characters of a name in an error
_DAMAGE = (ValueError, zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, EOFError, OverflowError)


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """Read the state dict in a zip file of `torch.save`, which may be an item `state_dict` or `model` of a dictionary.

    Only tensors, containers and numbers are unpickled: any other class of the file is an error, so no code of the file
    runs. A prefix "module." of all names, which distributed training adds, is removed. Members are stored, as
    `torch.save` does, so that the tensors take no more memory than the file.

    Raises:
      ValueError: the file has another format, holds objects of other classes, or is damaged.
      OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        try:
            if not zipfile.is_zipfile(file):
                raise UnsupportedError("expected a zip file of torch.save, got one written before PyTorch 1.6")
            with zipfile.ZipFile(file) as archive:
                return _read_archive(_Archive(archive, os.fstat(file.fileno()).st_size))
        except UnsupportedError as error:
            raise ValueError(f"{error} in {path}; {_ADVICE}") from error
        except _DAMAGE as error:
            reason = printable(str(error))[:_SHOWN]
            raise ValueError(f"expected a file of torch.save, got {path}: {reason}; download it again") from error


class _Archive:
    """Stored members of a zip file of `torch.save`."""

    def __init__(self, archive: zipfile.ZipFile, size: int):
        self._archive, self._storages = archive, dict[str, bytes]()
        self._members = {member.filename: member for member in archive.infolist()}
        if len(self._members) < len(archive.infolist()) or sum(m.compress_size for m in archive.infolist()) > size:
            raise ValueError("two members of one name or of the same bytes")
        pickles = [name for name in self._members if name.endswith("data.pkl")]
        if not pickles or any(name.endswith("constants.pkl") for name in self._members):
            raise UnsupportedError("expected a file of torch.save, got a TorchScript archive")
        self._folder = pickles[0].removesuffix("data.pkl")

    def __contains__(self, name: str) -> bool:
        return self._folder + name in self._members

    def read(self, name: str, limit: int) -> bytes:
        """Read a member of at most `limit` bytes."""
        member, shown = self._members.get(self._folder + name), printable(name)[:_SHOWN]
        if member is None:
            raise ValueError(f"no member {shown}")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise UnsupportedError(f"expected members without compression, got {shown} compressed")
        if member.file_size > limit:
            raise UnsupportedError(f"expected at most {limit} bytes of {shown}, got {member.file_size}")
        return self._archive.read(member)

    def storage(self, key: str, size: int) -> bytes:
        """Read a storage of `size` bytes, once for all its tensors."""
        if key not in self._storages:
            self._storages[key] = self.read(f"data/{key}", size)
        if len(self._storages[key]) != size:
            raise ValueError(f"{len(self._storages[key])} bytes of data/{printable(key)[:_SHOWN]}, not {size}")
        return self._storages[key]


def _read_archive(archive: _Archive) -> dict[str, np.ndarray]:
    """Read the state dict of an archive."""
    if "byteorder" in archive and archive.read("byteorder", limit=16) != b"little":
        raise UnsupportedError("expected little-endian tensors, got others")
    saved = load_pickle(archive.read("data.pkl", _PICKLE_BYTES))
    for key in _STATE_KEYS:
        if isinstance(saved, dict) and isinstance(saved.get(key), dict):
            saved = saved[key]
    if not isinstance(saved, dict) or {type(value) for value in saved.values()} != {StridedTensor}:
        raise UnsupportedError(f"expected tensors by name, got {type(saved).__name__}")
    prefix = "module." if all(name.startswith("module.") for name in saved) else ""
    return {name.removeprefix(prefix): _read_tensor(printable(name)[:_SHOWN], archive, saved[name]) for name in saved}


def _read_tensor(name: str, archive: _Archive, tensor: StridedTensor) -> np.ndarray:
    """Return a tensor as a view of its storage."""
    (kind, key, count), offset, shape, strides = tensor
    if kind not in _DTYPES or type(key) is not str or not _are_sizes((count,)):
        raise UnsupportedError(f"expected a storage of a known type, got another in {name}")
    if not (type(shape) is type(strides) is tuple and len(shape) == len(strides) <= _DIMENSIONS):
        raise UnsupportedError(f"expected as many strides as dimensions, at most {_DIMENSIONS}, got others in {name}")
    if not _are_sizes((offset, *shape, *strides)):
        raise UnsupportedError(f"expected an offset, a shape and strides of sizes, got others in {name}")
    dtype, size = jnp.dtype(_DTYPES[kind]), math.prod(shape)
    if size > count:
        raise UnsupportedError(
            f"expected a tensor within its storage of {count} elements, got {size} in {name} (clone() copies an "
            "expanded tensor)"
        )
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if size and last >= count:
        raise UnsupportedError(f"expected a tensor within its storage of {count} elements, got {name} beyond")
    storage = np.frombuffer(archive.storage(key, count * dtype.itemsize), dtype)
    if size == 0:
        return np.empty(shape, dtype)
    steps = [stride * dtype.itemsize if n > 1 else 0 for n, stride in zip(shape, strides, strict=True)]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


def _are_sizes(values: Any) -> bool:
    """Return whether all values are plain integers that fit an int64."""
    return all(type(value) is int and 0 <= value < 2**63 for value in values)
