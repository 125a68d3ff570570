"""Checked paths from the files of a dataset."""

import logging
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infcl_jax.data.sources import files

OUTSIDE = "outside"  # option: "false" refuses paths outside the folder, "true" allows other file systems
_LONGEST = 4096  # characters; PATH_MAX of Linux
_HOSTED = ("http", "https", "ftp", "sftp", "ssh", "smb", "webhdfs")  # other hosts are other file systems
_logger = logging.getLogger(__name__)
_OPTIONS = re.compile(r"\?(\w+=[^&]*(?:&\w+=[^&]*)*)$")


def split_options(dataset: str) -> tuple[str, dict[str, str]]:
    """Split "a.csv?image=file" into "a.csv" and {"image": "file"}."""
    match = _OPTIONS.search(dataset)
    return (dataset[: match.start()], dict(parse_qsl(match[1]))) if match else (dataset, {})


def outside_option(options: Mapping[str, str]) -> bool | None:
    """Return the option "outside", or None without it."""
    value = options.get(OUTSIDE)
    if value not in (None, "true", "false"):
        raise ValueError(f"expected {OUTSIDE}=true or {OUTSIDE}=false, got {OUTSIDE}={value}")
    return None if value is None else value == "true"


def resolve(path: str, folder: str, outside: bool | None = None) -> str:
    """Join a path that a file of a dataset names to the dataset's folder.

    Args:
      path: relative or absolute path, or URL.
      folder: folder of the dataset, local or remote; "" is the current folder.
      outside: None: the path is on the file system of the folder. False: it is also in the folder, with all links
        resolved. True: it is anywhere.
    """
    if not 0 < len(path) <= _LONGEST or "\0" in path or "::" in path:
        raise ValueError(f"expected a path of at most {_LONGEST} characters without ::, got {path[:100]!r}")
    absolute = files.is_remote(path) or os.path.isabs(path)
    if absolute and outside is not True and _file_system(path) != _file_system(folder):
        system = _file_system(folder) or "local paths"
        raise ValueError(
            f"expected a path on the file system of the dataset ({system}), got {path[:100]!r}; "
            f"?{OUTSIDE}=true allows others"
        )
    target = path if absolute or not folder else f"{folder}/{path}"
    if outside is False:
        check_inside(target, folder)
    return target


def check_inside(path: str, folder: str) -> None:
    """Check that a path is in a folder, with all links resolved."""
    if not _is_below(_normal(_real(path)), _normal(_real(folder))):
        raise ValueError(f"expected a path inside the folder {folder or '.'}, got {path[:300]!r}")


def are_outside(paths: pa.ChunkedArray, folder: str) -> np.ndarray:
    """Mark the paths, strings or bytes without nulls, that are outside a folder, without following its links."""
    bases = sorted({_normal(folder or os.getcwd()), _normal(_real(folder))})
    mask = np.array(pc.starts_with(paths, "/"))
    for base in bases:
        if mask.any():
            mask &= ~np.asarray(pc.starts_with(paths, base.rstrip("/") + "/"))
    mask |= np.asarray(pc.match_substring(paths, "..")) | np.asarray(pc.match_substring(paths, "://"))
    if mask.any():
        # Rows share few parents, which Python normalizes.
        parents = pc.replace_substring_regex(paths.filter(pa.array(mask)), r"[^/]*$", "")
        distinct = pc.unique(parents)
        names = map(os.fsdecode, distinct.to_pylist())
        leave = [not any(_is_below(_normal(name, base), base) for base in bases) for name in names]
        mask[mask] = np.array(leave)[np.asarray(pc.index_in(parents, distinct))]
    return mask


def column(names: Sequence[str]) -> pa.ChunkedArray:
    """Make a column of paths, with lone surrogates replaced."""
    return pa.chunked_array([pa.array([name.encode(errors="replace") for name in names], pa.binary())])


def report_outside(name: str, columns: Sequence[pa.ChunkedArray], folder: str, *, refuse: bool = False) -> None:
    """Log how many paths of a dataset are outside its folder, if any, or refuse them; see `are_outside`."""
    masks = [are_outside(rows, folder) for rows in columns]
    count = sum(int(mask.sum()) for mask in masks)
    if not count:
        return
    column, row = next((rows, mask.argmax()) for rows, mask in zip(columns, masks, strict=True) if mask.any())
    first = os.fsdecode(column[int(row)].as_py())
    problem = (
        f"{count} of {sum(map(len, masks))} paths outside the folder {folder or '.'}, the first is {first[:300]!r}"
    )
    if refuse:
        raise ValueError(f"{name} has {problem}; {OUTSIDE}=false refuses them")
    _logger.warning("%s has %s; ?%s=false refuses them", name, problem, OUTSIDE)


def _file_system(path: str) -> str:
    """Return scheme and host of a URL; "" for a local path."""
    scheme, separator, rest = path.partition("://")
    return f"{scheme}://{rest.partition('/')[0] if scheme in _HOSTED else ''}" if separator else ""


def _real(path: str) -> str:
    """Resolve the links of a local path."""
    return path if files.is_remote(path) else os.path.realpath(path or ".")


def _is_below(path: str, base: str) -> bool:
    return path == base or path.startswith(base.rstrip("/") + "/")


def _normal(path: str, base: str = "") -> str:
    """Join a path to a base and normalize it."""
    if base and not files.is_remote(path):
        local = not files.is_remote(base)
        path = os.path.join(base, path) if local or not os.path.isabs(path) else path
    scheme, separator, rest = path.partition("://")
    rest = rest.lstrip("/") if scheme == "memory" else rest  # fsspec writes memory:///a for memory://a
    return f"{scheme}://{posixpath.normpath(rest)}" if separator else os.path.abspath(path)
