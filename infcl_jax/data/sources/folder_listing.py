"""Listing of the images and captions of a folder."""

from __future__ import annotations

import collections
import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infcl_jax.data.sources import captions, files
from infcl_jax.data.sources.annotations import check_no_annotations, check_no_table
from infcl_jax.data.sources.labels import CLASS_FILES, TEMPLATE_FILE
from infcl_jax.data.sources.tar_scan import IMAGES, is_hidden

CAPTION = ".txt"
_MOST_TEXTS = 16  # text files that are read to see if they are tables
_LONGEST_BLANK = 5  # bytes of a caption file that is read to see if it is blank: byte order mark and line break
_ANNOTATIONS = re.compile(r"(?:annotations/)?(?:captions|dataset_|[^/]*karpathy)[^/]*\.json", re.IGNORECASE)


class Listing(NamedTuple):
    """Files of a folder, by path relative to it.

    Attributes:
      images: images, sorted.
      repeated: images in folders whose images are listed under another path, sorted.
      captioned: images with a caption file that is not blank, sorted.
      renamed: caption file by image, where its extension is not in lower case.
      unpaired: number of caption files without image.
      outside: links to folders outside the folder.
      others: compressed tar files, JSON files with names of caption annotations, and text files of the folder itself.
    """

    images: Sequence[str]
    repeated: Sequence[str]
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
    repeated: list[str] = []
    captioned: list[str] = []
    renamed: dict[str, str] = {}
    unpaired = 0
    outside: list[str] = []
    others: list[str] = []
    for relative, entries, is_listed in _walk(folder, outside, follow_outside):
        stems = {stem(name): name for name in entries if _is_caption(name)}  # .txt is after .TXT and wins
        paths = {os.path.join(relative, name): stem(name) for name in entries if _is_image(name)}
        if is_listed:
            repeated += paths
            continue
        images += paths
        unpaired += len(stems.keys() - paths.values())
        for path, image_stem in paths.items():
            caption = stems.get(image_stem)
            if caption is None or _is_blank(entries[caption]):
                continue
            captioned.append(path)
            if not caption.endswith(CAPTION):
                renamed[path] = os.path.join(relative, caption)
        others += [path for name in entries if _may_have_captions(path := os.path.join(relative, name))]
    return Listing(sorted(images), sorted(repeated), sorted(captioned), renamed, unpaired, outside, others)


def check_no_others(folder: str, listing: Listing) -> None:
    """Check that a folder without captions has none in other files.

    These are compressed tar files, unless there are images, annotations of other tools, and tables.

    Raises:
      ValueError: it has.
    """
    others = [os.path.join(folder, name) for name in listing.others]
    for path in others:
        if not listing.images:
            files.check_uncompressed([path])
        if path.lower().endswith(".json"):
            content = None
            with contextlib.suppress(OSError, ValueError):
                content = files.read_json(path, object)
            check_no_annotations(content, path)
    if len({class_of(image) for image in listing.images}) == 1:
        folders = {os.path.basename(image): os.path.dirname(os.path.join(folder, image)) for image in listing.images}
        for path in [path for path in others if _is_caption(path)][:_MOST_TEXTS]:
            check_no_table(path, folders)


def stem(name: str) -> str:
    """Return a name up to its last dot."""
    return os.path.splitext(name)[0]


def class_of(path: str) -> str:
    """Return the class of a relative path, its first folder; "" without folder."""
    return path.partition(os.sep)[0] if os.sep in path else ""


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1][1:].lower() in IMAGES and not is_hidden(name)


def _is_caption(name: str) -> bool:
    return name.lower().endswith(CAPTION) and not is_hidden(name) and name not in (*CLASS_FILES, TEMPLATE_FILE)


def _may_have_captions(path: str) -> bool:
    """Tell if a file is one of `Listing.others` by its name."""
    is_text = os.sep not in path and _is_caption(path)
    return is_text or files.is_compressed_tar(path) or _ANNOTATIONS.fullmatch(path) is not None


def _is_blank(entry: os.DirEntry[str]) -> bool:
    """Tell if a caption file is blank; one that cannot be read is not."""
    with contextlib.suppress(OSError, ValueError):
        if entry.is_file() and (size := entry.stat().st_size) <= _LONGEST_BLANK:
            return size == 0 or not captions.text(files.read_file(entry.path, _LONGEST_BLANK))
    return False


def _walk(
    folder: str, outside: list[str], follow_outside: bool
) -> Iterator[tuple[str, dict[str, os.DirEntry[str]], bool]]:
    """List folders, those behind links last.

    Within each subfolder of `folder`, which may be a class, a folder is listed once. Loops of links end there.

    Args:
      folder: local path.
      outside: list that receives the links to folders outside.
      follow_outside: whether to follow these.

    Yields:
      (path relative to `folder`, files by name in sorted order, whether the folder is listed under another path).
    """
    root = Path(folder).resolve()
    above = {_identity(parent) for parent in (root, *root.parents)}
    listed: dict[tuple[int, int], set[str]] = {}  # subfolders of `folder` by identity of a folder
    pending = collections.deque([""])
    while pending:
        relative = pending.popleft()
        path = os.path.join(folder, relative)
        try:
            identity = _identity(path)
            subfolder = relative.partition(os.sep)[0]
            if relative and (identity in above or subfolder in listed.get(identity, ())):
                continue
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:  # a folder that cannot be listed is left out
            continue
        is_listed = identity in listed
        listed.setdefault(identity, set()).add(subfolder)
        folders = {entry.name: entry.is_symlink() for entry in entries if files.is_folder(entry)}
        yield relative, {entry.name: entry for entry in entries if entry.name not in folders}, is_listed
        for name, is_link in folders.items():
            child = os.path.join(relative, name)
            if is_hidden(name):
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
