"""Gradient rule of the pairwise sigmoid loss."""

import dataclasses

from infcl_jax.ops.pairwise.gradient_rule import Loss
from infcl_jax.ops.pairwise.sigmoid.block import SigmoidGradient


@dataclasses.dataclass(frozen=True)
class Sigmoid(Loss):
    """`gradient_rule.Loss` of each row's loss terms; the sums are the results."""

    folder = "sigmoid"
    gradient = SigmoidGradient
    forward_mode = "write it out as a sum over pairs"
