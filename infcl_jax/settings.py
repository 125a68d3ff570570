"""Parsing, checking and comparison of settings and overrides."""

import ast
import contextlib
import dataclasses
import json
import math
import re
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict

from infcl_jax.models import CLIPConfig

# Settings and groups that decide the shapes in a checkpoint.
_SHAPING = ("model", "model_overrides", "frozen", "loss", "global_contrastive", "optimizer", "dataset", "data_dir")


def parse_overrides(text: str, what: str = "model_overrides") -> dict[str, Any]:
    """Parse overrides such as `"vision.layers=6,dtype=bfloat16"`.

    Args:
      text: comma-separated key=value items.
      what: name of the overrides in error messages.

    Returns:
      Values by key: Python literals, or else strings.

    Raises:
      ValueError: an item is not of the form key=value.
    """
    overrides = {}
    items = re.split(r",(?![^()\[\]]*[)\]])", text)  # at commas outside brackets
    for item in filter(None, (item.strip() for item in items)):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"expected {what} like 'vision.layers=6,dtype=bfloat16', got {item!r}")
        try:
            overrides[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            overrides[key.strip()] = value.strip()
    return overrides


def check_model_overrides(model: CLIPConfig, overrides: Mapping[str, Any]) -> None:
    """Check the types of overrides against the model's fields.

    `infcl_jax.models.model_config` rejects unknown keys; this function ignores them.

    Args:
      model: configuration without the overrides.
      overrides: values by dotted field name, from `parse_overrides`.

    Raises:
      ValueError: a value does not have its field's type, or a number is not finite.
    """
    for key, value in overrides.items():
        tower, _, field = key.rpartition(".")
        owner = getattr(model, tower, None) if tower else model
        kind = get_type_hints(type(owner)).get(field) if dataclasses.is_dataclass(owner) else None
        if kind is not None and not _is_a(value, kind):
            name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise ValueError(f"expected model_overrides {key} to be {name}, got {value!r}")


def _is_a(value: Any, kind: Any) -> bool:
    """Return whether a Python literal has the annotated type.

    Every value matches a `Literal`, since the model checks its choices.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_is_a(value, option) for option in inner)
    if origin is Literal:
        return True
    if origin is tuple:
        same_length = isinstance(value, tuple | list) and len(value) == len(inner)
        return same_length and all(_is_a(v, k) for v, k in zip(value, inner, strict=True))
    if kind in (int, float):
        number = isinstance(value, int | kind) and not isinstance(value, bool)
        return number and math.isfinite(value)
    return isinstance(value, kind)


def check_values(config: ConfigDict, prefix: str = "") -> None:
    """Check that only optional settings are None.

    Args:
      config: settings to check.
      prefix: prefix of setting names in the error message.

    Raises:
      ValueError: a required setting is None.
    """
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            check_values(value, f"{prefix}{name}.")
        elif value is None and config.get_type(name) is type(None):
            raise ValueError(f"expected a value of {prefix}{name}, got None")


def flattened(config: ConfigDict) -> dict[str, Any]:
    """Return values by dotted name, such as `{"optimizer.name": "adamw"}`.

    Values are as JSON restores them: tuples become lists.
    """
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(config.to_dict())).items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def changed_settings(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, such as `{"batch_size": (256, 512)}`.

    Values are (old, new). An absent setting has the value None.
    """
    before, after = flattened(old), flattened(new)
    names = [*before, *(name for name in after if name not in before)]
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def check_kept(
    changed: Mapping[str, tuple[Any, Any]], names: Collection[str], workdir: str | Path, advice: str
) -> None:
    """Check that fixed settings have not changed.

    Args:
      changed: changed settings, from `changed_settings`.
      names: settings that must not change.
      workdir: directory of the run, for the error message.
      advice: last clause of the error message.

    Raises:
      ValueError: a setting in `names` has changed.
    """
    for name in names:
        if name in changed:
            old, new = changed[name]
            raise ValueError(
                f"expected {name}={old!r}, with which the run in {workdir} was trained, got {new!r}; {advice}"
            )


@contextlib.contextmanager
def naming(changed: Mapping[str, tuple[Any, Any]]) -> Iterator[None]:
    """Add the changed settings to a checkpoint's shape error.

    Args:
      changed: changed settings, from `changed_settings`.

    Raises:
      ValueError: the error of the body, extended by changed settings that decide shapes.
    """
    try:
        yield
    except ValueError as error:
        shaping = {name: values for name, values in changed.items() if name.partition(".")[0] in _SHAPING}
        if not shaping:
            raise
        raise ValueError(f"{error}; changed since then: {', '.join(format_changes(shaping))}") from error


def format_changes(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Format each change as a line such as "batch_size: 256 -> 512"."""
    return [f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()]
