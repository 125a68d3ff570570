"""Manifest of a checkpoint: size and checksum of each file, written last."""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from infcl_jax.runtime.file_io import JSON_BYTES, open_regular, parse_json, read_regular
from infcl_jax.runtime.processes import union

MANIFEST = "manifest.json"
# Custom metadata that announces a manifest. A folder with it and without the manifest was not completed.
ANNOUNCEMENT = {"manifest": MANIFEST}

_METADATA = "_CHECKPOINT_METADATA"  # of orbax; holds the custom metadata
_THREADS = 8  # hashlib releases the GIL; SHA-256 reaches 0.8 GB/s per core of a busy machine, 2026-11-23
_DAMAGED_MANIFEST, _NO_MANIFEST, _INCOMPLETE = -1, -2, -3  # besides the numbers of damaged files


class Verification(NamedTuple):
    """Result of `verify`.

    Attributes:
      damage: damaged or missing file and what is wrong with it; None for an intact checkpoint.
      checked: whether the checkpoint has a manifest; those of earlier versions have none.
      complete: whether the save ended; one that was killed leaves no manifest.
    """

    damage: str | None
    checked: bool
    complete: bool = True


def write_manifest(folder: epath.Path, results: Mapping[str, float]) -> None:
    """Write the manifest of a complete checkpoint, with the results of the evaluation at its step."""
    paths = _files(folder)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        checksums = threads.map(lambda path: _checksum(folder / path), paths)
        files = {
            path: {"size": (folder / path).stat().length, "sha256": checksum}
            for path, checksum in zip(paths, checksums, strict=True)
        }
    _replace(folder, files, results)


def add_results(folder: epath.Path, results: Mapping[str, float]) -> None:
    """Replace the results in the manifest of a checkpoint; raises `OSError` and, if it is damaged, `ValueError`."""
    _replace(folder, _read(folder)["files"], results)


def read_results(folder: epath.Path) -> dict[str, float]:
    """Return the results in the manifest of a checkpoint; empty without an intact manifest."""
    try:
        return _read(folder)["results"]
    except (OSError, ValueError):
        return {}


def verify(folder: epath.Path) -> Verification:
    """Compare the files of a checkpoint with its manifest.

    Every process must call this function. Each verifies a share of the files, and all get the same result.
    """
    files: dict[str, Any] = {}
    paths: list[str] = []
    try:
        files = _read(folder)["files"]
        paths = sorted(files, key=lambda path: (-files[path]["size"], path))  # balances the shares
        share = range(jax.process_index(), len(paths), jax.process_count())
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
            damages = threads.map(lambda number: _damage(folder, paths[number], files[paths[number]]), share)
            damaged = [number for number, damage in zip(share, damages, strict=True) if damage]
    except FileNotFoundError:
        damaged = [_INCOMPLETE if _announced(folder) else _NO_MANIFEST]
    except (OSError, ValueError):
        damaged = [_DAMAGED_MANIFEST]
    damaged = union(damaged)
    if not damaged:
        return Verification(None, True)
    if damaged == [_NO_MANIFEST]:
        return Verification(None, False)
    if damaged == [_INCOMPLETE]:
        return Verification(f"its save did not end, {MANIFEST} is missing", True, complete=False)
    if damaged[0] < 0:
        return Verification(f"{MANIFEST} is missing or damaged", True)
    path = paths[damaged[0]]
    return Verification(_damage(folder, path, files[path]) or f"{path} is unreadable on another process", True)


def _read(folder: epath.Path) -> dict[str, Any]:
    """Read and check the manifest itself; raise `ValueError` if it is damaged."""
    path = folder / MANIFEST
    text = _read_bytes(path)
    manifest = parse_json(text, path)
    files, results = manifest.get("files"), manifest.get("results")
    valid = isinstance(files, dict) and isinstance(results, dict)
    if not valid or not all(map(_is_file, files.items())) or not all(map(_is_number, results.values())):
        raise ValueError(f"expected the manifest of a checkpoint, got {text[:40]!r}")
    if text != _format(files, results).encode():
        raise ValueError("expected a manifest with the checksum of its content, got another checksum")
    return manifest


def _is_file(item: tuple[str, Any]) -> bool:
    """Return whether an item describes a file inside of its folder."""
    name, entry = item
    inside = "\0" not in name and not name.startswith("/") and ".." not in name.split("/")
    types = isinstance(entry, dict) and (type(entry.get("size")), type(entry.get("sha256"))) == (int, str)
    return inside and types


def _is_number(value: Any) -> bool:
    """Return whether a value is a number in the range of floats."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _replace(folder: epath.Path, files: Mapping[str, Any], results: Mapping[str, float]) -> None:
    """Write the manifest under another name, then rename it."""
    temporary = folder / f"{MANIFEST}.new"
    temporary.unlink(missing_ok=True)  # a link would be followed
    temporary.write_text(_format(files, results))
    temporary.replace(folder / MANIFEST)


def _format(files: Mapping[str, Any], results: Mapping[str, float]) -> str:
    """Format a manifest with a checksum of its own content."""
    content = {"files": files, "results": results}
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"sha256": checksum}, sort_keys=True, indent=1) + "\n"


def _files(folder: epath.Path, prefix: str = "") -> Sequence[str]:
    """List the files of a checkpoint without its manifest, relative to its folder."""
    paths: list[str] = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        name = f"{prefix}{path.name}"
        if path.is_dir():
            paths += _files(path, f"{name}/")
        elif name not in (MANIFEST, f"{MANIFEST}.new"):
            paths.append(name)
    return paths


def _damage(folder: epath.Path, path: str, expected: Mapping[str, Any]) -> str | None:
    """Describe the damage of a file; None for an intact one."""
    try:
        size = (folder / path).stat().length
        if size != expected["size"]:
            return f"{path} has {size} instead of {expected['size']} bytes"
        return None if _checksum(folder / path) == expected["sha256"] else f"{path} has another checksum"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} is unreadable ({error.strerror or type(error).__name__})"
    except ValueError:
        return f"{path} is no regular file"


def _checksum(path: epath.Path) -> str:
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: epath.Path) -> Any:
    """Open a file of any file system; a local one must be regular."""
    return path.open("rb") if "://" in os.fspath(path) else open_regular(path)


def _read_bytes(path: epath.Path) -> bytes:
    """Read JSON of any file system; a local file must be regular."""
    return path.read_bytes() if "://" in os.fspath(path) else read_regular(path, JSON_BYTES)


def _announced(folder: epath.Path) -> bool:
    """Return whether a checkpoint must have a manifest: unless intact metadata of orbax lacks the announcement."""
    try:
        metadata = parse_json(_read_bytes(folder / _METADATA), _METADATA)
        return (metadata.get("custom_metadata") or {}).get("manifest") is not None
    except (OSError, ValueError, AttributeError):
        return True
