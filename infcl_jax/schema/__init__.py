"""Declaration of settings as fields of dataclasses: type, range, meaning and what may change them.

The layer below all configurations; it knows none of them.
"""

import dataclasses
import functools
import math
import os
import types
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

_LARGEST_INT, _LARGEST_FLOAT = 2**63 - 1, float(np.finfo(np.float32).max)
_SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)
_COUNTS = {2: "two", 3: "three", 4: "four"}
_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}
_AS_DEFAULT: Any = object()  # runs without the setting behave like its default
_METADATA = "setting"  # key of a field's `Setting`


@dataclasses.dataclass(frozen=True)
class Range:
    """Interval of numbers.

    Training computes in fp32, so a float is inside if its fp32 rounding is. Subnormal numbers count as 0.

    Attributes:
      low: lower bound.
      high: upper bound.
      above: whether values must be above `low`, which is then excluded.
      below: whether values must be below `high`, which is then excluded.
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        """Return whether the number is inside; NaN is not."""
        if isinstance(value, float):
            with np.errstate(over="ignore"):
                value = float(np.float32(value))
            value = value if abs(value) >= _SMALLEST_FLOAT else 0.0
        above_low = value > self.low if self.above else value >= self.low
        return above_low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        """Format as ">= 1" or "in [0, 1)"."""
        if self.high == math.inf:
            return f"{'>' if self.above else '>='} {self.low}"
        return f"in {'(' if self.above else '['}{self.low}, {self.high}{')' if self.below else ']'}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of a run; `setting` declares one as a field.

    Attributes:
      name: dotted name, such as "optimizer.beta1".
      type: type annotation, such as `int`, or `int | None` to allow None.
      default: default value.
      meaning: meaning and unit, without a final period.
      values: allowed numbers or strings; for a tuple, allowed entries; None: all of the type.
      fixed: whether a resumed run must keep the value.
      shapes: whether names or shapes of a checkpoint's arrays can depend on the value.
      evaluated: whether an evaluation may change the value.
      before: value of runs from before the setting existed, or had its present default. A resumed run that does not
        change the default keeps the value of its `config.json`, or this one without it.
    """

    name: str
    type: Any
    default: Any
    meaning: str
    values: Range | Collection[str] | None = None
    fixed: bool = False
    shapes: bool = False
    evaluated: bool = False
    before: Any = _AS_DEFAULT

    @property
    def resolved_once(self) -> bool:
        """Return whether a resumed run keeps the recorded value in place of the default."""
        return self.before is not _AS_DEFAULT

    @property
    def base_type(self) -> Any:
        """Type without None."""
        return get_args(self.type)[0] if self.optional else self.type

    @property
    def optional(self) -> bool:
        """True if None is allowed."""
        return is_a(None, self.type)

    @property
    def allowed(self) -> str:
        """Allowed values, such as "an integer >= 1 or None"."""
        text = type_name(self.base_type)
        if isinstance(self.values, Range):
            text += f" {self.values}"
        elif self.values is not None:
            choices = ", ".join(f'"{value}"' for value in self.values)
            text = choices if self.base_type is str else f"{text} of {choices}"
        return f"{text} or None" if self.optional else text

    def check(self, value: Any) -> Any:
        """Check the type and range of a value, and return it in the type of the setting.

        Whole floats become integers, integers of a number floats, paths strings and lists tuples.

        Raises:
          ValueError: the value has another type, or is not in `values`.
        """
        converted = _converted(value, self.base_type)
        if not is_a(converted, self.type):
            expected = f"{self.name} to be {type_name(self.base_type)}"
        else:
            several = isinstance(converted, tuple)
            entries = converted if several else (converted,) if converted is not None else ()
            if self.values is None or all(entry in self.values for entry in entries):
                return float(converted) if self.base_type is float and value is not None else converted
            choice = self.values if isinstance(self.values, Range) else f"to be one of {tuple(self.values)}"
            expected = f"{'every entry of ' if several else ''}{self.name} {choice}"
        raise ValueError(f"expected {expected}{' or None' if self.optional else ''}, got {value!r}")


def setting(default: Any, meaning: str, values: Range | Collection[str] | None = None, **marks: Any) -> Any:
    """Declare a field of a `Section` as a setting, whose type is its annotation; for the arguments see `Setting`."""
    declared = Setting("", None, default, meaning, values, **marks)
    return dataclasses.field(default=default, metadata={_METADATA: declared})


def _converted(value: Any, kind: Any) -> Any:
    """Return a value in the type of a setting, if one means the same."""
    if isinstance(value, tuple | list):
        return tuple(_converted(entry, None) for entry in value)
    if isinstance(value, os.PathLike) and kind is str:
        return os.fspath(value)
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    return as_integer(value) if kind is int else value


