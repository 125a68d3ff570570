"""Arguments of the recipes: a name and changes."""

from collections.abc import Mapping
from typing import Any


def parse(argument: str, names: tuple[str, ...], choices: Mapping[str, tuple[Any, ...]]) -> tuple[str, dict[str, Any]]:
    """Split an argument such as "laion400m,model=ViT-B/16" into its name and its changes.

    Args:
      argument: a name, and changes `key=value`, separated by commas.
      names: valid names.
      choices: valid values of each key, the default first. `(default, int)` stands for any positive number.

    Returns:
      The name, and the value of each key.

    Raises:
      ValueError: the name, a key or a value is not valid.
    """
    name, *changes = argument.split(",")
    if name not in names:
        raise ValueError(f"expected one of {names}, got {name!r}")
    values = {key: valid[0] for key, valid in choices.items()}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in choices:
            raise ValueError(f"expected changes of {tuple(choices)}, got {key!r}")
        values[key] = _value(key, value, choices[key])
    return name, values


def _value(key: str, value: str, valid: tuple[Any, ...]) -> Any:
    if valid[1:] == (int,):
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"expected {key} to be a positive number, got {value!r}")
        return int(value)
    if value not in valid:
        raise ValueError(f"expected {key} to be one of {valid}, got {value!r}")
    return value
