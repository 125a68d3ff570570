"""Rows of one table: its columns, images and captions."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from csv import Error as CSVError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from infcl_jax.data.sources import captions, files
from infcl_jax.data.sources.columns import (
    RowGroups,
    as_string,
    class_names,
    first_known,
    first_paths,
    image_fields,
    is_filled,
    is_text,
    null_count,
    plain_type,
    read_columns,
    without_nan,
)
from infcl_jax.data.sources.labels import UNLABELED, label_strings
from infcl_jax.data.sources.paths import outside_option, resolve
from infcl_jax.data.sources.tar_scan import IMAGES
from infcl_jax.data.sources.text_tables import read_csv, read_json_lines
from infcl_jax.runtime.file_io import open_regular

IMAGE_COLUMNS = (
    "image", "image_path", "filepath", "file_path", "filename", "file_name", "path", "file", "img", "img_path", "jpg",
    "jpeg", "png", "webp", "image_bytes", "bytes", "url", "image_url", "image_name",
)  # fmt: skip
CAPTION_COLUMNS = (
    "caption", "captions", "text", "texts", "title", "description", "alt_text", "alt", "sentence", "txt",
)  # fmt: skip
LABEL_COLUMNS = ("label", "class")
_SHOWN = 1000  # characters of the columns in messages
_PLAIN_NAME = re.compile(r"[\w./-]{1,255}")  # unlike texts, it is looked for among the files
_CHECKED = 16  # images whose existence is checked


class TableFile:
    """Rows of one file that have an image and a caption or label.

    Attributes:
      path: path of the file.
      folder: folder of the file.
      images_folder: base of relative image paths.
      columns: names of all columns.
      image_column: name of the image column.
      captioned: whether there is a caption column.
      label_column: description of the label column.
      class_names: names of integer labels in the file itself, as Hugging Face writes them; else None.
      labels: int32 [rows], -1 without label.
      paths: paths of the images [rows], "" for images in the table; None if all are.
      embedded: bool [all rows], whether the image is in the table; None if no image can be.
      dropped: number of rows that are left out, by reason.
    """

    def __init__(self, path: str, options: Mapping[str, str], embedded: np.ndarray | None = None):
        self.path = path
        self.dropped: dict[str, int] = {}
        self.folder = path.rpartition("/")[0]
        self.images_folder = options.get("folder") or self.folder
        self.class_names: tuple[str, ...] | None = None
        self.embedded = embedded
        self._options, self._outside = options, outside_option(options)
        self._groups: RowGroups | None = None
        table = self._read_parquet() if path.endswith(".parquet") else self._read_text()
        for name in self._captions:
            table = table.set_column(table.column_names.index(name), name, without_nan(table.column(name)))
        self._label_values = table.column(self._label) if self._label else None
        paths = self._read_paths(table)
        complete = self._complete(table, paths)
        self._rows = np.flatnonzero(complete)
        # Filtering keeps the chunks of a column: one Arrow array has at most 2 GiB of text.
        kept = pa.array(complete)
        self._texts = [table.column(name).filter(kept) for name in self._captions]
        self._label_values = table.column(self._label).filter(kept) if self._label else None
        self.labels = np.full(len(self._rows), UNLABELED, np.int32)
        self.paths = None if paths is None or not len(self) else paths.filter(kept)
        self._check_paths()

    def _choose_columns(self, columns: Sequence[str], image: str | None = None) -> list[str]:
        """Return the names of the columns to read, the images' first.

        `image` is the name of the image column unless there is such an option; None: the first known name.
        """
        self.columns = ", ".join(columns)[:_SHOWN]
        requested = [column for column in self._options.get("caption", "").split(",") if column]
        self.image_column = self._options.get("image") or image or self._detect(columns, "image", IMAGE_COLUMNS)
        self._label = self._options.get("label") or first_known(columns, LABEL_COLUMNS)
        self._images_only = requested == [captions.NONE]
        if self._images_only:
            requested, self._label = [], None
        elif not requested and (first_known(columns, CAPTION_COLUMNS) or not self._label):
            requested = [self._detect(columns, "caption", CAPTION_COLUMNS)]
        self._captions, self.captioned = requested, bool(requested)
        self.label_column = f"{self.path}, column {self._label!r}"
        chosen = [("image", self.image_column), *(("caption", column) for column in self._captions)]
        named = chosen + ([("label", self._label)] if self._label else [])
        for option, column in named:
            if list(columns).count(column) > 1:
                raise ValueError(f"{self.path} has several columns named {column!r}; rename all but one")
            if column not in columns:
                raise ValueError(f"{self.path} has no {option} column {column!r}; its columns are {self.columns}")
        return list(dict.fromkeys(column for _, column in named))

    def _detect(self, columns: Sequence[str], option: str, known: Sequence[str]) -> str:
        column = first_known(columns, known)
        if column is None:
            has_header = not self.path.endswith((".parquet", ".jsonl"))
            raise ValueError(
                f"{self.path} has no {option} column; its columns are {self.columns}: name one with ?{option}=COLUMN"
                + (", or put a line of names in front of the rows" if has_header else "")
            )
        return column

    def _read_parquet(self) -> pa.Table:
        path = self.path
        try:
            if not files.is_remote(path):
                open_regular(path).close()  # Arrow reads local files itself, and waits for FIFOs
            file = parquet.ParquetFile(files.open_file(path) if files.is_remote(path) else path)
            types = {field.name: plain_type(field.type) for field in file.schema_arrow}
            image, *used = self._choose_columns(file.schema_arrow.names, self._parquet_images(file, types))
            has_bytes, has_paths = self._image_fields(types[image])
            if has_bytes:
                groups = RowGroups(file, path, image)
                self.embedded = groups.filled() if self.embedded is None else self.embedded
                self._groups = groups if self.embedded.any() else None
            if has_paths and not (has_bytes and self.embedded.all()):
                used.append(f"{image}.path" if pa.types.is_struct(types[image]) else image)
            self.class_names = class_names(file.schema_arrow, self._label)
            return read_columns(file, path, used)
        except (pa.ArrowException, OSError) as error:  # Arrow raises OSError for damaged data
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is not a parquet file: {reason}") from error

    def _parquet_images(self, file: parquet.ParquetFile, types: Mapping[str, pa.DataType]) -> str | None:
        """Choose the column of images by its values.

        The first known name has the images of all rows, else of some. Paths of images that are not downloaded, or gone,
        and columns without values have none.
        """
        known = [name for name in types if first_known([name], IMAGE_COLUMNS)]
        ordered = sorted(known, key=lambda name: IMAGE_COLUMNS.index(name.lower()))
        if len(ordered) < 2:
            return None
        nulls = {name: null_count(file, name) for name in ordered}
        encoded = [name for name in ordered if (image_fields(types[name]) or (False,))[0]]
        rows = file.metadata.num_rows
        usable = [name for name in ordered if nulls[name] < rows and (name in encoded or self._has_paths(file, name))]
        complete = [name for name in usable if not nulls[name]]
        return next(iter(complete + usable + encoded), None)

    def _has_paths(self, file: parquet.ParquetFile, column: str) -> bool:
        """Tell if a column has paths of images that exist."""
        if not is_text(plain_type(file.schema_arrow.field(column).type)):
            return False
        keys = first_paths(file, self.path, column, _CHECKED)
        return bool(keys) and self._path_problem(keys, column) is None

    def _read_text(self) -> pa.Table:
        path = self.path
        try:
            with files.open_file(path) as file:
                if path.endswith(".jsonl"):
                    return read_json_lines(file, path, self._choose_columns)
                table, damaged = read_csv(file, path, self._choose_columns, self._is_image)
        except (pa.ArrowException, UnicodeDecodeError, CSVError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} cannot be read: {reason}; check that it is a table in UTF-8") from error
        if damaged:
            self.dropped["damaged row"] = damaged
        return table

    def _image_fields(self, kind: pa.DataType) -> tuple[bool, bool]:
        fields = image_fields(kind)
        if fields is None:
            raise ValueError(
                f"{self.path}, image column {self.image_column!r}: expected paths, encoded images or structs of bytes"
                f" and path, got {kind}"
            )
        return fields

    def _read_paths(self, table: pa.Table) -> pa.ChunkedArray | None:
        """Return the paths of images, "" for embedded ones; None without paths."""
        if self.image_column not in table.column_names:
            return None
        column = table.column(self.image_column)
        if not is_text(column.type):
            _, has_paths = self._image_fields(column.type)
            if not has_paths:
                return pa.chunked_array([pa.nulls(table.num_rows, pa.string())])
            column = pc.struct_field(column, "path")
        return column if self.embedded is None else pc.if_else(self.embedded, pa.scalar("", column.type), column)

    def _complete(self, table: pa.Table, paths: pa.ChunkedArray | None) -> np.ndarray:
        """Return a mask of the complete rows, and count the others."""
        images = np.zeros(table.num_rows, bool) if self.embedded is None else self.embedded
        if paths is not None:
            images = images | is_filled(paths)
        if self._images_only:
            texts = np.ones(len(images), bool)  # a table without columns has no rows
        elif self.captioned:
            texts = np.any([self._filled_captions(table, name) for name in self._captions], axis=0)
        else:
            texts = np.asarray(pc.not_equal(self.label_strings(), ""))
        for reason, mask in (("no image", ~images), ("no caption" if self.captioned else "no label", images & ~texts)):
            if mask.any():
                self.dropped[reason] = int(mask.sum())
        return images & texts

    def _filled_captions(self, table: pa.Table, column: str) -> np.ndarray:
        try:
            return is_filled(table.column(column))
        except ValueError as error:
            raise ValueError(
                f"{self.path}, caption column {column!r}: {error}; name another with ?caption=COLUMN"
            ) from None

    def _check_paths(self) -> None:
        if self.paths is None or self._groups is not None or not len(self):
            return  # where some images are in the table, paths without a file are bad records
        problem = self._path_problem([self.key(row) for row in range(min(_CHECKED, len(self)))], self.image_column)
        if problem:
            raise ValueError(f"{self.path}{problem}")

    def _path_problem(self, keys: Sequence[str], column: str) -> str | None:
        """Tell why none of the paths of images can be read, if so."""
        if keys[0].startswith(("http://", "https://")):
            return (
                f" has URLs in its image column {column!r}; download the images first, "
                "for example with img2dataset, or name another column with ?image=COLUMN"
            )
        first = ""
        for key in keys:
            try:
                path = resolve(key, self.images_folder, self._outside or None)  # `report_outside` follows
                if files.is_remote(path) or os.path.exists(path):
                    return None
                first = first or f"none of the first {len(keys)} images exists, the first is {path}"
            except ValueError as error:
                first = first or str(error)
        return f": {first}; name their folder with ?folder=FOLDER, or another column than {column!r} with ?image=COLUMN"

    def _is_image(self, name: bytes) -> bool:
        """Tell if a text is the name of an image file; in remote folders, by its extension."""
        key = os.fsdecode(name)
        image = key.lower().endswith(tuple(f".{extension}" for extension in IMAGES))
        if files.is_remote(self.images_folder):
            return image
        return bool(image or _PLAIN_NAME.fullmatch(key)) and os.path.isfile(os.path.join(self.images_folder, key))

    def __len__(self) -> int:
        return len(self._rows)

    def image(self, row: int) -> bytes:
        """Read the encoded image of a row."""
        key = self.key(row)
        if self._groups is not None and not key:
            return self._groups.read(int(self._rows[row]))
        return files.read_file(resolve(key, self.images_folder, self._outside), files.LARGEST_IMAGE)

    def captions(self, row: int) -> list[str]:
        """Return the captions of a row."""
        result: list[str] = []
        for column in self._texts:
            value = column[row].as_py()
            cells = value if isinstance(value, list) else [value]
            texts = [captions.text(cell) if isinstance(cell, bytes) else (cell or "").strip() for cell in cells]
            result += texts if isinstance(value, list) else captions.cell_captions(texts[0])
        return result

    def label_strings(self) -> pa.ChunkedArray:
        """Return the label column as strings, "" where there is none."""
        if self._label is None:
            raise ValueError(
                f"{self.path} has no label column; its columns are {self.columns}: name one with ?label=COLUMN"
            )
        return label_strings(self._label_values, self.label_column)

    def key(self, row: int) -> str:
        """Return the image path of a row, or "" for images in the table."""
        return "" if self.paths is None else as_string(self.paths[row])

    def image_names(self) -> list[str]:
        """Name the image of each row by path or hash."""
        keys = enumerate(map(self.key, range(len(self))))
        return [
            files.absolute(key if files.is_remote(key) else os.path.join(self.images_folder, key))
            if key
            else self._image_hash(row)
            for row, key in keys
        ]

    def _image_hash(self, row: int) -> str:
        try:
            return hashlib.blake2b(self.image(row)).hexdigest()
        except ValueError:  # a bad record
            return f"{self.path}:{row}"
