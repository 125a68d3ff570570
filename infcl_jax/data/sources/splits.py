"""Splits of datasets given by path."""

import contextlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from pyarrow import parquet

from infcl_jax.data.sources import files
from infcl_jax.data.sources.tar_scan import is_hidden

_ALIASES = (
    ("train", "training"),
    ("validation", "val", "valid", "dev"),
    ("test", "testing"),
)
WHOLE = "all"  # all samples of a path; a path without splits is also the split "train"
_SLICE = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\])?")


class Split(NamedTuple):
    """Split name with bounds, such as "train[:90%]"."""

    name: str  # without bounds
    start: str | None  # first sample, such as "10%" or "100"; None: the first of all
    stop: str | None  # sample after the last; None: all

    def bounds(self, size: int) -> tuple[int, int]:
        """Return the bounds in samples; percentages are rounded."""
        start = 0 if self.start is None else min(_position(self.start, size), size)
        stop = size if self.stop is None else min(_position(self.stop, size), size)
        return start, stop


def _position(bound: str, size: int) -> int:
    return round(size * int(bound[:-1]) / 100) if bound.endswith("%") else int(bound)


def parse_split(split: str) -> Split:
    """Parse a split name with bounds."""
    match = _SLICE.fullmatch(split)
    if match is None:
        raise ValueError(f"expected a split such as train, train[:90%] or train[100:200], got {split!r}")
    return Split(match["name"], match["start"], match["stop"])


def split_folder(folder: str, split: str, extensions: Sequence[str]) -> list[str]:
    """Find the files or the subfolder of a split in a folder.

    A subfolder or files whose name contains the split's name as a word (`train/`, `train-00000.tar`, `coco_val.csv`)
    are the split. In a folder without such names, everything is the split "train" or "all". Hidden files and folders
    are left out, as are the records of img2dataset: `00000.parquet` next to `00000.tar` or to the folder `00000`.
    `extensions` belong to datasets in files.

    Returns:
      Sorted paths of files with the same extension, or the path of one folder.
    """
    with os.scandir(folder) as entries:  # tells folders without a request for each file
        are_folders = {entry.name: files.is_folder(entry) for entry in entries if not is_hidden(entry.name)}
    names = sorted(are_folders)
    folders = [name for name in names if are_folders[name]]
    tables = [name for name in names if name.endswith(tuple(extensions)) and not name.startswith("metadata.")]
    # Without img2dataset's records of a tar file or folder of the same name.
    recorded = {name.removesuffix(".tar") for name in tables if name.endswith(".tar")}
    recorded.update(_folders_of_records(folder, tables, folders))
    tables = [name for name in tables if name.removesuffix(".parquet") not in recorded or not name.endswith(".parquet")]
    if not tables and "data" in folders and any(f.endswith(tuple(extensions)) for f in os.listdir(f"{folder}/data")):
        return split_folder(f"{folder}/data", split, extensions)  # repositories of Hugging Face
    known = {alias for aliases in _ALIASES for alias in aliases}
    splits = [name for name in folders if name in known] + [name for name in tables if words(name) & known]
    requested = aliases_of(split)
    for name in folders:
        if name in requested:
            return [f"{folder}/{name}"]
    chosen = [name for name in tables if words(name) & requested]
    if split == WHOLE:
        chosen = tables
    if not chosen and splits and split != WHOLE:
        raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(splits[:8])}")
    if not chosen:
        check_only_split(folder, split)
        chosen = tables
    if any(name.endswith(".tar") for name in chosen):
        files.check_uncompressed(f"{folder}/{n}" for n in names if chosen == tables or words(n) & requested)
    if len({os.path.splitext(name)[1] for name in chosen}) > 1:
        hint = images_hint(folder) or "; name the files, such as *.tar"
        raise ValueError(f"{folder} has files of several kinds: {', '.join(chosen[:4])}{hint}")
    return [f"{folder}/{name}" for name in chosen] or [folder]


def _folders_of_records(folder: str, names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """List the folders of images that have img2dataset's records beside them."""
    parquets = {name.removesuffix(".parquet") for name in names if name.endswith(".parquet")}
    beside = [name for name in folders if name in parquets]
    if not beside:
        return []
    # A damaged table is an error where it is read.
    with contextlib.suppress(Exception), files.open_file(f"{folder}/{beside[0]}.parquet") as file:
        return beside if {"key", "status"} <= set(parquet.read_schema(file).names) else []
    return []


def images_hint(folder: str) -> str:
    """Name the folders of img2dataset's images, for errors of other tables beside them; "" without such folders."""
    names = sorted(os.listdir(folder))
    folders = _folders_of_records(folder, names, [name for name in names if os.path.isdir(f"{folder}/{name}")])
    if not folders:
        return ""
    shown = ", ".join(folders[:4]) + (f" and {len(folders) - 4} more" if len(folders) > 4 else "")
    return (
        f"; {folder} has images of img2dataset in the folders {shown}: move tables that have no such folder to another"
        " place to read these"
    )


def check_only_split(path: str, split: str) -> None:
    """Check that the split of files that are one split is "train", "all" or a word of the path's last component."""
    if split not in ("train", WHOLE) and not aliases_of(split) & words(files.name_of(path)):
        raise ValueError(f"{path} is one split, train, got split {split!r}; use train, or bounds such as train[90%:]")


def is_split(name: str) -> bool:
    """Tell if a folder is named after a split."""
    return any(name in aliases for aliases in _ALIASES)


def aliases_of(split: str) -> set[str]:
    """Return the names of a split in paths."""
    return next((set(aliases) for aliases in _ALIASES if split in aliases), {split})


def words(name: str) -> set[str]:
    """Split a file name into words of letters."""
    return set(re.split(r"[^a-z]+", name.lower()))
