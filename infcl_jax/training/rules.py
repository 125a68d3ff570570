"""Values of parameters by their names: an ordered list of (regular expression, value), of which the first counts."""

import re
from collections.abc import Sequence
from typing import Any

import jax

Rules = Sequence[tuple[str, float]]


def parameter_names(params: Any) -> Any:
    """The tree with "visual/proj/kernel" in the place of each parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )


def values_by_rules(name: str, rules: Rules, params: Any) -> Any:
    """The value of the first rule that matches a parameter's whole name, for every parameter.

    Args:
      name: of the setting, for errors.
      rules: such as `(("visual/.*", 0.1), (".*", 1.0))`.
      params: tree of parameters.

    Raises:
      ValueError: a parameter that no rule matches, or a rule that matches no parameter.
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
    """Raises `ValueError` unless every rule is a regular expression and a number that is not negative."""
    for rule in rules:
        try:
            pattern, value = rule
            re.compile(pattern)
            good = value >= 0
        except (TypeError, ValueError, re.error):
            good = False
        if not good:
            raise ValueError(f"expected {name} to be pairs of a regular expression and a number >= 0, got {rule!r}")
