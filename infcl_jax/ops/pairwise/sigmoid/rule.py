"""Gradient rule of the pairwise sigmoid loss."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Float

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.gradient_rule import Loss
from infcl_jax.ops.pairwise.sigmoid.block import SigmoidBlock, SigmoidGradient


@dataclasses.dataclass(frozen=True)
class Sigmoid(Loss):
    """`gradient_rule.Loss` of each row's loss terms; the sums are the results."""

    folder = "sigmoid"
    gradient = SigmoidGradient
    forward_mode = "write it out as a sum over pairs"

    def feature_scale(self, block: SigmoidBlock, scale: Float[Array, ""]) -> Float[Array, ""]:
        """Return 0 for a scale of 0, by which fused backends do not divide."""
        return jnp.where(block.scale == 0, jnp.zeros_like(scale), scale)
