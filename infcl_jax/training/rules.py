"""Per-parameter values from the names of parameters.

Ordered rules (regular expression, value): the first that matches a name gives its value. Layer-wise decay.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from infcl_jax.models import TOWERS
from infcl_jax.models.depth import distances_to_output

Rules = Sequence[tuple[str, float]]


def parameter_names(params: Any) -> Any:
    """Map each parameter to its path, such as "visual/proj/kernel"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )


def values_by_rules(name: str, rules: Rules, params: Any) -> Any:
    """Map each parameter to the value of the first rule whose regular expression matches its whole name.

    `name` is the setting that has the rules. Raises `ValueError` for a parameter without a rule.
    """

    def value_of(parameter: str) -> float:
        for pattern, value in rules:
            if re.fullmatch(pattern, parameter):
                return value
        raise ValueError(f"expected a rule of {name} for every parameter, got none for {parameter}; end with ('.*', 1)")

    return jax.tree.map(value_of, parameter_names(params))


def check_pairs(name: str, rules: Sequence[tuple[str, Any]], kind: str, is_valid: Callable[[Any], bool]) -> None:
    """Raise `ValueError` unless rules pair regular expressions with valid values.

    `name` is the setting and `kind` describes a valid value. `is_valid` may raise `TypeError` or `ValueError`.
    """
    for rule in rules:
        try:
            pattern, value = rule
            re.compile(pattern)
            valid = is_valid(value)
        except (TypeError, ValueError, re.error):
            valid = False
        if not valid:
            raise ValueError(f"expected {name} to be pairs of a regular expression and {kind}, got {rule!r}")


def layer_decay_factors(decays: Sequence[float], params: Any) -> Any:
    """Map each parameter to its factor of the learning rate under layer-wise decay.

    The factor is `decay^(L + 1 - l)` for layer l of a tower with L layers. Everything before the first layer, such as
    embeddings, has l = 0. The LayerNorm after the last layer has l = L, as in timm's `param_groups_layer_decay`.
    Projections, pooling heads, logit scale and bias have l = L + 1, so their factor is 1. Frozen towers and layers
    can be absent. Clark et al. 2020 (ELECTRA), Bao et al. 2022 (BEiT).
    """
    names = parameter_names(params)
    factors = jax.tree.map(lambda _: 1.0, names)
    for subtree, decay in zip(TOWERS.values(), decays, strict=True):
        if subtree in params:
            tower = parameter_names(params[subtree])
            distances = distances_to_output(jax.tree.leaves(tower))
            factors[subtree] = jax.tree.map(
                lambda name, distances=distances, decay=decay: decay ** distances[name], tower
            )
    return factors
