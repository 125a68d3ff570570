"""Folders of images with captions or with a subfolder per class."""

import collections
import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infcl_jax.data.sources import captions, files, paths
from infcl_jax.data.sources.base import Classes, Source
from infcl_jax.data.sources.captions import check_no_annotations, check_no_table, check_not_saved_to_disk
from infcl_jax.data.sources.file_source import FileSource
from infcl_jax.data.sources.labels import CLASS_FILES, TEMPLATE_FILE, UNLABELED, label_values
from infcl_jax.data.sources.table import TableSource
from infcl_jax.data.sources.tar_scan import IMAGES, is_hidden

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_CAPTION = ".txt"
_MOST_TEXTS = 16  # text files that are read to see if they are tables
_LONGEST_BLANK = 5  # bytes of a caption file that is read to see if it is blank: byte order mark and line break
_ANNOTATIONS = re.compile(r"(?:annotations/)?(?:captions|dataset_|[^/]*karpathy)[^/]*\.json", re.IGNORECASE)

_logger = logging.getLogger(__name__)


def folder_source(folder: str, name: str, split: str, options: Mapping[str, str] | None = None) -> Source:
    """Open a folder of images.

    With a `metadata.csv`, `metadata.jsonl` or `metadata.parquet` in the layout of Hugging Face's ImageFolder, the
    samples are the rows of that table. Otherwise they are the images with a `.txt` file of the same name, or without
    such files, the images in a subfolder per class.

    For the options see `TableSource`.
    """
    for table in METADATA:
        if (Path(folder) / table).is_file():
            return TableSource([f"{folder}/{table}"], name, split, options)
    outside = paths.outside_option(options or {})
    others = {key: value for key, value in (options or {}).items() if key != paths.OUTSIDE}
    if others and others != {"caption": captions.NONE}:
        raise ValueError(
            f"expected no options for the folder {name} without {METADATA[0]}, or caption={captions.NONE}, got"
            f" {', '.join(others)}"
        )
    return FolderSource(folder, name, split, images_only=bool(others), outside=outside)


class FolderSource(FileSource):
    """Images in a folder and its subfolders, with captions in `.txt` files.

    Samples are numbered in the order of the relative paths. The class of an image is its subfolder. Images without
    caption or with a blank one, and caption files without image, are dropped. Without any captioned image, the captions
    are prompts of the class, and images without class are dropped. Hidden files and folders are left out, and links to
    folders are followed, see `_list_folder`. A folder that several paths lead to counts once, or once in each class.

    Args:
      images_only: whether the samples are all images, without captions and classes.
      outside: None: links to folders outside are followed, with a warning. False: they are not, and links to files
        outside are bad records. True: they are followed.
    """

    def __init__(self, folder: str, name: str, split: str, *, images_only: bool = False, outside: bool | None = None):
        self.name, self.split, self._folder, self.images_only = name, split, folder, images_only
        self._outside = outside
        listing = _list_folder(folder, follow_outside=outside is not False)
        keys, images, unpaired, repeated = listing.captioned, listing.images, listing.unpaired, len(listing.repeated)
        self.captioned = bool(keys) and not images_only
        if images_only:
            keys, unpaired = images, 0
        elif not self.captioned:
            _check_no_others(folder, listing)
            images, repeated = sorted([*images, *listing.repeated]), 0
            keys = [key for key in images if _class_of(key)]
        self._keys, self._renamed = keys, listing.renamed
        reason = "no caption" if self.captioned else "no class"
        links = len(listing.outside)
        counts = {
            "no image": unpaired,
            reason: len(images) - len(keys),
            "linked again": repeated,
            "link outside": links * (outside is False),
        }
        if links and outside is None:
            _logger.warning(
                "%s: %d links to folders outside %s, the first is %r; ?%s=false leaves them out",
                name, links, folder, listing.outside[0], paths.OUTSIDE,
            )  # fmt: skip
        self.dropped = {reason: count for reason, count in counts.items() if count}
        self._warn_dropped()
        if not keys:
            check_not_saved_to_disk(folder)
            left_out = f" ({links} links outside are left out)" if links and outside is False else ""
            raise ValueError(
                f"{name} has {len(images)} images and none with a caption{left_out}; put KEY.txt beside KEY.jpg, a"
                " metadata.csv with the columns file_name and text into the folder, or the images of each class into a"
                f" subfolder; {name}{'?' if outside is None else '&'}caption={captions.NONE} reads images alone"
            )
        self._labels: dict[str, int] = {}
        self._find_classes(self._label_folders)

    def _label_folders(self) -> Classes:
        values = {value for key in self._keys if (value := _class_of(key))}
        if not values:
            raise ValueError(
                f"{self.name} has no classes; put the images of each class into a subfolder named after it"
            )
        self._labels, result = label_values(values, self._folder, self.name)
        return result

    def __len__(self) -> int:
        return len(self._keys)

    def _read(self, index: int) -> tuple[bytes, list[str] | None, int]:
        key, texts = self._keys[index], None
        image = self._read_file(key, files.LARGEST_IMAGE)
        if self.captioned:
            caption = self._read_file(self._renamed.get(key, _stem(key) + _CAPTION), captions.LARGEST)
            texts = [captions.text(caption)]
        return image, texts, self._labels.get(_class_of(key), UNLABELED)

    def _read_file(self, key: str, limit: int) -> bytes:
        path = os.path.join(self._folder, key)
        if self._outside is False:
            paths.check_inside(path, self._folder)
        return files.read_file(path, limit)

    def key(self, index: int) -> str:
        """Return the path of an image, relative to the folder."""
        return self._keys[index]

    shard = _place = key


