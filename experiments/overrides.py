"""Changes to a named model or a configuration, as configurations and flags write them."""

import ast
import re
from typing import Any


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
