"""Files of named tensors: safetensors and PyTorch checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from infcl_jax.models.convert.torch_file import read_torch_file

Tensors = dict[str, np.ndarray]

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")


def read_tensors(path: Path) -> Tensors:
    """Read the tensors of a file.

    Args:
      path: a `.safetensors` file, the `.index.json` of a sharded one, or a PyTorch checkpoint (`.bin`, `.pt`, `.pth`).

    Returns:
      Arrays by name. Those of safetensors are read-only and memory-mapped, so they are read when they are used.

    Raises:
      ValueError: the file is damaged or of another kind.
      FileNotFoundError: it does not exist.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a file of tensors, got {path}, which does not exist")
    if path.suffix in _TORCH_SUFFIXES:
        return read_torch_file(path)
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"expected a file .safetensors, {', '.join(_TORCH_SUFFIXES)} or .index.json, got {path}")
    return _read_safetensors(path)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a safetensors file, with the metadata that transformers expects."""
    save_file({name: np.asarray(array, order="C") for name, array in tensors.items()}, path, metadata={"format": "pt"})


def _read_shards(index: Path) -> Tensors:
    """Read the shards of an index, each of whose tensors must be in its file."""
    files: dict[str, str] = _parse(index.read_bytes(), index)["weight_map"]
    shards = {file: read_tensors(index.parent / file) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in shards[file]:
            raise ValueError(f"expected the tensor {name} in {index.parent / file}, got none; download it again")
    return {name: shards[file][name] for name, file in files.items()}


def _read_safetensors(path: Path) -> Tensors:
    """Map a safetensors file into memory; `safetensors.numpy` has no bfloat16."""
    size = path.stat().st_size
    length = int.from_bytes(path.read_bytes()[:8] if size < 8 else _head(path, 8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise ValueError(f"expected a safetensors file, got {path} with a truncated header; download it again")
    header = _parse(_head(path, 8 + length)[8:], path)
    header.pop("__metadata__", None)
    start = 8 + length
    data = np.memmap(path, np.uint8, "r", start) if size > start else np.empty(0, np.uint8)
    tensors = {}
    for name, entry in header.items():
        (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"expected a dtype among {', '.join(_DTYPES)}, got {entry['dtype']} of {name} in {path}")
        dtype = jnp.dtype(_DTYPES[entry["dtype"]])
        if not 0 <= begin <= end <= data.size or end - begin != dtype.itemsize * int(np.prod(shape)):
            raise ValueError(f"expected {name} inside {path}, got a truncated file; download it again")
        tensors[name] = np.frombuffer(data[begin:end], dtype).reshape(shape) if end > begin else np.empty(shape, dtype)
    return tensors


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _parse(text: bytes, path: Path) -> dict:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got {error}; download it again") from error
