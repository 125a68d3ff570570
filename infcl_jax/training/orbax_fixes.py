"""Workarounds for orbax: leaked memory, long logs and long errors of failed saves."""

import contextlib
import copy
import functools
import logging
import re
from collections.abc import Iterator
from typing import Any

import tensorstore

_LOGGER = "absl"  # of orbax


@contextlib.contextmanager
def orbax_fixes() -> Iterator[None]:
    """Save without leaking memory, and without tracebacks in the log.

    TensorStore 0.1.86 leaks every string and list that it converts from JSON. Orbax converts one specification for each
    array and all metrics of TensorStore, twice. Inside the context, equal specifications are converted once and no
    metrics are read; orbax only logs them. The log records of orbax are dropped, since its errors are raised too.
    """
    specification = tensorstore.KvStore.Spec
    to_json = specification.to_json
    descriptor = vars(specification)["to_json"]  # binds `self`, unlike the function it wraps
    metrics = tensorstore.experimental_collect_matching_metrics
    converted: dict[str, Any] = {}

    @functools.wraps(to_json)
    def to_json_once(self: tensorstore.KvStore.Spec, *arguments: Any, **options: Any) -> Any:
        key = f"{self!r} {arguments} {options}"
        if key not in converted:
            converted[key] = to_json(self, *arguments, **options)
        return copy.deepcopy(converted[key])

    logger = logging.getLogger(_LOGGER)
    specification.to_json = to_json_once  # type: ignore[method-assign]
    tensorstore.experimental_collect_matching_metrics = _no_metrics
    logger.addFilter(_is_not_of_orbax)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_of_orbax)
        tensorstore.experimental_collect_matching_metrics = metrics
        specification.to_json = descriptor  # type: ignore[method-assign]


def failure_reason(error: Exception) -> str:
    """Describe the reason of a failed save, such as "No space left on device"."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = " ".join(str(error).split())
    # TensorStore's errors are long and end with the system's: [OS error 28: ENOSPC No space left on device].
    match = re.search(r"\[OS error \d+: (?:E[A-Z]+ )?([^\]]+)\]", text)
    return match[1] if match else f"{type(error).__name__}: {text[:200]}"


def _no_metrics(*arguments: Any, **options: Any) -> list[Any]:
    return []


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname
