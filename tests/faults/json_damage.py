"""Damage of the values of JSON files, and of the bytes of any file."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.faults.case import BYTES, choose

_DEEP, _AGAIN = "@deep@", "@again@"  # replaced in the text, since no Python value dumps to it
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 1.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 10**9, 2**62, 2**64, 10**40),
    *("", "x", "12", "\x1b[2J\nx", "a" * 100_000, "/etc/passwd", "../../../etc/passwd", "a\0b", "\ud800", "pipe"),
    *(
        [],
        {},
        [1, 2, 3],
        ["x"],
        [[]],
        [None],
        {"a": 1},
        {"content": []},
        [0, 2**62],
        [2**62, 0, 2**62],
        [0] * 70,
        _DEEP,
    ),
)


def places(content: Any) -> list[tuple[Any, Any]]:
    """List (container, key) of every value of JSON content."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    return [place for key in keys for place in ((content, key), *places(content[key]))]


def damage_json(content: Any, rng: np.random.Generator, values: Sequence[Any] = WRONG) -> tuple[str, str]:
    """Damage one or two values.

    Args:
      content: JSON, which is not changed.
      rng: random numbers.
      values: values to put in the place of others.

    Returns:
      Name of the damage, and the text of the damaged content.
    """
    content, names = copy.deepcopy(content), []
    for _ in range(1 + int(rng.random() < 0.2)):
        options = places(content)
        if rng.random() < 0.05 or not options:
            return "whole", _text(choose(values, rng))
        container, key = choose(options, rng)
        kind = choose(("wrong", "wrong", "wrong", "missing", "repeated", "unknown"), rng)
        if kind == "missing":
            del container[key]
        elif kind == "wrong" or isinstance(container, list):
            container[key] = choose(values, rng)
        else:
            container[(_AGAIN if kind == "repeated" else "unknown ") + str(key)] = choose(values, rng)
        names.append(kind)
    return " ".join(names), _text(content)


def _text(content: Any) -> str:
    text = json.dumps(content).replace(_AGAIN, "")
    return text.replace(json.dumps(_DEEP), "[" * 100_000 + "]" * 100_000)


def damage_bytes(data: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """Damage the bytes of a file; return the name of the damage too."""
    damage = choose(BYTES, rng)
    return damage.__name__, damage(data, rng)
