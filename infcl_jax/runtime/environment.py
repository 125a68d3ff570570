"""Environment of a run: devices, processes, versions and planned memory."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import jax

from infcl_jax.runtime.file_io import read_json, replace_text
from infcl_jax.runtime.processes import is_lead

ENVIRONMENT_FILE = "environment.json"

_PACKAGES = ("infcl_jax", "jax", "jaxlib", "flax", "numpy")


def record_start(workdir: str | Path, step: int, components: Mapping[str, int], limit: int | None) -> None:
    """Append a start of the run to `workdir/environment.json`, on the leading process only.

    The file is a JSON list with one object for each start: `step`, `date` (UTC), `devices`, `processes`, `system`, the
    versions of Python and packages, and `memory_plan` with `components` (bytes on each device by name), their sum
    `peak` (null without components) and `limit`. An existing file is replaced at once. A damaged one is started anew.

    Args:
      workdir: directory of the run.
      step: step from which the run starts.
      components: memory of the compiled training step, `StepMemory.components`; empty if it is not known.
      limit: bytes that JAX may use on a device; None if unknown.
    """
    if not is_lead():
        return
    start = {
        "step": step,
        "date": utc_date(),
        **describe_software(),
        "processes": str(jax.process_count()),
        "system": platform.platform(),
        "memory_plan": {"components": dict(components), "peak": sum(components.values()) or None, "limit": limit},
    }
    path = Path(workdir, ENVIRONMENT_FILE)
    starts = []
    with contextlib.suppress(OSError, ValueError):  # missing, unreadable or damaged
        starts = read_json(path, list)
    replace_text(path, json.dumps([*starts, start], indent=2) + "\n")


def describe_software() -> dict[str, str]:
    """Describe the devices and the versions of Python and packages, as texts by name."""
    return {
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def utc_date() -> str:
    """Return the date and time in UTC, in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(package: str) -> str:
    """Return the version of a package, or "not installed" in a clone."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
