"""Files of features with the keys of their records: safetensors, npy and parquet."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from safetensors.numpy import load_file

from infcl_jax.data import FeatureStore
from infcl_jax.data.feature_store import pack_strings
from infcl_jax.runtime.file_io import replacing

FEATURE_FILES = (".safetensors", ".npy", ".parquet")


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureRows:
    """Features of n records.

    Examples:
      >>> rows = FeatureRows(np.eye(2, 16, dtype=np.float32), np.arange(2), ["cat.jpg", "dog.jpg"])
      >>> rows.feature.shape
      (2, 16)

    Attributes:
      feature: float32 [n, D].
      index: int64 [n], index of each record in its source.
      key: n names of records, such as paths.
    """

    feature: np.ndarray
    index: np.ndarray
    key: Sequence[str]


def keys_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the indices and keys of an npy file, a parquet file."""
    return Path(path).with_suffix(".keys.parquet")


def check_feature_file(path: str | os.PathLike[str]) -> None:
    """Check the extension of a feature file.

    Raises:
      ValueError: it is unknown.
    """
    if Path(path).suffix not in FEATURE_FILES:
        raise ValueError(f"expected a file with one of the extensions {', '.join(FEATURE_FILES)}, got {path}")


def read_features(path: str | os.PathLike[str]) -> FeatureRows:
    """Read the features that `infcl_jax.embed` wrote.

    - `.safetensors`: tensors `feature`, `index`, `key_bytes` (UTF-8) and `key_ends` (end of each key in the bytes);
    - `.npy`: the features, mapped into memory, with `index` and `key` in a parquet file, see `keys_path`;
    - `.parquet`: columns `feature`, `index` and `key`.

    Examples:
      >>> rows = read_features("photos.safetensors")  # from `experiments.embed`
      >>> rows.feature.shape, rows.key[0]
      ((20, 24), '0.jpg')

    Args:
      path: a feature file.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: its extension is unknown.
    """
    check_feature_file(path)
    path = Path(path)
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        content, ends = tensors["key_bytes"].tobytes(), tensors["key_ends"].tolist()
        keys = [content[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
        return FeatureRows(tensors["feature"], tensors["index"], keys)
    if path.suffix == ".npy":
        table = parquet.read_table(keys_path(path))
        return FeatureRows(np.load(path, mmap_mode="r"), table["index"].to_numpy(), table["key"].to_pylist())
    table = parquet.read_table(path)
    width = table.schema.field("feature").type.list_size
    flat = np.concatenate([chunk.flatten().to_numpy() for chunk in table["feature"].chunks])
    return FeatureRows(flat.reshape(-1, width), table["index"].to_numpy(), table["key"].to_pylist())


def write_features(path: str | os.PathLike[str], store: FeatureStore, key_of: Callable[[int], str]) -> tuple[int, int]:
    """Write a complete store as a feature file, with its features mapped into memory.

    The file appears only when it is complete. Return its number of rows n and the size of the features D.
    """
    path = Path(path)
    features, indices = zip(*map(store.rows, range(store.segments)), strict=True)
    index, width = np.concatenate(indices), features[0].shape[1]
    # File names that are not UTF-8 have surrogates, which no format can store.
    keys = [key_of(i).encode("utf-8", "surrogateescape").decode("utf-8", "replace") for i in index.tolist()]
    columns = {"index": pa.array(index), "key": pa.array(keys, pa.string())}
    if path.suffix == ".npy":  # the features come last: where they exist, the keys are complete
        with replacing(keys_path(path), store.folder) as temporary:
            parquet.write_table(pa.table(columns), temporary)
    with replacing(path, store.folder) as temporary:
        if path.suffix == ".parquet":
            lists = [pa.FixedSizeListArray.from_arrays(pa.array(feature.ravel()), width) for feature in features]
            parquet.write_table(
                pa.table({**columns, "feature": pa.chunked_array(lists)}), temporary, row_group_size=8192
            )
        elif path.suffix == ".npy":
            _write_npy(temporary, features, (len(index), width))
        else:
            _write_safetensors(temporary, features, index, keys)
    return len(index), width


def _write_npy(path: Path, features: Sequence[np.ndarray], shape: tuple[int, int]) -> None:
    """Write joined features."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file.writelines(feature.data for feature in features)


def _write_safetensors(path: Path, features: Sequence[np.ndarray], index: np.ndarray, keys: Sequence[str]) -> None:
    """Write the tensors of `read_features`.

    The package safetensors would need all of them in memory. The format is an 8-byte length, a JSON header and the
    data, see https://huggingface.co/docs/safetensors.
    """
    packed = pack_strings("keys", keys)
    tensors = {  # the widest dtypes come first, so that all are aligned
        "feature": ("F32", (len(index), features[0].shape[1]), features),
        "index": ("I64", index.shape, [index]),
        "key_ends": ("I64", index.shape, [packed["keys"][1:]]),
        "key_bytes": ("U8", packed["keys_bytes"].shape, [packed["keys_bytes"]]),
    }
    header, end = {}, 0
    for name, (dtype, shape, arrays) in tensors.items():
        start, end = end, end + sum(array.nbytes for array in arrays)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(array.data for _, _, arrays in tensors.values() for array in arrays)
