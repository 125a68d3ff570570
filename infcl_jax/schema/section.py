"""Dataclasses whose fields are settings, and trees of them."""

import dataclasses
import functools
from typing import Any, ClassVar, get_type_hints

from infcl_jax.schema.setting import METADATA, Setting


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
                field.metadata[METADATA], name=cls.prefix + field.name, type=hints[field.name], **cls.marks
            )
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if METADATA in field.metadata
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, those of a section as a dictionary of their own."""
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
