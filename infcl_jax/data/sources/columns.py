"""Columns of tables."""

import functools
import json
import string
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from infcl_jax.data.sources import files
from infcl_jax.data.sources.base import locate, starts_of

_ROW_GROUPS = 2  # decoded parquet row groups in memory
_BATCH = 1024  # rows decoded at once
_DECODED, _RATIO = 2**30, 100  # bytes of a decoded parquet file: a constant, and more per byte of the file
_SCANNED = 2**28  # bytes of a column of images that is read to find empty ones, in 0.6 s (2026-11-27)
_SPACE = (  # white space of str.strip and byte order marks, in UTF-8
    r"(?:[\s\x0b\x1c-\x1f]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
    r"|\xef\xbb\xbf)"
)
_BLANK = rf"""^{_SPACE}*(?:\[(?:{_SPACE}|,|'{_SPACE}*'|"{_SPACE}*"|None|null|nan|NaN)*\]{_SPACE}*)?$"""
_LETTERS = pa.array([bytes([byte]) for byte in string.printable.encode() if byte > 32 and byte != ord("[")])


def read_columns(
    file: parquet.ParquetFile, path: str, columns: Sequence[str], groups: Sequence[int] | None = None
) -> pa.Table:
    """Read columns, or fields of structs such as "image.path", of a parquet file within a memory limit.

    Types are plain, see `plain_type`. Without `groups`, all row groups are read.
    """
    batches = list(_batches(file, path, columns, groups))
    return pa.Table.from_batches(batches, None if batches else _plain_schema(file.schema_arrow))


