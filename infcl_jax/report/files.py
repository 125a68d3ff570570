"""Single files of work directories, with a warning for each damaged one."""

import io
import math
import warnings as python_warnings
from pathlib import Path
from typing import Any

from PIL import Image

from infcl_jax.runtime.file_io import JSON_BYTES, parse_json, read_regular

_LARGEST, _SMALLEST = 3.4e38, 1.2e-38  # magnitudes of normal numbers in fp32


def read_bytes(path: Path, warnings: list[str], limit: int = JSON_BYTES, *, tail: bool = False) -> bytes | None:
    """Read a file, see `read_regular`; None if it is missing or unreadable."""
    try:
        return read_regular(path, limit, tail=tail)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.append(f"{path.name} is unreadable and left out ({getattr(error, 'strerror', None) or error})")
        return None


def read_json(path: Path, kind: type, warnings: list[str]) -> Any:
    """Read a JSON file; an empty container if it is missing or damaged."""
    content = read_bytes(path, warnings)
    if content is not None:
        try:
            return parse_json(content, path, kind)
        except ValueError:
            warnings.append(f"{path.name} is damaged and left out")
    return kind()


def read_examples(path: Path, warnings: list[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Read confused classes and examples of each task, without damaged ones."""
    tasks: dict[str, dict[str, list[dict[str, Any]]]] = {}
    damaged = 0
    for name, task in read_json(path, dict, warnings).items():
        task = task if isinstance(task, dict) else {"examples": [task]}
        tasks[name] = {}
        for kind, form in _FORMS.items():
            entries = task.get(kind, [])
            entries = entries if isinstance(entries, list) else [entries]
            tasks[name][kind] = [
                entry
                for entry in entries
                if _has_form(entry, form)
                and (kind != "examples" or len(entry["predicted"]) == len(entry["similarity"]))
            ]
            damaged += len(entries) - len(tasks[name][kind])
    if damaged:
        warnings.append(f"{path.name}: {damaged} damaged entries are left out")
    return tasks


def _has_form(value: Any, form: Any) -> bool:
    """Return whether a JSON value has the form of an entry of `_FORMS`."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(_has_form(value.get(name), field) for name, field in form.items())
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(entry, form[0]) for entry in value)
    return isinstance(value, form) if isinstance(form, type) else form(value) is not None


def read_picture(path: Path, warnings: list[str]) -> bytes | None:
    """Read a PNG file; None if it is missing, damaged or too large."""
    content = read_bytes(path, warnings)
    if content is None:
        return None
    try:
        with python_warnings.catch_warnings():
            python_warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
                picture.verify()
    except Exception:  # Pillow raises many kinds, also SyntaxError and struct.error
        warnings.append(f"{path.name} is damaged and left out")
        return None
    return content


def integer(value: object) -> int | None:
    """Return a count; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def number(value: object) -> float | None:
    """Return a JSON number as a float; None for anything else."""
    return bounded(value) if isinstance(value, int | float) else None


def bounded(value: float) -> float:
    """Clip to the range of fp32, so that sums and ratios stay finite."""
    if abs(value) > _LARGEST:
        return math.copysign(math.inf, value)
    return 0.0 if abs(value) < _SMALLEST else float(value)


def byte_size(value: object) -> float | None:
    """Return a size of memory; None for anything else."""
    size = number(value)
    return size if size is not None and 0 <= size < math.inf else None


# Fields of entries of `infcl_jax.evaluation.writers.write_examples`.
_FORMS: dict[str, dict[str, Any]] = {
    "confusions": {"expected": str, "predicted": str, "images": integer},
    "examples": {"image": str, "expected": [str], "predicted": [str], "similarity": [number], "correct": bool},
}
