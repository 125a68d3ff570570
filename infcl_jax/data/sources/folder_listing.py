"""Listing of the images and captions of a folder."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infcl_jax.data.sources import captions, files
from infcl_jax.data.sources.annotations import check_no_annotations
from infcl_jax.data.sources.labels import CLASS_FILES, TEMPLATE_FILE
from infcl_jax.data.sources.tar_scan import IMAGES

CAPTION = ".txt"
_LONGEST_BLANK = 64  # bytes of a caption file that is read to see if it is blank
_ANNOTATIONS = re.compile(r"(?:annotations/)?(?:captions|dataset_|[^/]*karpathy)[^/]*\.json", re.IGNORECASE)


class Listing(NamedTuple):
    """Files of a folder, by path relative to it.

    Attributes:
      images: images, sorted.
      captioned: images with a caption file that is not blank, sorted.
      renamed: caption file by image, where its extension is not in lower case.
      unpaired: number of caption files without image.
      outside: links to folders outside the folder.
      others: compressed tar files, and JSON files with names of caption annotations.
    """

    images: Sequence[str]
    captioned: Sequence[str]
    renamed: Mapping[str, str]
    unpaired: int
    outside: Sequence[str]
    others: Sequence[str]


def list_folder(folder: str, *, follow_outside: bool) -> Listing:
    """List the images and captions of a folder and its subfolders.

    Hidden files, and folders that are hidden or of an operating system, are left out. Links to folders are followed,
    except from a folder to itself, or to one above it.

    Args:
      folder: local path.
      follow_outside: whether to follow links to folders outside `folder`.
    """
    images: list[str] = []
    captioned: list[str] = []
    renamed: dict[str, str] = {}
    unpaired = 0
    outside: list[str] = []
    others: list[str] = []
    for relative, names in _walk(folder, outside, follow_outside):
        stems = {stem(name): name for name in names if _is_caption(name)}  # .txt is after .TXT and wins
        paths = {os.path.join(relative, name): stem(name) for name in names if _is_image(name)}
        images += paths
        unpaired += len(stems.keys() - paths.values())
        for path, image_stem in paths.items():
            caption = stems.get(image_stem)
            if caption is None or _is_blank(os.path.join(folder, relative, caption)):
                continue
            captioned.append(path)
            if not caption.endswith(CAPTION):
                renamed[path] = os.path.join(relative, caption)
        joined = (os.path.join(relative, name) for name in names)
        others += [path for path in joined if files.is_compressed_tar(path) or _ANNOTATIONS.fullmatch(path)]
    return Listing(sorted(images), sorted(captioned), renamed, unpaired, outside, others)


def check_no_others(folder: str, listing: Listing) -> None:
    """Check that a folder without captions has none in other files.

    These are compressed tar files, unless there are images, and annotations of other tools.

    Raises:
      ValueError: it has.
    """
    for path in (os.path.join(folder, name) for name in listing.others):
        if not listing.images:
            files.check_uncompressed([path])
        if path.lower().endswith(".json"):
            content = None
            with contextlib.suppress(OSError, ValueError):
                content = files.read_json(path, object)
            check_no_annotations(content, path)


def stem(name: str) -> str:
    """Return a name up to its last dot."""
    return os.path.splitext(name)[0]


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1][1:].lower() in IMAGES and not files.is_hidden(name)


def _is_caption(name: str) -> bool:
    return name.lower().endswith(CAPTION) and not files.is_hidden(name) and name not in (*CLASS_FILES, TEMPLATE_FILE)


def _is_blank(path: str) -> bool:
    """Tell if a caption file is blank; one that cannot be read is not."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode) and status.st_size <= _LONGEST_BLANK:
            return not captions.text(files.read_file(path, _LONGEST_BLANK))
    return False


def _walk(folder: str, outside: list[str], follow_outside: bool) -> Iterator[tuple[str, list[str]]]:
    """List folders, those behind links last.

    Within each subfolder of `folder`, which may be a class, a folder is listed once. Loops of links end there.

    Args:
      folder: local path.
      outside: list that receives the links to folders outside.
      follow_outside: whether to follow these.

    Yields:
      (path relative to `folder`, sorted names of the files).
    """
    root = Path(folder).resolve()
    above = {_identity(parent) for parent in (root, *root.parents)}
    listed: set[tuple[str, tuple[int, int]]] = set()  # (subfolder of `folder`, identity of a folder)
    pending = collections.deque([""])
    while pending:
        relative = pending.popleft()
        path = os.path.join(folder, relative)
        try:
            identity = _identity(path)
            key = (relative.partition(os.sep)[0], identity)
            if relative and (identity in above or key in listed):
                continue
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:  # a folder that cannot be listed is left out
            continue
        listed.add(key)
        folders = {entry.name: entry.is_symlink() for entry in entries if _is_folder(entry)}
        yield relative, [entry.name for entry in entries if entry.name not in folders]
        for name, is_link in folders.items():
            child = os.path.join(relative, name)
            if files.is_hidden(name):
                continue
            if not is_link:
                pending.appendleft(child)
                continue
            target = Path(folder, child).resolve()
            is_outside = not target.is_relative_to(root) and target not in root.parents
            if is_outside:
                outside.append(child)
            if follow_outside or not is_outside:
                pending.append(child)


def _identity(path: str | Path) -> tuple[int, int]:
    """Return numbers of a folder that all links to it share."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False
