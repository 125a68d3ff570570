"""Tables of captioned or labeled images: CSV, TSV, JSON lines and parquet files."""

from __future__ import annotations

import codecs
import itertools
import os
import re
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
from infcl_jax.data.sources.columns import (
    RowGroups,
    as_string,
    first_known,
    has_bytes,
    is_filled,
    is_text,
    read_columns,
)
from infcl_jax.data.sources.labels import UNLABELED, column_labels, label_strings, prompts
from infcl_jax.data.sources.paths import OUTSIDE, outside_option, report_outside, resolve
from infcl_jax.file_io import open_regular

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".parquet")
IMAGE_COLUMNS = (
    "image", "image_path", "filepath", "file_path", "filename", "file_name", "path", "file", "img", "img_path", "jpg",
    "image_bytes", "bytes", "url", "image_url",
)  # fmt: skip
CAPTION_COLUMNS = ("caption", "captions", "text", "texts", "title", "description", "alt_text", "alt", "sentence", "txt")
LABEL_COLUMNS = ("label", "class")
_OPTIONS = ("image", "caption", "label", "folder", OUTSIDE)
_BLOCK = 2**26  # bytes of text parsed at once; longer than any row
_HEADER = 2**20  # bytes of the first line of a CSV file
_SHOWN = 1000  # characters of the columns in messages
_CHECKED = 16  # images whose existence is checked
_NESTED = 64  # levels of a JSON value; Arrow recurses without a limit
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?')  # of JSON
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class TableSource:
    """Captioned images of the rows of tables.

    The image column has paths or encoded images (bytes, or {"bytes", "path"} as Hugging Face writes them). Paths on
    other file systems than the folder of the images are bad records, see `paths.resolve`. A caption column has texts or
    lists of texts. Rows without image or caption are dropped. Samples are numbered in the order of the files and rows.

    A label column has class names, or integers and `classes.txt` next to the table; see `label_values`. Without caption
    column, the captions are prompts of the class.

    Tables stay in memory, but for images in parquet: reading one of them decodes its row group, so parquet with images
    is fast only for small row groups.

    Args:
      paths: CSV, TSV, JSON lines or parquet files with the same columns.
      name: name of the dataset.
      split: name of the split.
      options: "image": column of the images, "caption": columns of the captions separated by commas, or "none" for rows
        without captions and labels, "label": column of the labels, "folder": base of relative image paths, "outside":
        "false" refuses tables with paths outside that folder, and links to files outside, "true" allows other file
        systems. By default, the first column named in `IMAGE_COLUMNS`, `CAPTION_COLUMNS` and `LABEL_COLUMNS`, in any
        capitalization, and the folder of each file.

    Raises:
      FileNotFoundError: a table does not exist.
      ValueError: a table is damaged, a column is missing, no row has an image and a caption, the first images do not
        exist, paths leave the folder and must not, or rows without captions have wrong labels.
    """

    def __init__(self, paths: Sequence[str], name: str, split: str, options: Mapping[str, str] | None = None):
        options = options or {}
        self.name, self.split, self._paths, self._options = name, split, list(paths), dict(options)
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise ValueError(f"expected the options {', '.join(_OPTIONS)} of {name}, got {', '.join(sorted(unknown))}")
        tables = [_Table(path, options) for path in paths]
        self._report_outside(tables)
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

    def _report_outside(self, tables: Sequence[_Table]) -> None:
        """Log or refuse image paths outside the folders of the images."""
        outside = outside_option(self._options)
        for folder in {} if outside else dict.fromkeys(table.images_folder for table in tables):
            columns = [table.paths for table in tables if table.paths is not None and table.images_folder == folder]
            report_outside(self.name, columns, folder, refuse=outside is False)

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
      images_folder: base of relative image paths.
      columns: names of all columns.
      captioned: whether there is a caption column.
      label_column: description of the label column.
      labels: int32 [rows], -1 without label.
      paths: paths of the images [rows], or None for images in the table.
      dropped: number of rows that are left out, by reason.
    """

    def __init__(self, path: str, options: Mapping[str, str]):
        self.path = path
        self.dropped: dict[str, int] = {}
        self.folder = path.rpartition("/")[0]
        self.images_folder = options.get("folder") or self.folder
        self._outside = outside_option(options)
        self._groups: RowGroups | None = None
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
        self.paths = None if self._groups or not len(self) else table.column(self._image)
        self._check_paths()

    def _choose_columns(self, columns: Sequence[str], options: Mapping[str, str]) -> None:
        self.columns = ", ".join(columns)[:_SHOWN]
        requested = [column for column in options.get("caption", "").split(",") if column]
        self._image = options.get("image") or self._detect(columns, "image", IMAGE_COLUMNS)
        self._label = options.get("label") or first_known(columns, LABEL_COLUMNS)
        self._images_only = requested == [captions.NONE]
        if self._images_only:
            requested, self._label = [], None
        elif not requested and (first_known(columns, CAPTION_COLUMNS) or not self._label):
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
        column = first_known(columns, known)
        if column is None:
            raise ValueError(
                f"{self.path} has no {option} column; its columns are {self.columns}: name one with ?{option}=COLUMN"
            )
        return column

    def _read_parquet(self, path: str, options: Mapping[str, str]) -> pa.Table:
        try:
            if not files.is_remote(path):
                open_regular(path).close()  # Arrow reads local files itself, and waits for FIFOs
            file = parquet.ParquetFile(files.open_file(path) if files.is_remote(path) else path)
            schema = file.schema_arrow
            self._choose_columns(schema.names, options)
            if has_bytes(schema.field(self._image).type):
                self._groups = RowGroups(file, path, self._image)
            used = [name for name in self._used() if not self._groups or name != self._image]
            return read_columns(file, path, used)
        except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for damaged data
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is not a parquet file: {reason}") from error

    def _read_text(self, path: str, options: Mapping[str, str]) -> pa.Table:
        try:
            with files.open_file(path) as file:
                if path.endswith(".jsonl"):
                    _check_lines(file, path)
                    table = json.read_json(file, json.ReadOptions(block_size=_BLOCK))
                    self._choose_columns(table.column_names, options)
                    return table.select(self._used())
                header = file.readline(_HEADER)
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
        images = np.ones(table.num_rows, bool)
        if not self._groups:
            kind = table.column(self._image).type
            if not (is_text(kind) or pa.types.is_null(kind)):
                raise ValueError(f"expected paths in the image column {self._image!r} of {self.path}, got {kind}")
            images = is_filled(table.column(self._image))
        if self._images_only:
            texts = np.ones(table.num_rows, bool)
        elif self.captioned:
            texts = np.any([is_filled(table.column(name)) for name in self._captions], axis=0)
        else:
            texts = np.asarray(pc.not_equal(self.label_strings(), ""))
        for reason, mask in (("no image", ~images), ("no caption" if self.captioned else "no label", images & ~texts)):
            if mask.any():
                self.dropped[reason] = int(mask.sum())
        return images & texts

    def _check_paths(self) -> None:
        keys = [self.key(row) for row in range(min(_CHECKED, len(self)))]
        if self.paths is None or not keys:
            return
        if keys[0].startswith(("http://", "https://")):
            raise ValueError(
                f"{self.path} has URLs in its image column {self._image!r}; download the images first, "
                "for example with img2dataset, or name another column with ?image=COLUMN"
            )
        first = ""
        for key in keys:
            try:
                path = resolve(key, self.images_folder, self._outside or None)  # `report_outside` follows
                if files.is_remote(path) or os.path.exists(path):
                    return
                first = first or f"none of the first {len(keys)} images exists, the first is {path}"
            except ValueError as error:
                first = first or str(error)
        raise ValueError(
            f"{self.path}: {first}; name their folder with ?folder=FOLDER, or their column with ?image=COLUMN"
        )

    def __len__(self) -> int:
        return len(self._rows)

    def image(self, row: int) -> bytes:
        """Read the encoded image of a row."""
        if self._groups is not None:
            return self._groups.read(int(self._rows[row]))
        path = resolve(self.key(row), self.images_folder, self._outside)
        return files.read_file(path, files.LARGEST_IMAGE)

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
        return "" if self.paths is None else as_string(self.paths[row])


def _check_lines(file: BinaryIO, path: str) -> None:
    """Check for lines that Arrow cannot read."""
    for line in iter(lambda: file.readline(_BLOCK), b""):
        if len(line) == _BLOCK:
            raise ValueError(f"expected lines of less than {_BLOCK} bytes in {path}, got a longer one")
        for row in line.removeprefix(codecs.BOM_UTF8).split(b"\r"):  # all line breaks of Arrow
            row = row.strip()
            # Arrow 26 crashes where a block of lines starts with null. An object of several lines could nest deeper.
            if row[:1] + row[-1:] not in (b"", b"{}"):
                raise ValueError(f"expected an object in every line of {path}, got {row[:40]!r}; correct such lines")
            if row.count(b"[") + row.count(b"{") > _NESTED and _depth(row) > _NESTED:
                raise ValueError(f"expected at most {_NESTED} nested values in {path}, got more; simplify such lines")
    file.seek(0)


def _depth(row: bytes) -> int:
    """Return the largest number of nested values in JSON."""
    brackets = _STRING.sub(b"", row).translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(1 if bracket in b"[{" else -1 for bracket in brackets))