class _Listing(NamedTuple):
    """Files of a folder, by path relative to it."""

    images: Sequence[str]  # sorted
    repeated: Sequence[str]  # images in folders whose images are listed under another path, sorted
    captioned: Sequence[str]  # images with a caption file that is not blank, sorted
    renamed: Mapping[str, str]  # caption file by image, where its extension is not in lower case
    unpaired: int  # caption files without image
    outside: Sequence[str]  # links to folders outside the folder
    others: Sequence[str]  # compressed tar files, JSON files named as annotations, text files of the folder itself


def _list_folder(folder: str, *, follow_outside: bool) -> _Listing:
    """List the images and captions of a folder and its subfolders.

    Hidden files, and folders that are hidden or of an operating system, are left out. Links to folders are followed,
    except from a folder to itself, or to one above it, and without `follow_outside` also those to folders outside.
    """
    images: list[str] = []
    repeated: list[str] = []
    captioned: list[str] = []
    renamed: dict[str, str] = {}
    unpaired = 0
    outside: list[str] = []
    others: list[str] = []
    for relative, entries, is_listed in _walk(folder, outside, follow_outside):
        stems = {_stem(name): name for name in entries if _is_caption(name)}  # .txt is after .TXT and wins
        images_here = [name for name in entries if not is_hidden(name) and _extension(name) in IMAGES]
        paths = {os.path.join(relative, name): _stem(name) for name in images_here}
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
            if not caption.endswith(_CAPTION):
                renamed[path] = os.path.join(relative, caption)
        others += [path for name in entries if _may_have_captions(path := os.path.join(relative, name))]
    return _Listing(sorted(images), sorted(repeated), sorted(captioned), renamed, unpaired, outside, others)


def _check_no_others(folder: str, listing: _Listing) -> None:
    """Check that a folder without captions has none in compressed tar files, annotations of other tools, or tables."""
    others = [os.path.join(folder, name) for name in listing.others]
    for path in others:
        if not listing.images:
            files.check_uncompressed([path])
        if path.lower().endswith(".json"):
            content = None
            with contextlib.suppress(OSError, ValueError):
                content = files.read_json(path, object)
            check_no_annotations(content, path)
    if len({_class_of(image) for image in listing.images}) == 1:
        folders = {os.path.basename(image): os.path.dirname(os.path.join(folder, image)) for image in listing.images}
        for path in [path for path in others if _is_caption(path)][:_MOST_TEXTS]:
            check_no_table(path, folders)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _class_of(path: str) -> str:
    """Return the class of a relative path, its first folder; "" without folder."""
    return path.partition(os.sep)[0] if os.sep in path else ""


def _extension(name: str) -> str:
    return os.path.splitext(name)[1][1:].lower()


def _is_caption(name: str) -> bool:
    return name.lower().endswith(_CAPTION) and not is_hidden(name) and name not in (*CLASS_FILES, TEMPLATE_FILE)


def _may_have_captions(path: str) -> bool:
    """Tell if a file is one of `_Listing.others` by its name."""
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

    Within each subfolder of `folder`, which may be a class, a folder is listed once. Loops of links end there. The list
    `outside` receives the links to folders outside.

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