def _batches(
    file: parquet.ParquetFile, path: str, columns: Sequence[str], groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of columns, see `read_columns`.

    A few bytes of a file can stand for many rows, and its metadata for any size.
    """
    size, limit = 0, _DECODED + _RATIO * files.stamp(path).size
    try:
        for batch in file.iter_batches(_BATCH, groups, columns):
            plain = batch.cast(_plain_schema(batch.schema))
            size += plain.nbytes
            if size > limit:
                raise MemoryError
            yield plain
    except MemoryError as error:  # also of Arrow
        raise ValueError(f"expected at most {limit} bytes in the columns {', '.join(columns)} of {path}") from error


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values without dictionaries, views and fixed sizes."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    return kind


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(plain_type(field.type)) for field in schema])


class RowGroups:
    """Images of a parquet file, read by row group."""

    def __init__(self, file: parquet.ParquetFile, path: str, column: str):
        self._file, self._path, self._column, self._lock = file, path, column, threading.Lock()
        self._starts = starts_of(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))
        self._decode = functools.lru_cache(_ROW_GROUPS)(
            lambda group: read_columns(file, path, [column], [group]).column(0)
        )

    def filled(self) -> np.ndarray:
        """Tell which rows of the file have an encoded image.

        Statistics answer for most row groups. Those with null and other values are read, which takes as long as one
        pass over their images: parquet stores no mask of its own. Empty images without null are only found in columns
        of at most 256 MiB, since statistics leave out the bounds of large values; elsewhere they are bad records.
        """
        masks = [np.zeros(0, bool)]
        fields = _fields(self._file, self._column)
        name = next(name for name in fields if name in (self._column, f"{self._column}.bytes"))
        large = sum(chunk.total_uncompressed_size for chunk in fields[name]) > _SCANNED
        for group, chunk in enumerate(fields[name]):
            rows, statistics, nulls = self._starts[group + 1] - self._starts[group], chunk.statistics, _nulls(chunk)
            if nulls == rows:
                masks.append(np.zeros(rows, bool))
            elif nulls == 0 and (statistics.min if statistics.has_min_max else large):
                masks.append(np.ones(rows, bool))
            else:
                for batch in _batches(self._file, self._path, [name], [group]):
                    values = batch.column(0)
                    if pa.types.is_struct(values.type):
                        values = pc.struct_field(values, "bytes")
                    masks.append(np.asarray(pc.fill_null(pc.binary_length(values), 0)) > 0)
        return np.concatenate(masks)

    def read(self, row: int) -> bytes:
        """Read the encoded image of a row of the file."""
        group, row = locate(self._starts, row)
        with self._lock:
            value = self._decode(group)[row].as_py()
        if isinstance(value, dict):
            value = value["bytes"]
        if not value:
            raise ValueError("the image is empty")
        return value


def _fields(file: parquet.ParquetFile, column: str) -> dict[str, list[parquet.ColumnChunkMetaData]]:
    """Return the chunk of each row group for a column, or for each field of a struct, by path."""
    metadata = file.metadata
    paths = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    own = {path: i for path, i in paths.items() if path == column or path.startswith(f"{column}.")}
    return {path: [group.column(i) for group in groups] for path, i in own.items()}


def _nulls(chunk: parquet.ColumnChunkMetaData) -> int | None:
    """Return the number of nulls in a chunk, from statistics; None if unknown."""
    statistics = chunk.statistics
    return statistics.null_count if statistics and statistics.has_null_count else None


def null_count(file: parquet.ParquetFile, column: str) -> int:
    """Return the number of nulls in a column, from statistics; 0 if unknown.

    A struct is null where all of its fields are.
    """
    groups = zip(*_fields(file, column).values(), strict=True)
    return sum(min(_nulls(chunk) or 0 for chunk in chunks) for chunks in groups)


def first_paths(file: parquet.ParquetFile, path: str, column: str, count: int) -> list[str]:
    """Return the first paths of a column that are not blank."""
    for batch in _batches(file, path, [column]):
        values = pa.chunked_array([batch.column(0)])
        filled = values.filter(pa.array(is_filled(values)))
        if len(filled):
            return [as_string(value) for value in filled[:count]]
    return []


def image_fields(kind: pa.DataType) -> tuple[bool, bool] | None:
    """Tell whether the values of an image column can be encoded images, and whether they can be paths.

    A struct has the fields "bytes" and "path", or one of them. Returns None for a type of other values.
    """
    data, path = (kind, pa.null()) if _is_binary(kind) else (pa.null(), kind)
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        if not fields.keys() & {"bytes", "path"}:
            return None
        data, path = fields.get("bytes", pa.null()), fields.get("path", pa.null())
    known = (_is_binary(data) or pa.types.is_null(data)) and (is_text(path) or pa.types.is_null(path))
    return (_is_binary(data), is_text(path)) if known else None


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def is_text(kind: pa.DataType) -> bool:
    """Tell if values of a plain type are texts, perhaps not in UTF-8."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_binary(kind)


def without_nan(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without values or lists but NaN as null; pandas writes missing texts as NaN."""
    kind, values = column.type, column
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind, values = kind.value_type, pc.list_flatten(column)
    if pa.types.is_floating(kind) and pc.all(pc.is_nan(values), min_count=0).as_py():
        return pa.chunked_array([pa.nulls(len(column))])
    return column


def is_filled(column: pa.ChunkedArray) -> np.ndarray:
    """Tell which values have a text that is not blank.

    Values are texts or lists of texts; another type is a `ValueError`. A text can be a list in Python or JSON.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return np.zeros(len(column), bool)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if not (is_text(kind.value_type) or pa.types.is_null(kind.value_type)):
            raise ValueError(f"expected texts or lists of texts, got {kind}")
        mask, start = np.zeros(len(column), bool), 0
        for lists in column.chunks:
            items = is_filled(pa.chunked_array([pc.list_flatten(lists)]))
            mask[start + np.asarray(pc.list_parent_indices(lists))[items]] = True
            start += len(lists)
        return mask
    if not is_text(kind):
        raise ValueError(f"expected texts or lists of texts, got {kind}")
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    texts = column.cast(pa.large_binary() if large else pa.binary())  # no copy
    filled = np.asarray(pc.is_in(pc.binary_slice(texts, 0, 1), _LETTERS))
    if not filled.all():  # an expression takes long for many texts
        others = texts.filter(pa.array(~filled))
        filled = filled.copy()
        filled[~filled] = ~np.asarray(pc.fill_null(pc.match_substring_regex(others, _BLANK), True))
    return filled


def first_known(columns: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the first column with a known name, in any capitalization."""
    lower = {column.lower(): column for column in reversed(columns)}
    return next((lower[name] for name in known if name in lower), None)


def as_string(value: pa.Scalar) -> str:
    """Convert a text to a string that names the same file."""
    value = value.as_py()
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def class_names(schema: pa.Schema, column: str | None) -> tuple[str, ...] | None:
    """Return the class names of a label column from Hugging Face's metadata, if any."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        names = features[column]["names"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