def is_a(value: Any, kind: Any) -> bool:
    """Return whether a Python literal matches a type annotation.

    Integers match `float`, and lists match tuples. NaN, infinities, integers beyond 64 bits and floats beyond fp32
    match no type. Every value matches a `Literal`, since the model checks its choices.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(is_a(value, option) for option in inner)
    if origin is Literal:
        return True
    if origin in (tuple, Sequence):
        if not isinstance(value, tuple | list):
            return False
        kinds = inner if _length(kind) is not None else inner[:1] * len(value)
        return len(value) == len(kinds) and all(is_a(v, k) for v, k in zip(value, kinds, strict=True))
    if kind in (int, float):
        number = isinstance(value, int | kind) and not isinstance(value, bool)
        return number and abs(value) <= (_LARGEST_INT if kind is int else _LARGEST_FLOAT)  # false for NaN
    return isinstance(value, kind)


def as_integer(value: Any) -> Any:
    """Return a whole float, such as 12.8e9, as an integer, and other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def type_name(kind: Any) -> str:
    """Describe a type by a noun phrase, such as "an integer"."""
    if kind in _NOUNS:
        return _NOUNS[kind]
    kinds = [entry for entry in get_args(kind) if entry is not Ellipsis]
    entries = [type_name(entry).split(" ", 1)[-1] for entry in kinds]
    if _length(kind) is None:
        return f"a tuple of {_pair(kinds[0]) if get_origin(kinds[0]) is tuple else entries[0]}s"
    return f"{_COUNTS[len(entries)]} {entries[0]}s" if len(set(entries)) == 1 else f"a {_pair(kind)}"


def _pair(kind: Any) -> str:
    """Describe a tuple type by its entries, such as "(string, number) pair"."""
    return f"({', '.join(type_name(entry).split(' ', 1)[-1] for entry in get_args(kind))}) pair"


def _length(kind: Any) -> int | None:
    """Return the number of entries of a tuple type; None if it is variable."""
    inner = get_args(kind)
    return None if get_origin(kind) is Sequence or Ellipsis in inner else len(inner)


class Section:
    """Base of frozen dataclasses whose fields are settings.

    A field made by `setting` is checked and converted (whole floats to integers, lists to tuples) whenever an object is
    created. Other fields are further sections, or arguments of the class that no setting gives.

    Keywords of a subclass: `prefix`, the start of the names of its settings, and the marks `fixed`, `shapes` and
    `evaluated` of `setting`, for all of its fields.

    Examples:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Blur(Section, prefix="blur."):
      ...     radius: int = setting(1, "radius in pixels", Range(0))
      >>> Blur(-1)
      Traceback (most recent call last):
      ValueError: expected blur.radius >= 0, got -1
    """

    prefix: ClassVar[str] = ""
    marks: ClassVar[dict[str, bool]] = {}

    def __init_subclass__(cls, prefix: str = "", **marks: bool) -> None:
        """Store the keywords of the subclass."""
        super().__init_subclass__()
        cls.prefix, cls.marks = prefix, marks

    def __post_init__(self) -> None:
        for field, setting in self.own_settings().items():
            object.__setattr__(self, field, setting.check(getattr(self, field)))
        self.check()

    def check(self) -> None:
        """Check the fields that limit each other, in subclasses.

        Raises:
          ValueError: fields contradict each other.
        """

    @classmethod
    @functools.cache
    def own_settings(cls) -> dict[str, Setting]:
        """Return the settings that the class declares, by field."""
        hints = get_type_hints(cls)
        return {
            field.name: dataclasses.replace(
                field.metadata[_METADATA], name=cls.prefix + field.name, type=hints[field.name], **cls.marks
            )
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if _METADATA in field.metadata
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, with each section as a dictionary."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {
            name: value.to_dict() if isinstance(value, Section) else value
            for name, value in values.items()
            if name in self.own_settings() or isinstance(value, Section)
        }

    def __getitem__(self, name: str) -> Any:
        """Return a setting or section by its dotted name within this section."""
        return functools.reduce(getattr, name.split("."), self)


def settings_of(section: Section) -> dict[str, Setting]:
    """Return the settings of a tree of sections by dotted name, with its values as their defaults."""
    own, settings = section.own_settings(), dict[str, Setting]()
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if isinstance(value, Section):
            settings |= settings_of(value)
        elif field.name in own:
            setting = dataclasses.replace(own[field.name], default=value)
            settings[setting.name] = setting
    return settings
