"""Models whose features are a prefix of another model's."""

import dataclasses
from typing import Any

import jax

from infcl_jax.models.clip import variable_shapes
from infcl_jax.models.config import CLIPConfig
from infcl_jax.models.registry import build_model


def prefix_model(config: CLIPConfig, variables: Any, dim: int) -> tuple[CLIPConfig, Any]:
    """Cut the projections of a model to a prefix of the features.

    The features of the new model are the normalized prefixes of the given one's.

    Args:
      config: model configuration.
      variables: its variables.
      dim: size of the prefix.

    Returns:
      The configuration with `embed_dim=dim` and its variables.

    Raises:
      ValueError: `dim` is not in [1, embed_dim], or the model's projections are not linear.
    """
    if not 1 <= dim <= config.embed_dim:
        raise ValueError(f"expected dim between 1 and {config.embed_dim}, the size of the features, got {dim}")
    small = dataclasses.replace(config, embed_dim=dim)

    def cut(leaf: Any, target: jax.ShapeDtypeStruct) -> Any:
        if leaf.shape[:-1] != target.shape[:-1]:
            raise ValueError(f"expected a model with linear projections with dim={dim}, got another")
        return leaf[..., : target.shape[-1]] if target.shape else leaf

    shapes = variable_shapes(build_model(small))
    return small, {**variables, **jax.tree.map(cut, {name: variables[name] for name in shapes}, shapes)}
