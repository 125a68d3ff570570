"""Function `pairwise_sigmoid`: validation and dispatch."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int32

from infcl_jax.ops.common.checks import check_implementation
from infcl_jax.ops.pairwise.base import Array, AxisName, accumulation_dtype, varying_over, zero_masked
from infcl_jax.ops.pairwise.checks import check_axis, check_features, checked_ids, checked_mask
from infcl_jax.ops.pairwise.ids import Groups, match_ids
from infcl_jax.ops.pairwise.implementations import best_implementation, check_device, compute, implementations_of
from infcl_jax.ops.pairwise.sigmoid.block import SigmoidBlock
from infcl_jax.ops.pairwise.sigmoid.rule import Sigmoid

SIGMOID_IMPLEMENTATIONS = implementations_of("sigmoid")


class PairwiseSigmoid(NamedTuple):
    """Result of `pairwise_sigmoid`, in fp32 (fp64 for fp64 features).

    Examples:
      >>> terms = pairwise_sigmoid(image, text, 10.0, -10.0)
      >>> terms.positive.shape, terms.negative.shape
      ((8,), (8,))

    Attributes:
      positive: `[b]`, each row's loss terms summed over its positives; 0 for masked rows.
      negative: `[b]`, each row's loss terms summed over its negatives; 0 for masked rows.
    """

    positive: Float[Array, "b"]
    negative: Float[Array, "b"]


def pairwise_sigmoid(
    x: Float[Array, "b d"],
    y: Float[Array, "b d"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
    *,
    axis_name: AxisName | None = None,
    x_ids: Int32[Array, "b"] | Int32[Array, "b 2"] | None = None,
    y_ids: Int32[Array, "b"] | Int32[Array, "b 2"] | None = None,
    mask: Bool[Array, "b"] | None = None,
    implementation: str | None = None,
) -> PairwiseSigmoid:
    """Sum each row's sigmoid loss terms over the columns of all devices.

    The pair matrix is not stored. With `l_ij = scale * <x_i, y_j> + bias`:

        positive_i = sum over the positives j of softplus(-l_ij)
        negative_i = sum over all other j of softplus(l_ij)

    Zhai et al., "Sigmoid Loss for Language Image Pre-Training", eq. 1. The result is differentiable in `x`, `y`,
    `scale` and `bias`. Gradients that the caller does not need are not computed. Inside `shard_map`, with its default
    `check_vma=True`, the gradients of a sum over all devices are exact, also for replicated arguments.

    Examples:
      >>> positive, negative = pairwise_sigmoid(image, text, 10.0, -10.0)
      >>> print(f"{(positive + negative).mean():.2f}")  # `siglip_loss`
      1.56

    Args:
      x: `[b, D]` row features of this device, bf16, fp16, fp32 or fp64.
      y: `[b, D]` column features of this device, same dtype.
      scale: scalar inverse temperature.
      bias: scalar bias of the logits.
      axis_name: mesh axis (or tuple of axes) over which the batch is sharded, inside `shard_map`; None for one device.
      x_ids: int32 `[b]`, or `[b, 2]` for 64-bit ids. A pair with equal ids is a positive, on any device. None: the
        positive of row i is column i of the same device.
      y_ids: int32 `[b]` or `[b, 2]`, ids of the columns.
      mask: bool `[b]`, False for masked rows and columns (padding). They are in no sum, match no id, and may have any
        value, including NaN.
      implementation: one of `SIGMOID_IMPLEMENTATIONS`; None selects the best for the platform.

    Raises:
      ValueError: shapes, dtypes, ids, the axis name or the implementation are not as described, or `axis_name` is
        missing inside `shard_map`.
    """
    check_features(x, y)
    check_implementation(implementation, SIGMOID_IMPLEMENTATIONS)
    if len(x) != len(y):
        raise ValueError(f"expected as many rows in y as in x, got {len(x)} and {len(y)} rows")
    x_ids, y_ids = checked_ids({"x_ids": x_ids, "y_ids": y_ids}, (len(x), len(y)))
    mask = checked_mask("mask", mask, len(x))
    implementation = implementation or best_implementation(x.dtype)
    check_device(implementation, x.dtype)
    check_axis(axis_name, x, y)
    axis_name = axis_name or None
    if x.dtype == jnp.float16:  # fp16's range is too narrow for GEMMs of probabilities
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    groups = Groups() if x_ids is None else match_ids(x_ids, y_ids, mask, mask, axis_name)
    scale, bias = (jnp.asarray(a).astype(accumulation_dtype(x.dtype)) for a in (scale, bias))
    block = varying_over(SigmoidBlock(x, y, scale, bias, mask, mask, groups.x, groups.y), axis_name)
    block = block._replace(x=zero_masked(block.x, block.x_mask), y=zero_masked(block.y, block.y_mask))
    sums = compute(implementation, Sigmoid(), block, axis_name)
    return PairwiseSigmoid(*(zero_masked(a, mask) for a in sums))
