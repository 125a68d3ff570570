"""Per-parameter values from the names of parameters.

Ordered rules (regular expression, value): the first that matches a name gives its value. Layer-wise decay.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax

from infcl_jax.models import TOWERS

Rules = Sequence[tuple[str, float]]

# Below the tower: a transformer block or a ResNet bottleneck; the parameters before the first layer; the LayerNorm
# after the last one.
_LAYER = re.compile(r"transformer/block_(\d+)/|layer(\d+)_(\d+)/")
_STEM = re.compile(r"(conv\d|bn\d|ln_pre|\w*embeddings?)(/|$)")
_FINAL_NORM = re.compile(r"(ln_post|ln_final)/")


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


def layer_decay_factors(decays: Sequence[float], params: Any) -> Any:
    """Map each parameter to its factor of the learning rate under layer-wise decay.

    The factor is `decay^(L + 1 - l)` for layer l of a tower with L layers. Everything before the first layer, such as
    embeddings, has l = 0. The LayerNorm after the last layer has l = L, as in timm's `param_groups_layer_decay`.
    Projections, pooling heads, logit scale and bias have l = L + 1, so their factor is 1.

    Args:
      decays: decay of the image and of the text tower; 1: none.
      params: parameters of `CLIP`. Towers or lower layers that are frozen can be absent.

    Raises:
      ValueError: a tower with a decay below 1 has no layers.

    Sources: Clark et al. 2020 (ELECTRA), Bao et al. 2022 (BEiT).
    """
    names = parameter_names(params)
    factors = jax.tree.map(lambda _: 1.0, names)
    for (name, subtree), decay in zip(TOWERS.items(), decays, strict=True):
        if decay == 1 or subtree not in params:
            continue
        layers = sorted({layer for path in jax.tree.leaves(names[subtree]) if (layer := _layer(path))})
        if not layers:
            raise ValueError(f"expected layers in the {name} tower with optimizer.layer_decay={decay}, got none; set 1")
        exponents = jax.tree.map(lambda path, layers=layers: len(layers) + 1 - _layer_id(path, layers), names[subtree])
        factors[subtree] = jax.tree.map(lambda exponent, decay=decay: decay**exponent, exponents)
    return factors


def _layer(path: str) -> tuple[int, ...]:
    """Return the numbers of a parameter's layer; empty outside the layers."""
    match = _LAYER.match(path.partition("/")[2])
    return tuple(int(number) for number in match.groups() if number) if match else ()


def _layer_id(path: str, layers: list[tuple[int, ...]]) -> int:
    """Return l of `layer_decay_factors`."""
    if layer := _layer(path):
        return 1 + layers.index(layer)
    name = path.partition("/")[2]
    if _STEM.match(name):
        return 0
    return len(layers) + (0 if _FINAL_NORM.match(name) else 1)
