"""Tables of captioned or labeled images: CSV, TSV, JSON lines and parquet files."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infcl_jax.data.sources import captions, files
from infcl_jax.data.sources.base import Classes, locate, starts_of
from infcl_jax.data.sources.file_source import FileSource
from infcl_jax.data.sources.labels import column_labels
from infcl_jax.data.sources.paths import OUTSIDE, outside_option, report_outside
from infcl_jax.data.sources.table_file import TableFile

EXTENSIONS = (".csv", ".tsv", ".jsonl", ".parquet")
_OPTIONS = ("image", "caption", "label", "folder", OUTSIDE)


class TableSource(FileSource):
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
      options: "image": column of the images, "caption": columns of the captions separated by commas, or "none" for rows
        without captions and labels, "label": column of the labels, "folder": base of relative image paths, "outside":
        "false" refuses tables with paths outside that folder, and links to files outside, "true" allows other file
        systems. By default, the first column named in `IMAGE_COLUMNS`, `CAPTION_COLUMNS` and `LABEL_COLUMNS` of
        `table_file.py`, in any capitalization, for images one with images, and the folder of each file.
      embedded: rows of each table with an image in the table, from an earlier opening; None: found at opening.
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
        # Paths outside the folders of the images are logged or refused.
        outside = outside_option(options)
        for folder in {} if outside else dict.fromkeys(table.images_folder for table in tables):
            columns = [table.paths for table in tables if table.paths is not None and table.images_folder == folder]
            report_outside(name, columns, folder, refuse=outside is False)
        self._tables, self._starts = tables, starts_of(map(len, tables))
        self.dropped: dict[str, int] = {}
        for reason in ("damaged row", "no image", "no caption", "no label"):
            count = sum(table.dropped.get(reason, 0) for table in tables)
            if count:
                self.dropped[reason] = count
        self._warn_dropped("; images of the column " + ", ".join({repr(t.image_column): None for t in tables}))
        if len(self) == 0:
            text = "caption" if tables[0].captioned else "label"
            raise ValueError(
                f"{name} has no row with an image and a {text}; check the columns {tables[0].columns}"
                f"; the images are those of {tables[0].image_column!r}"
            )
        self.captioned = all(table.captioned for table in tables)
        self.images_only = self._options.get("caption") == captions.NONE
        self._find_classes(self._label_rows)

    def _label_rows(self) -> Classes:
        columns = [table.label_strings() for table in self._tables]
        first = self._tables[0]
        if any(table.class_names != first.class_names for table in self._tables):
            raise ValueError(f"expected the same class names in all tables of {self.name}, got others in some")
        labels, result = column_labels(columns, first.folder, first.label_column, first.class_names)
        for table, values in zip(self._tables, labels, strict=True):
            table.labels = values
        return result

    def __reduce__(self) -> Any:
        embedded = [table.embedded for table in self._tables]  # can take a pass over all images
        return TableSource, (self._paths, self.name, self.split, self._options, embedded)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _locate(self, index: int) -> tuple[TableFile, int]:
        number, row = locate(self._starts, index)
        return self._tables[number], row

    def _read(self, index: int) -> tuple[bytes, list[str] | None, int]:
        table, row = self._locate(index)
        texts = table.captions(row) if table.captioned else None
        return table.image(row), texts, int(table.labels[row])

    def image_numbers(self) -> np.ndarray:
        """Number the different images of the rows, by path or content.

        Reads all images that are in the tables.
        """
        numbers: dict[str, int] = {}
        names = (name for table in self._tables for name in table.image_names())
        return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)

    def key(self, index: int) -> str:
        """Return the image path of a row, or its index without path."""
        table, row = self._locate(index)
        return table.key(row) or str(index)

    def _place(self, index: int) -> str:
        table, row = self._locate(index)
        return ", ".join(filter(None, (files.name_of(table.path), table.key(row))))

    def shard(self, index: int) -> str:
        """Name the image file of a row, or its table."""
        table, row = self._locate(index)
        return table.key(row) or files.name_of(table.path)
