"""Changes to a named model or a configuration: reading, checking and comparing them."""

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

# Settings and groups on which the arrays of a checkpoint depend.
_SHAPING = ("model", "model_overrides", "frozen", "loss", "global_contrastive", "optimizer", "dataset", "data_dir")


def parse_overrides(text: str, what: str = "model_overrides") -> dict[str, Any]:
    """`"vision.layers=6,dtype=bfloat16"` as a dict; values are Python literals, or else strings.

    Args:
      text: the changes.
      what: they are called in messages.

    Raises:
      ValueError: a part is not of the form key=value.
    """
    overrides = {}
    parts = re.split(r",(?![^()\[\]]*[)\]])", text)  # at commas outside of brackets
    for part in filter(None, (part.strip() for part in parts)):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"expected {what} like 'vision.layers=6,dtype=bfloat16', got {part!r}")
        try:
            overrides[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            overrides[key.strip()] = value.strip()
    return overrides


def check_model_overrides(model: CLIPConfig, overrides: Mapping[str, Any]) -> None:
    """Checks the types of a model's overrides against its fields.

    Args:
      model: without the overrides.
      overrides: of `parse_overrides`; unknown keys are left to `infcl_jax.models.model_config`.

    Raises:
      ValueError: a value of another type than its field's, or a number that is not finite.
    """
    for key, value in overrides.items():
        tower, _, field = key.rpartition(".")
        owner = getattr(model, tower, None) if tower else model
        kind = get_type_hints(type(owner)).get(field) if dataclasses.is_dataclass(owner) else None
        if kind is not None and not _is_a(value, kind):
            name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise ValueError(f"expected model_overrides {key} to be {name}, got {value!r}")


def _is_a(value: Any, kind: Any) -> bool:
    """True if a Python literal has the annotated type; the model checks choices."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_is_a(value, one) for one in inner)
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
    """Checks that only settings with an optional value are None.

    Args:
      config: the settings.
      prefix: of their names in the message.

    Raises:
      ValueError: another setting is None.
    """
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            check_values(value, f"{prefix}{name}.")
        elif value is None and config.get_type(name) is type(None):
            raise ValueError(f"expected a value of {prefix}{name}, got None")


def flattened(config: ConfigDict) -> dict[str, Any]:
    """Values by dotted name, `{"optimizer.name": "adamw"}`, as JSON restores them (tuples as lists)."""
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(config.to_dict())).items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def changed_settings(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Old and new values of the settings that differ, `{"batch_size": (256, 512)}`.

    An absent setting counts as None.
    """
    before, after = flattened(old), flattened(new)
    names = [*before, *(name for name in after if name not in before)]
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def check_kept(
    changed: Mapping[str, tuple[Any, Any]], names: Collection[str], workdir: str | Path, advice: str
) -> None:
    """Checks that a run keeps its settings.

    Args:
      changed: of `changed_settings`.
      names: settings that have to stay as they are.
      workdir: directory of the run, for the message.
      advice: end of the message.

    Raises:
      ValueError: one of them has changed.
    """
    for name in names:
        if name in changed:
            old, new = changed[name]
            raise ValueError(
                f"expected {name}={old!r}, with which the run in {workdir} was trained, got {new!r}; {advice}"
            )


@contextlib.contextmanager
def naming(changed: Mapping[str, tuple[Any, Any]]) -> Iterator[None]:
    """Names the changed settings in the error of a checkpoint that does not fit."""
    try:
        yield
    except ValueError as error:
        shaping = {name: values for name, values in changed.items() if name.partition(".")[0] in _SHAPING}
        if not shaping:
            raise
        raise ValueError(f"{error}; changed since then: {', '.join(format_changes(shaping))}") from error


def format_changes(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """One line a setting: "batch_size: 256 -> 512"."""
    return [f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()]
