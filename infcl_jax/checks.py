"""Checks of arguments that every part of the library shares, with one wording."""

from collections.abc import Sequence

import jax


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {tuple(choices)}, got {value!r}")


def check_implementation(implementation: str | None, known: Sequence[str]) -> None:
    """Raises `ValueError` unless `implementation` is None (the best for the platform) or one of `known`."""
    if implementation is not None and implementation not in known:
        raise ValueError(f"expected implementation to be one of {tuple(known)} or None, got {implementation!r}")


def is_known(array: jax.Array | None) -> bool:
    """Whether this process knows the values while the call is traced."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)
