"""Shared argument checks with uniform error messages."""

from collections.abc import Collection
from typing import Any

import jax


def check_choice(name: str, value: str | None, choices: Collection[str | None]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {tuple(choices)}, got {value!r}")


def check_positive_int(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"expected {name} to be a positive integer, got {value!r}")


def check_rate(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is a probability below 1."""
    if not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ValueError(f"expected {name} to be a number in [0, 1), got {value!r}")


def check_implementation(implementation: str | None, known: Collection[str]) -> None:
    """Raise `ValueError` unless `implementation` is one of `known` or None.

    None selects the best implementation for the platform.
    """
    if implementation is not None and implementation not in known:
        raise ValueError(f"expected implementation to be one of {tuple(known)} or None, got {implementation!r}")


def is_concrete(array: jax.Array | None) -> bool:
    """Return whether this process can read the values at trace time.

    An absent array (None) is concrete.
    """
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)
