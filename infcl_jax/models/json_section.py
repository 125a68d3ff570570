"""Checked fields of JSON configurations."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from infcl_jax.runtime.printable import printable

LARGEST_SIZE = 2**24  # of a width or a vocabulary; the largest vocabularies have 2**20 ids
LARGEST_SIDE = 2**14  # pixels of an image
LARGEST_DEPTH = 256  # blocks of a tower; OpenCLIP's deepest towers have 64
_LARGEST_TABLE = 2**25  # elements of position embeddings; those of 73 x 73 patches and 1536 channels have 2**23
_SHOWN = 500  # characters of a value in an error


class Section:
    """Fields of one JSON object; errors name the field."""

    def __init__(self, name: str, values: Any, known: Collection[str] | None = None) -> None:
        """Check that the object at a path of a file, "" for the whole file, has `known` fields only; None: any.

        Raises:
          ValueError: `values` is no object, or has an unknown field.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"expected {name or 'the config'} to be a JSON object, got {_shown(values)}")
        self._prefix, self._values = f"{name}." if name else "", values
        for field in values if known is not None else ():
            if field not in known:
                shown = f"{self._prefix}{printable(str(field))[:_SHOWN]}={_shown(values[field])}"
                raise ValueError(f"expected a known field, got {shown}; remove it")

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value of a field; `default` for an absent one."""
        return self._values.get(field, default)

    def defaults(self, values: Mapping[str, Any]) -> "Section":
        """Return the section with defaults for absent fields and null."""
        given = {field: value for field, value in self._values.items() if value is not None}
        return Section(self._prefix.removesuffix("."), {**values, **given})

    def with_value(self, field: str, value: Any) -> "Section":
        """Return the section with another value of a field."""
        return Section(self._prefix.removesuffix("."), {**self._values, field: value})

    def refuse(self, field: str, expected: str, value: Any) -> None:
        """Raise the error of a value that is not supported."""
        name = f"{self._prefix}{field}"
        raise ValueError(
            f"expected {name} to be {expected}, got {name}={_shown(value)}; other values are not supported"
        )

    def choice(self, field: str, choices: Mapping[Any, Any], default: Any) -> Any:
        """Return what `choices` has for the value of a field."""
        value = self.get(field, default)
        if value not in tuple(choices):  # a list has no hash
            self.refuse(field, f"one of {tuple(choices)}", value)
        return choices[value]

    def only(self, supported: Mapping[str, Any]) -> None:
        """Refuse other values of fields than the supported ones; null is none."""
        for field, value in supported.items():
            if self.get(field) not in (None, value):
                self.refuse(field, repr(value), self.get(field))

    def count(self, field: str, default: int | None = None, largest: int = LARGEST_SIZE) -> int:
        """Return the value of a field that must be a positive integer."""
        value = self.get(field, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"expected {self._prefix}{field} to be a positive integer, got {_shown(value)}")
        if value > largest:
            self.refuse(field, f"at most {largest}", value)
        return value

    def side(self, field: str, default: int | None = None) -> int:
        """Return the side of a square image, given as number or pair."""
        value = self.get(field)
        sides = value if isinstance(value, list | tuple) else [default if value is None else value]
        if not 1 <= len(sides) <= 2 or any(side != sides[0] for side in sides):
            self.refuse(field, "a number or a pair of equal numbers", value)
        side = int(sides[0]) if isinstance(sides[0], float) and sides[0].is_integer() else sides[0]
        return self.with_value(field, side).count(field, largest=LARGEST_SIDE)

    def index(self, field: str, default: int, size: int) -> int:
        """Return the value of a field that must be an index below `size`."""
        value = self.get(field, default)
        if type(value) is not int or not 0 <= value < size:
            self.refuse(field, f"an integer in [0, {size})", value)
        return value

    def number(self, field: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
        """Return a field that must be a finite number in [low, high]."""
        value = self.get(field, default)
        if not _is_finite(value) or not low <= value <= high:
            bounded = f" in [{low:g}, {high:g}]" if math.isfinite(low) else ""
            self.refuse(field, f"a finite number{bounded}", value)
        return value

    def numbers(self, field: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return a field that must be as many finite numbers as the default."""
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, list | tuple) or len(value) != len(default) or not all(map(_is_finite, value)):
            self.refuse(field, f"{len(default)} finite numbers", value)
        return tuple(value)

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a field that must be true or false, 1 or 0, or null."""
        value = self.get(field)
        if value not in (None, False, True):
            self.refuse(field, "true or false", value)
        return default if value is None else bool(value)

    def text(self, field: str) -> str:
        """Return a field that must be a string; "" without one."""
        value = self.get(field) or ""
        if not isinstance(value, str):
            self.refuse(field, "a string", value)
        return value

    def section(self, field: str, known: Collection[str] | None = None) -> "Section":
        """Return the fields of a nested object; null and an absent one have none."""
        value = self.get(field)
        return Section(f"{self._prefix}{field}", {} if value is None else value, known)


def check_grid(image_size: int, patch_size: int, width: int) -> None:
    """Raise `ValueError` if the position embeddings are too large to compute."""
    if (image_size // patch_size) ** 2 * width > _LARGEST_TABLE:
        raise ValueError(
            f"expected position embeddings of at most {_LARGEST_TABLE} elements, got patches of {patch_size} pixels in "
            f"images of {image_size} for a width of {width}"
        )


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number that fits a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _shown(value: Any) -> str:
    """Format a value for an error, which is one line."""
    try:
        text = repr(value)
    except RecursionError:
        return "nested lists or objects"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
