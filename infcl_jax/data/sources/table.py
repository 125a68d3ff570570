"""Tables of captioned or labeled images: CSV, TSV, JSON lines and parquet files."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from csv import Error as CSVError
from csv import reader
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, json, parquet

from infcl_jax.data.sources import captions, files
from infcl_jax.data.sources.base import Classes, Example, bad_record, check_index, locate, starts_of, warn_dropped
from infcl_jax.data.sources.labels import UNLABELED, column_labels, label_strings, prompts

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".parquet")
IMAGE_COLUMNS = (
    "image", "image_path", "filepath", "file_path", "filename", "file_name", "path", "file", "img", "img_path", "jpg",
    "image_bytes", "bytes", "url", "image_url",
)  # fmt: skip
CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "title", "description", "alt_text", "alt", "sentence", "txt")
LABEL_COLUMNS = ("label", "class")
_OPTIONS = ("image", "caption", "label", "folder")
_BLOCK = 2**26  # bytes of text parsed at once; longer than any row
_CHECKED = 16  # images whose existence is checked
_ROW_GROUPS = 2  # decoded parquet row groups in memory


class TableSource:
    """Captioned images of the rows of tables.

    The image column has paths or encoded images (bytes, or {"bytes", "path"} as Hugging Face writes them). A caption
    column has texts or lists of texts. Rows without image or caption are dropped. Samples are numbered in the order of
    the files and rows.

    A label column has class names, or integers and `classes.txt` next to the table; see `label_values`. Without caption
    column, the captions are prompts of the class.

    Tables stay in memory, but for images in parquet: reading one of them decodes its row group, so parquet with images
    is fast only for small row groups.

    Args:
      paths: CSV, TSV, JSON lines or parquet files with the same columns.
      name: name of the dataset.
      split: name of the split.
      options: "image": column of the images, "caption": columns of the captions separated by commas, or "none" for rows
        without captions and labels, "label": column of
        the labels, "folder": base of relative image paths. By default, the first column named in `IMAGE_COLUMNS`,
        `CAPTION_COLUMNS` and `LABEL_COLUMNS`, in any capitalization, and the folder of each file.

    Raises:
      FileNotFoundError: a table does not exist.
      ValueError: a table is damaged, a column is missing, no row has an image and a caption, the first images do not
        exist, or rows without captions have wrong labels.
    """

    def __init__(self, paths: Sequence[str], name: str, split: str, options: Mapping[str, str] | None = None):
        options = options or {}
        self.name, self.split, self._paths, self._options = name, split, list(paths), dict(options)
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise ValueError(f"expected the options {', '.join(_OPTIONS)} of {name}, got {', '.join(sorted(unknown))}")
        tables = [_Table(path, options) for path in paths]
        self._tables, self._starts = tables, starts_of(map(len, tables))
        self.dropped: dict[str, int] = {}
        for reason in ("damaged row", "no image", "no caption", "no label"):
            count = sum(table.dropped.get(reason, 0) for table in tables)
            if count:
                self.dropped[reason] = count
        warn_dropped(self)
        if len(self) == 0:
            text = "caption" if tables[0].captioned else "label"
            raise ValueError(f"{name} has no row with an image and a {text}; check the columns {tables[0].columns}")
        self.captioned = all(table.captioned for table in tables)
        self._images_only = self._options.get("caption") == captions.NONE
        self._classes: Classes | str
        try:
            if self._images_only:
                raise ValueError(f"{name} was opened without classes; leave out caption={captions.NONE}")
            columns = [table.label_strings() for table in tables]
            labels, self._classes = column_labels(columns, tables[0].folder, tables[0].label_column)
            for table, values in zip(tables, labels, strict=True):
                table.labels = values
        except ValueError as error:
            if not (self.captioned or self._images_only):
                raise
            self._classes = str(error)  # training on captions does not need the labels

    def __reduce__(self) -> Any:
        return TableSource, (self._paths, self.name, self.split, self._options)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _locate(self, index: int) -> tuple[_Table, int]:
        number, row = locate(self._starts, index)
        return self._tables[number], row

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        table, row = self._locate(index)
        label = int(table.labels[row])
        try:
            if self._images_only:
                return captions.uncaptioned_example(table.image(row))
            texts = table.captions(row) if table.captioned else prompts(self.classes(), label)
            return captions.example(table.image(row), texts, label)
        except Exception as error:  # file systems and parsers raise any exception
            raise bad_record(self.describe(index), error) from error

    def classes(self) -> Classes:
        """Return the classes of the label column.

        Raises:
          ValueError: there is no label column, a label is wrong, or integers have no class names.
        """
        if isinstance(self._classes, str):
            raise ValueError(self._classes)
        return self._classes

    def key(self, index: int) -> str:
        """Return the image path of a row, or its index without path."""
        table, row = self._locate(index)
        return table.key(row) or str(index)

    def describe(self, index: int) -> str:
        """Name a record by dataset, split, index, table and image path."""
        table, row = self._locate(index)
        key = f", {table.key(row)}" if table.key(row) else ""
        return f"record {index} of {self.name}, split {self.split} ({files.name_of(table.path)}{key})"

    def shard(self, index: int) -> str:
        """Name the image file of a row, or its table."""
        table, row = self._locate(index)
        return table.key(row) or files.name_of(table.path)

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return self.name


class _Table:
    """Rows of one file that have an image and a caption or label.

    Attributes:
      path: path of the file.
      folder: folder of the file.
      columns: names of all columns.
      captioned: whether there is a caption column.
      label_column: description of the label column.
      labels: int32 [rows], -1 without label.
      dropped: number of rows that are left out, by reason.
    """

    def __init__(self, path: str, options: Mapping[str, str]):
        self.path = path
        self.dropped: dict[str, int] = {}
        self.folder = path.rpartition("/")[0]
        self._images_folder = options.get("folder") or self.folder
        self._groups: _RowGroups | None = None
        read = self._read_parquet if path.endswith(".parquet") else self._read_text
        table = read(path, options)
        self._label_values = table.column(self._label) if self._label else None
        complete = self._complete(table)
        self._rows = np.flatnonzero(complete)
        # Filtering keeps the chunks of a column: one Arrow array has at most 2 GiB of text.
        table = table.filter(pa.array(complete))
        self._texts = [table.column(name) for name in self._captions]
        self._label_values = table.column(self._label) if self._label else None
        self.labels = np.full(len(self._rows), UNLABELED, np.int32)
        self._images = None if self._groups else table.column(self._image)
        self._check_paths()

    def _choose_columns(self, columns: Sequence[str], options: Mapping[str, str]) -> None:
        self.columns = ", ".join(columns)
        requested = [column for column in options.get("caption", "").split(",") if column]
        self._image = options.get("image") or self._detect(columns, "image", IMAGE_COLUMNS)
        self._label = options.get("label") or _first(columns, LABEL_COLUMNS)
        self._images_only = requested == [captions.NONE]
        if self._images_only:
            requested, self._label = [], None
        elif not requested and (_first(columns, CAPTION_COLUMNS) or not self._label):
            requested = [self._detect(columns, "caption", CAPTION_COLUMNS)]
        self._captions, self.captioned = requested, bool(requested)
        self.label_column = f"{self.path}, column {self._label!r}"
        chosen = [("image", self._image), *(("caption", column) for column in self._captions)]
        for option, column in chosen + ([("label", self._label)] if self._label else []):
            if list(columns).count(column) > 1:
                raise ValueError(f"{self.path} has several columns named {column!r}; rename all but one")
            if column not in columns:
                raise ValueError(f"{self.path} has no {option} column {column!r}; its columns are {self.columns}")

    def _detect(self, columns: Sequence[str], option: str, known: Sequence[str]) -> str:
        column = _first(columns, known)
        if column is None:
            raise ValueError(
                f"{self.path} has no {option} column; its columns are {self.columns}: name one with ?{option}=COLUMN"
            )
        return column

    def _read_parquet(self, path: str, options: Mapping[str, str]) -> pa.Table:
        try:
            file = parquet.ParquetFile(files.open_file(path) if files.is_remote(path) else path)
            schema = file.schema_arrow
            self._choose_columns(schema.names, options)
            if _has_bytes(schema.field(self._image).type):
                self._groups = _RowGroups(file, self._image)
            return file.read(columns=[name for name in self._used() if not self._groups or name != self._image])
        except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for damaged data
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is not a parquet file: {reason}") from error

    def _read_text(self, path: str, options: Mapping[str, str]) -> pa.Table:
        try:
            with files.open_file(path) as file:
                if path.endswith(".jsonl"):
                    # Arrow 26 crashes where a block of lines starts with null.
                    if any(line.lstrip().startswith(b"null") for line in file):
                        raise ValueError(f"expected an object in every line of {path}, got null; remove such lines")
                    file.seek(0)
                    table = json.read_json(file, json.ReadOptions(block_size=_BLOCK))
                    self._choose_columns(table.column_names, options)
                    return table.select(self._used())
                header = file.readline()
                file.seek(0)
                return self._read_csv(file, header, options)
        except (pa.ArrowException, UnicodeDecodeError, CSVError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} cannot be read: {reason}; check that it is a table in UTF-8") from error

    def _read_csv(self, file: BinaryIO, header: bytes, options: Mapping[str, str]) -> pa.Table:
        def skip_damaged(row: Any) -> str:
            self.dropped["damaged row"] = self.dropped.get("damaged row", 0) + 1
            return "skip"

        separator = "\t" if b"\t" in header else ","
        names = next(reader(header.decode("utf-8-sig").splitlines()[:1], delimiter=separator), [])
        self._choose_columns(names, options)
        used = self._used()
        return csv.read_csv(
            file,
            csv.ReadOptions(block_size=_BLOCK, use_threads=False),
            csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=skip_damaged),
            # Bytes, because one caption that is not UTF-8 must not spoil the table.
            csv.ConvertOptions(check_utf8=False, include_columns=used, column_types=dict.fromkeys(used, pa.binary())),
        )

    def _used(self) -> list[str]:
        return list(dict.fromkeys([self._image, *self._captions, *([self._label] if self._label else [])]))

    def _complete(self, table: pa.Table) -> np.ndarray:
        """Return a mask of the complete rows, and count the others."""
        images = np.ones(table.num_rows, bool) if self._groups else _is_filled(table.column(self._image))
        if self._images_only:
            texts = np.ones(table.num_rows, bool)
        elif self.captioned:
            texts = np.any([_is_filled(table.column(name)) for name in self._captions], axis=0)
        else:
            texts = np.asarray(pc.not_equal(self.label_strings(), ""))
        for reason, mask in (("no image", ~images), ("no caption" if self.captioned else "no label", images & ~texts)):
            if mask.any():
                self.dropped[reason] = int(mask.sum())
        return images & texts

    def _check_paths(self) -> None:
        keys = [self.key(row) for row in range(min(_CHECKED, len(self)))]
        if self._images is None or not keys:
            return
        if keys[0].startswith(("http://", "https://")):
            raise ValueError(
                f"{self.path} has URLs in its image column {self._image!r}; download the images first, "
                "for example with img2dataset, or name another column with ?image=COLUMN"
            )
        paths = [_join(self._images_folder, key) for key in keys]
        if not any(files.is_remote(path) or os.path.exists(path) for path in paths):
            raise ValueError(
                f"{self.path}: none of the first {len(paths)} images exists, the first is {paths[0]}; name their "
                "folder with ?folder=FOLDER, or their column with ?image=COLUMN"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def image(self, row: int) -> bytes:
        """Read the encoded image of a row."""
        if self._groups is not None:
            return self._groups.read(int(self._rows[row]))
        return files.read_file(_join(self._images_folder, self.key(row)))

    def captions(self, row: int) -> list[str]:
        """Return the captions of a row."""
        result: list[str] = []
        for column in self._texts:
            value = column[row].as_py()
            for item in value if isinstance(value, list) else [value]:
                result.append(captions.text(item) if isinstance(item, bytes) else str(item or "").strip())
        return result

    def label_strings(self) -> pa.ChunkedArray:
        """Return the label column as strings, "" where there is none.

        Raises:
          ValueError: there is no label column, or it has other values than texts and numbers.
        """
        if self._label is None:
            raise ValueError(
                f"{self.path} has no label column; its columns are {self.columns}: name one with ?label=COLUMN"
            )
        return label_strings(self._label_values, self.label_column)

    def key(self, row: int) -> str:
        """Return the image path of a row, or "" for images in the table."""
        return "" if self._images is None else _string(self._images[row])


class _RowGroups:
    """Images of a parquet file, read by row group."""

    def __init__(self, file: parquet.ParquetFile, column: str):
        self._file, self._column, self._lock = file, column, threading.Lock()
        self._starts = starts_of(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))
        self._decoded: dict[int, pa.Array] = {}

    def read(self, row: int) -> bytes:
        """Read the encoded image of a row of the file."""
        group, row = locate(self._starts, row)
        with self._lock:
            if group not in self._decoded:
                while len(self._decoded) >= _ROW_GROUPS:
                    del self._decoded[next(iter(self._decoded))]
                table = self._file.read_row_group(group, columns=[self._column])
                self._decoded[group] = table.column(0).combine_chunks()
            value = self._decoded[group][row].as_py()
        if isinstance(value, dict):
            value = value.get("bytes")
        if not value:
            raise ValueError("the image is empty")
        return value


def _has_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_filled(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Tell which values are neither null nor empty."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), bool)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.list_value_length(column)
    elif pa.types.is_string(column.type) or _has_bytes(column.type) or pa.types.is_large_string(column.type):
        lengths = pc.binary_length(column)
    else:
        raise ValueError(f"expected texts or lists of texts in a column, got {column.type}")
    return np.asarray(pc.fill_null(lengths, 0)) > 0


def _first(columns: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the first column with a known name, in any capitalization."""
    lower = {column.lower(): column for column in reversed(columns)}
    return next((lower[name] for name in known if name in lower), None)


def _string(value: pa.Scalar) -> str:
    value = value.as_py()
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _join(folder: str, path: str) -> str:
    if files.is_remote(path) or os.path.isabs(path) or not folder:
        return path
    return f"{folder}/{path}"
