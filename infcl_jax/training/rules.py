"""Per-parameter values from ordered rules (regular expression, value).

The first rule that matches the name of a parameter gives its value.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax

Rules = Sequence[tuple[str, float]]


def parameter_names(params: Any) -> Any:
    """Map each parameter to its path, such as "visual/proj/kernel"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )


def values_by_rules(name: str, rules: Rules, params: Any) -> Any:
    """Map each parameter to the value of its first matching rule.

    A rule matches if its regular expression matches the whole name of the parameter.

    Args:
      name: name of the setting, for error messages.
      rules: ordered rules such as `(("visual/.*", 0.1), (".*", 1.0))`.
      params: tree of parameters.

    Raises:
      ValueError: a parameter matches no rule, or a rule matches no parameter.
    """
    names = parameter_names(params)

    def value_of(parameter: str) -> float:
        for pattern, value in rules:
            if re.fullmatch(pattern, parameter):
                return value
        raise ValueError(f"expected a rule of {name} for every parameter, got none for {parameter}; end with ('.*', 1)")

    for pattern, _ in rules:
        if not any(re.fullmatch(pattern, parameter) for parameter in jax.tree.leaves(names)):
            raise ValueError(f"expected every rule of {name} to match a parameter, got {pattern!r}, which matches none")
    return jax.tree.map(value_of, names)


def check_rules(name: str, rules: Rules) -> None:
    """Raise `ValueError` unless rules pair regular expressions with numbers >= 0."""
    for rule in rules:
        try:
            pattern, value = rule
            re.compile(pattern)
            valid = value >= 0
        except (TypeError, ValueError, re.error):
            valid = False
        if not valid:
            raise ValueError(f"expected {name} to be pairs of a regular expression and a number >= 0, got {rule!r}")
