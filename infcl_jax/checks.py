"""Shared argument checks with uniform error messages."""

from collections.abc import Sequence

import jax


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {tuple(choices)}, got {value!r}")


def check_implementation(implementation: str | None, known: Sequence[str]) -> None:
    """Raise `ValueError` unless `implementation` is one of `known` or None.

    None selects the best implementation for the platform.
    """
    if implementation is not None and implementation not in known:
        raise ValueError(f"expected implementation to be one of {tuple(known)} or None, got {implementation!r}")


def is_known(array: jax.Array | None) -> bool:
    """Return whether this process can read the values at trace time."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)
