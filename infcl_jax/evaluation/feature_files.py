"""Files of features with the keys of their records: safetensors, npy and parquet."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

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
    """Read the features that `experiments.embed` wrote.

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


def write_shard(path: Path, rows: FeatureRows, counts: dict[str, int]) -> None:
    """Write rows as safetensors, atomically.

    Args:
      path: file.
      rows: features, indices and keys.
      counts: numbers by name, for `shard_counts`.
    """
    # File names that are not UTF-8 have surrogates, which no format can store.
    encoded = [key.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode() for key in rows.key]
    tensors = {
        "feature": np.ascontiguousarray(rows.feature, np.float32),
        "index": np.asarray(rows.index, np.int64),
        "key_bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "key_ends": np.cumsum([len(key) for key in encoded], dtype=np.int64),
    }
    metadata = {name: str(count) for name, count in counts.items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def shard_counts(path: Path) -> dict[str, int]:
    """Read the numbers of a shard of `write_shard`."""
    with safe_open(str(path), "numpy") as file:
        return {name: int(count) for name, count in file.metadata().items()}


def merge_shards(path: str | os.PathLike[str], shards: Sequence[Path]) -> tuple[int, int]:
    """Join shards in one feature file, with one shard at a time in memory.

    The file appears only when it is complete.

    Args:
      path: file with one of the extensions `FEATURE_FILES`.
      shards: files of `write_shard`, at least one.

    Returns:
      Number of rows n and size of the features D.
    """
    path = Path(path)
    shapes = [_shapes(shard) for shard in shards]
    rows, width = sum(shape["feature"][0] for shape in shapes), shapes[0]["feature"][1]
    if path.suffix == ".parquet":
        with replacing(path, shards[0].parent) as temporary:
            _write_parquet(temporary, shards, width)
    elif path.suffix == ".npy":
        # The features come last: where they exist, the keys are complete.
        with replacing(keys_path(path), shards[0].parent) as temporary:
            _write_parquet(temporary, shards, None)
        with replacing(path, shards[0].parent) as temporary:
            _write_npy(temporary, shards, rows, width)
    else:
        sizes = {name: (sum(shape[name][0] for shape in shapes), *shapes[0][name][1:]) for name in shapes[0]}
        with replacing(path, shards[0].parent) as temporary:
            _write_safetensors(temporary, shards, sizes)
    return rows, width


def _shapes(shard: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors of a shard."""
    with safe_open(str(shard), "numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _write_npy(path: Path, shards: Sequence[Path], rows: int, width: int) -> None:
    """Write the features of shards."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, width))
    start = 0
    for shard in shards:
        feature = load_file(shard)["feature"]
        array[start : start + len(feature)] = feature
        start += len(feature)
    array.flush()


def _write_parquet(path: Path, shards: Sequence[Path], width: int | None) -> None:
    """Write indices, keys and, with a width, features of shards, one row group each."""
    fields = [pa.field("index", pa.int64()), pa.field("key", pa.string())]
    if width is not None:
        fields.append(pa.field("feature", pa.list_(pa.float32(), width)))
    with parquet.ParquetWriter(path, pa.schema(fields)) as writer:
        for shard in shards:
            rows = read_features(shard)
            columns = {"index": pa.array(rows.index), "key": pa.array(rows.key, pa.string())}
            if width is not None:
                flat = pa.array(np.ascontiguousarray(rows.feature).ravel())
                columns["feature"] = pa.FixedSizeListArray.from_arrays(flat, width)
            writer.write_table(pa.table(columns, schema=writer.schema))


def _write_safetensors(path: Path, shards: Sequence[Path], shapes: dict[str, tuple[int, ...]]) -> None:
    """Write the tensors of shards, joined along their first axis.

    The package safetensors would need all of them in memory. The format is an 8-byte length, a JSON header and the
    data, see https://huggingface.co/docs/safetensors.
    """
    dtypes = {"feature": ("F32", np.float32), "index": ("I64", np.int64)}
    dtypes |= {"key_ends": ("I64", np.int64), "key_bytes": ("U8", np.uint8)}
    header, offsets, size = {}, {}, 0
    for name, (code, dtype) in dtypes.items():  # the widest dtypes come first, so that all are aligned
        offsets[name], size = size, size + int(np.prod(shapes[name])) * np.dtype(dtype).itemsize
        header[name] = {"dtype": code, "shape": list(shapes[name]), "data_offsets": [offsets[name], size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
        for name, array in _tensors(shards, tuple(dtypes)):
            file.seek(8 + len(text) + offsets[name])
            file.write(array.tobytes())
            offsets[name] += array.nbytes


def _tensors(shards: Sequence[Path], names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Read the tensors of shards and the ends of their joined keys."""
    end = 0
    for shard in shards:
        tensors = load_file(shard)
        tensors["key_ends"] = tensors["key_ends"] + end
        end += len(tensors["key_bytes"])
        yield from ((name, tensors[name]) for name in names)
