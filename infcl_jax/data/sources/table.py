"""Tables of captioned or labeled images: CSV, TSV, JSON lines and parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infcl_jax.data.sources import captions, files
from infcl_jax.data.sources.base import Classes, Example, bad_record, check_index, locate, starts_of, warn_dropped
from infcl_jax.data.sources.labels import column_labels, prompts
from infcl_jax.data.sources.paths import OUTSIDE, outside_option, report_outside
from infcl_jax.data.sources.table_file import TableFile

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".parquet")
_OPTIONS = ("image", "caption", "label", "folder", OUTSIDE)


class TableSource:
    """Captioned images of the rows of tables.

    The image column has paths or encoded images (bytes, or {"bytes", "path"} as Hugging Face writes them). Paths on
    other file systems than the folder of the images are bad records, see `paths.resolve`. A caption column has texts or
    lists of texts, also as a text in Python or JSON. Rows without image or caption are dropped. Samples are numbered in
    the order of the files and rows.

    A label column has class names, or integers and `classes.txt` next to the table or Hugging Face's names in the
    parquet file; see `label_values`. Without caption column, the captions are prompts of the class.

    Tables stay in memory, but for images in parquet: reading one of them decodes its row group, so parquet with images
    is fast only for small row groups. Opening such files reads row groups with null images once.

    Args:
      paths: CSV, TSV, JSON lines or parquet files with the same columns.
      name: name of the dataset.
      split: name of the split.
      options: "image": column of the images, "caption": columns of the captions separated by commas, or "none" for rows
        without captions and labels, "label": column of the labels, "folder": base of relative image paths, "outside":
        "false" refuses tables with paths outside that folder, and links to files outside, "true" allows other file
        systems. By default, the first column named in `IMAGE_COLUMNS`, `CAPTION_COLUMNS` and `LABEL_COLUMNS` of
        `table_file.py`, in any capitalization, for images one with images, and the folder of each file.
      embedded: rows of each table with an image in the table, from an earlier opening; None: found at opening.

    Raises:
      FileNotFoundError: a table does not exist.
      ValueError: a table is damaged, a column is missing, no row has an image and a caption, the first images do not
        exist, paths leave the folder and must not, or rows without captions have wrong labels.
    """

    def __init__(
        self,
        paths: Sequence[str],
        name: str,
        split: str,
        options: Mapping[str, str] | None = None,
        embedded: Sequence[np.ndarray | None] | None = None,
    ):
        options = options or {}
        self.name, self.split, self._paths, self._options = name, split, list(paths), dict(options)
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise ValueError(f"expected the options {', '.join(_OPTIONS)} of {name}, got {', '.join(sorted(unknown))}")
        tables = [
            TableFile(path, options, rows) for path, rows in zip(paths, embedded or [None] * len(paths), strict=True)
        ]
        self._report_outside(tables)
        self._tables, self._starts = tables, starts_of(map(len, tables))
        self.dropped: dict[str, int] = {}
        for reason in ("damaged row", "no image", "no caption", "no label"):
            count = sum(table.dropped.get(reason, 0) for table in tables)
            if count:
                self.dropped[reason] = count
        warn_dropped(self, "; images of the column " + ", ".join({repr(t.image_column): None for t in tables}))
        if len(self) == 0:
            text = "caption" if tables[0].captioned else "label"
            raise ValueError(
                f"{name} has no row with an image and a {text}; check the columns {tables[0].columns}"
                f"; the images are those of {tables[0].image_column!r}"
            )
        self.captioned = all(table.captioned for table in tables)
        self._images_only = self._options.get("caption") == captions.NONE
        self._classes: Classes | str
        try:
            if self._images_only:
                raise ValueError(f"{name} was opened without classes; leave out caption={captions.NONE}")
            columns = [table.label_strings() for table in tables]
            names = tables[0].class_names
            if any(table.class_names != names for table in tables):
                raise ValueError(f"expected the same class names in all tables of {name}, got others in some")
            labels, self._classes = column_labels(columns, tables[0].folder, tables[0].label_column, names)
            for table, values in zip(tables, labels, strict=True):
                table.labels = values
        except ValueError as error:
            if not (self.captioned or self._images_only):
                raise
            self._classes = str(error)  # training on captions does not need the labels

    def _report_outside(self, tables: Sequence[TableFile]) -> None:
        """Log or refuse image paths outside the folders of the images."""
        outside = outside_option(self._options)
        for folder in {} if outside else dict.fromkeys(table.images_folder for table in tables):
            columns = [table.paths for table in tables if table.paths is not None and table.images_folder == folder]
            report_outside(self.name, columns, folder, refuse=outside is False)

    def __reduce__(self) -> Any:
        embedded = [table.embedded for table in self._tables]  # can take a pass over all images
        return TableSource, (self._paths, self.name, self.split, self._options, embedded)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _locate(self, index: int) -> tuple[TableFile, int]:
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

    def image_numbers(self) -> np.ndarray:
        """Number the different images of the rows, by path or content.

        Reads all images that are in the tables.
        """
        numbers: dict[str, int] = {}
        names = (name for table in self._tables for name in table.image_names())
        return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)

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
