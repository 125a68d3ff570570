"""Columns of tables."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from infcl_jax.data.sources import files
from infcl_jax.data.sources.base import locate, starts_of

_ROW_GROUPS = 2  # decoded parquet row groups in memory
_BATCH = 1024  # rows decoded at once
_DECODED, _RATIO = 2**30, 100  # bytes of a decoded parquet file: a constant, and more per byte of the file


def read_columns(
    file: parquet.ParquetFile, path: str, columns: Sequence[str], groups: Sequence[int] | None = None
) -> pa.Table:
    """Read columns of a parquet file within a memory limit.

    A few bytes of a file can stand for many rows, and its metadata for any size.

    Args:
      file: the open file.
      path: path of the file.
      columns: names of the columns.
      groups: row groups; None: all of them.

    Raises:
      ValueError: the columns have far more bytes than the file.
    """
    batches, size = [], 0
    limit = _DECODED + _RATIO * files.stamp(path).size
    try:
        for batch in file.iter_batches(_BATCH, groups, columns):
            size += batch.nbytes
            if size > limit:
                raise MemoryError
            batches.append(batch)
    except MemoryError as error:  # also of Arrow
        raise ValueError(f"expected at most {limit} bytes in the columns {', '.join(columns)} of {path}") from error
    schema = file.schema_arrow
    names = [name for name in schema.names if name in columns]
    return pa.Table.from_batches(batches, None if batches else pa.schema([schema.field(name) for name in names]))


class RowGroups:
    """Images of a parquet file, read by row group."""

    def __init__(self, file: parquet.ParquetFile, path: str, column: str):
        self._file, self._path, self._column, self._lock = file, path, column, threading.Lock()
        self._starts = starts_of(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))
        self._decoded: dict[int, pa.ChunkedArray] = {}

    def read(self, row: int) -> bytes:
        """Read the encoded image of a row of the file."""
        group, row = locate(self._starts, row)
        with self._lock:
            if group not in self._decoded:
                while len(self._decoded) >= _ROW_GROUPS:
                    del self._decoded[next(iter(self._decoded))]
                table = read_columns(self._file, self._path, [self._column], [group])
                self._decoded[group] = table.column(0)
            value = self._decoded[group][row].as_py()
        if isinstance(value, dict):
            value = value.get("bytes")
        if not value:
            raise ValueError("the image is empty")
        return value


def has_bytes(kind: pa.DataType) -> bool:
    """Tell if values can be encoded images."""
    return pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def is_text(kind: pa.DataType) -> bool:
    """Tell if values are texts, perhaps not in UTF-8."""
    return any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


def is_filled(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Tell which values are neither null nor empty.

    Raises:
      ValueError: they are neither texts nor lists.
    """
    if pa.types.is_null(column.type):
        return np.zeros(len(column), bool)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.list_value_length(column)
    elif is_text(column.type):
        lengths = pc.binary_length(column)
    else:
        raise ValueError(f"expected texts or lists of texts in a column, got {column.type}")
    return np.asarray(pc.fill_null(lengths, 0)) > 0


def first_known(columns: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the first column with a known name, in any capitalization."""
    lower = {column.lower(): column for column in reversed(columns)}
    return next((lower[name] for name in known if name in lower), None)


def as_string(value: pa.Scalar) -> str:
    """Convert a text to a string that names the same file."""
    value = value.as_py()
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
