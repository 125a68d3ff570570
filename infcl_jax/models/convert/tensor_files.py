"""Files of named tensors: safetensors and PyTorch checkpoints."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from infcl_jax.models.convert.torch_file import read_torch_file
from infcl_jax.runtime.file_io import CONFIG_BYTES, open_regular, parse_json, read_json
from infcl_jax.runtime.printable import printable

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
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_SHOWN = 100  # characters of a name in an error


def read_tensors(path: Path) -> Tensors:
    """Read the tensors of a `.safetensors` file, the `.index.json` of a sharded one, or a PyTorch checkpoint.

    Arrays of safetensors are read-only and memory-mapped, so they are read when they are used.

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


def read_index(path: Path) -> dict[str, str]:
    """Read the index of a sharded file: the names of shards in its folder by names of their tensors.

    Raises:
      ValueError: the file is no index, or a shard is outside of its folder.
    """
    shards = read_json(path, limit=CONFIG_BYTES).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"expected a weight_map with names of files in {path}, got {type(shards).__name__}")
    for shard in shards.values():
        is_plain = isinstance(shard, str) and os.path.basename(shard) == shard and "\\" not in shard
        if not is_plain or not shard.endswith((".safetensors", *_TORCH_SUFFIXES)) or printable(shard) != shard:
            raise ValueError(
                f"expected shards to be files .safetensors, {', '.join(_TORCH_SUFFIXES)} in the folder of {path}, got "
                f"{printable(str(shard)[:_SHOWN])}"
            )
    return shards


def _read_shards(index: Path) -> Tensors:
    """Read the shards of an index."""
    files = read_index(index)
    shards = {file: read_tensors(index.parent / file) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in shards[file]:
            shown = printable(name[:_SHOWN])
            raise ValueError(f"expected the tensor {shown} in {index.parent / file}, got none; download it again")
    return {name: shards[file][name] for name, file in files.items()}


def _read_safetensors(path: Path) -> Tensors:
    """Map a safetensors file into memory; `safetensors.numpy` reads it at once.

    `safe_open` checks the whole header: JSON, names, dtypes, shapes and the bytes of each tensor.
    """
    with open_regular(path) as file:
        try:
            with safe_open(path, "numpy"):
                pass
        except (SafetensorError, UnicodeError) as error:
            reason = printable(str(error))[:_SHOWN]
            raise ValueError(f"expected a safetensors file, got {path}: {reason}; download it again") from error
        start = 8 + int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(start - 8), path)
        header.pop("__metadata__", None)
        data = np.memmap(file, np.uint8, "r", start) if file.seek(0, os.SEEK_END) > start else np.empty(0, np.uint8)
    return {name: _map_tensor(printable(name[:_SHOWN]), entry, data, path) for name, entry in header.items()}


def _map_tensor(name: str, entry: Mapping[str, Any], data: np.ndarray, path: Path) -> np.ndarray:
    """Return a tensor as a view of the data of its file."""
    if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):  # other spellings that the library accepts
        raise ValueError(f"expected an object with dtype and shape of {name} in {path}, got another")
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"expected a dtype among {', '.join(_DTYPES)}, got {entry['dtype']} of {name} in {path}")
    (begin, end), dtype = entry["data_offsets"], jnp.dtype(_DTYPES[entry["dtype"]])
    try:
        return (
            np.frombuffer(data[begin:end], dtype).reshape(entry["shape"])
            if end > begin
            else np.empty(entry["shape"], dtype)
        )
    except ValueError as error:  # NumPy has at most 64 dimensions
        raise ValueError(f"expected {name} inside {path}, got a truncated file: {error}; download it again") from error
