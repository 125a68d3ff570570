"""Overrides of the model, and the precision: the dtype of its towers."""

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

from infcl_jax.models import CLIPConfig, TextPairConfig
from infcl_jax.ops.common.gpu import target_device
from infcl_jax.schema import is_a

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
PRECISIONS = ("auto", *_DTYPES)


def parse_overrides(text: str, what: str = "model_overrides") -> dict[str, Any]:
    """Parse overrides such as `"vision.layers=6,vision.remat=dots"`.

    Examples:
      >>> parse_overrides("vision.layers=6,vision.remat=dots")
      {'vision.layers': 6, 'vision.remat': 'dots'}

    Args:
      text: comma-separated key=value items.
      what: name of the setting, for error messages.

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
            raise ValueError(f"expected {what} like 'vision.layers=6,vision.remat=dots', got {item!r}")
        try:
            overrides[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            overrides[key.strip()] = value.strip()
    return overrides


def check_model_overrides(model: CLIPConfig | TextPairConfig, overrides: Mapping[str, Any]) -> None:
    """Check the types of overrides against the model's fields; `change_config` refuses unknown ones."""
    for key, value in overrides.items():
        tower, _, field = key.rpartition(".")
        owner = getattr(model, tower, None) if tower else model
        kind = get_type_hints(type(owner)).get(field) if dataclasses.is_dataclass(owner) else None
        if kind is not None and not is_a(value, kind):
            name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise ValueError(f"expected model_overrides {key} to be {name}, got {value!r}")


def resolved_precision(precision: str, overrides: str) -> str:
    """Return the precision that "auto" stands for on the default device.

    A dtype in `overrides` takes the place of the precision, which then remains "auto".
    """
    if precision != "auto" or "dtype" in parse_overrides(overrides):
        return precision
    return "fp32" if target_device().platform == "cpu" else "bf16"


def precision_of_overrides(overrides: str) -> dict[str, str]:
    """Return the change of the precision to "auto", where a dtype in `overrides` takes its place; else none."""
    return {"precision": "auto"} if "dtype" in parse_overrides(overrides) else {}


def model_changes(precision: str, overrides: str) -> dict[str, Any]:
    """Return the overrides of a run's model, with the dtype of its precision; see `resolved_precision`."""
    resolved = resolved_precision(precision, overrides)
    dtype = {} if resolved == "auto" else {"dtype": _DTYPES[resolved]}
    return dtype | parse_overrides(overrides)
