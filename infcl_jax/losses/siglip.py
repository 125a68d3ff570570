"""Pairwise sigmoid loss of SigLIP, accumulated around the ring.

Forward and backward each rotate the text blocks around the ring once.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from infcl_jax.checks import check_implementation
from infcl_jax.losses.base import Loss, LossOutput
from infcl_jax.losses.batch import Array, AxisName, check_pairs, checked_scalar, global_mean, over_mesh
from infcl_jax.ops.pairwise_lse import ring
from infcl_jax.ops.pairwise_lse.base import (
    accumulation_dtype,
    add_trees,
    constant,
    matmul,
    similarities,
    varying_over,
    zero_masked,
)
from infcl_jax.ops.pairwise_lse.checks import check_axis, check_features, checked_mask
from infcl_jax.ops.pairwise_lse.chunking import is_positive, padding_mask, scan_strips, valid_pairs
from infcl_jax.ops.pairwise_lse.implementations import XLA_RINGS

if TYPE_CHECKING:
    from infcl_jax.models import CLIPOutput


def siglip_loss(
    image: Float[Array, "b d"],
    text: Float[Array, "b d"],
    logit_scale: Float[Array, ""] | float,
    logit_bias: Float[Array, ""] | float,
    *,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    mask: Bool[Array, "b"] | None = None,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Pairwise sigmoid loss over all pairs of the global batch.

    The loss is `1/b sum_ij softplus(-z_ij (scale * s_ij + bias))` with `s_ij = <image_i, text_j>`, and z = 1 on the
    diagonal, else -1. Zhai et al., "Sigmoid Loss for Language Image Pre-Training", eq. 1 and section 3.3 (text features
    rotate around the devices).

    Args:
      image: `[b, D]` L2-normalized features, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      logit_scale: scalar inverse temperature.
      logit_bias: scalar bias.
      axis_name: mesh axis (or axes) of the batch, see `clip_loss`.
      mesh: mesh over which the global arrays are sharded, see `clip_loss`.
      mask: bool `[b]`, False for masked pairs (padding). The sum and b exclude them, and their features may hold any
        values.
      implementation: "xla" (ring, strips inside the device), "ring" (whole blocks), or None (the best for the
        platform).

    Returns:
      Scalar in fp32 (fp64 for fp64 features), the same on every device.

    Raises:
      ValueError: shapes or dtypes do not match, or the implementation is unknown.
    """
    check_pairs(image, text)
    check_implementation(implementation, tuple(XLA_RINGS))
    implementation = implementation or "xla"
    check_features(image, text)
    mask = checked_mask("mask", mask, image.shape[0])
    if image.dtype == jnp.float16:
        image, text = image.astype(jnp.float32), text.astype(jnp.float32)
    shared = (checked_scalar("logit_scale", logit_scale, image), checked_scalar("logit_bias", logit_bias, image))
    return over_mesh(_loss, implementation, (image, text, mask), shared, axis_name=axis_name, mesh=mesh)


def _loss(implementation: str, axis_name: AxisName | None, sharded: Any, shared: Any) -> Float[Array, ""]:
    image, text, mask = sharded
    check_axis(axis_name, image, text)
    plan = _Plan(axis_name, XLA_RINGS[implementation].rows)
    image, text = zero_masked(image, mask), zero_masked(text, mask)
    operands = varying_over((image, text, *shared, mask), axis_name)
    return global_mean(_row_sums(plan, *operands), mask, axis_name)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static settings of one call."""

    axis_name: AxisName | None
    strip_rows: int | None


class _Strip(NamedTuple):
    """Rows of one strip, with positive columns, mask and loss cotangents."""

    x: Array
    labels: Array
    mask: Array | None
    weight: Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_sums(plan: _Plan, x: Array, y: Array, scale: Array, bias: Array, mask: Array | None) -> Array:
    """Sum each row's loss terms over the columns of all devices, `[b/n]`."""

    def compare(block: tuple, is_local: bool) -> tuple[Array, None]:
        y, y_mask = block

        def strip(carry: None, rows: _Strip) -> tuple[None, Array]:
            logits = scale * similarities(rows.x, y) + bias
            signed = jnp.where(is_positive(rows.labels, y), -logits, logits) if is_local else logits
            return carry, _where_valid(rows, y_mask, jax.nn.softplus(signed)).sum(1)

        return scan_strips(strip, None, _rows(plan, x, mask), plan.strip_rows)[1], None

    return ring.sweep(compare, (y, mask), add_trees, plan.axis_name)[0]


def _forward(plan: _Plan, *operands: Array | None) -> tuple[Array, tuple]:
    return _row_sums(plan, *operands), operands


def _backward(plan: _Plan, operands: tuple, weight: Array) -> tuple:
    x, y, scale, bias, mask = operands
    dtype = accumulation_dtype(x.dtype)

    column_blocks = ring.split((y, mask), plan.axis_name)

    def compare(i: int, block: tuple, local: tuple, d_y: Array, is_local: bool) -> tuple[tuple, Array]:
        first, (y, y_mask) = column_blocks[i][0], block

        def strip(carry: tuple, rows: _Strip) -> tuple[tuple, Array]:
            d_y, d_scale, d_bias = carry
            s = similarities(rows.x, y)
            logits = scale * s + bias
            d_logits = jax.nn.sigmoid(logits)
            if is_local:  # sigmoid(z) - 1 = -sigmoid(-z), without cancellation
                d_logits = jnp.where(is_positive(rows.labels - first, y), -jax.nn.sigmoid(-logits), d_logits)
            d_logits = _where_valid(rows, y_mask, rows.weight[:, None] * d_logits)
            d_s = (scale * d_logits).astype(x.dtype)
            d_y = d_y + matmul(d_s, rows.x, contract=(0, 0))
            carry = (d_y, d_scale + (d_logits * s).sum(), d_bias + d_logits.sum())
            return carry, matmul(d_s, y, contract=(1, 0))

        d_x, *scalars = local
        (d_y, *scalars), d_x_block = scan_strips(strip, (d_y, *scalars), _rows(plan, x, mask, weight), plan.strip_rows)
        return (d_x + d_x_block, *scalars), d_y

    local = tuple(constant(shape, 0, dtype, varying_like=x) for shape in (x.shape, (), ()))
    remote = [constant(block[0].shape, 0, dtype, varying_like=x) for _, block in column_blocks]
    local, remote = ring.accumulate(compare, [block for _, block in column_blocks], local, remote, plan.axis_name)
    d_x, d_scale, d_bias = local
    return d_x.astype(x.dtype), jnp.concatenate(remote).astype(y.dtype), d_scale, d_bias, None


_row_sums.defvjp(_forward, _backward)


def _rows(plan: _Plan, x: Array, mask: Array | None, weight: Array | None = None) -> _Strip:
    labels = jnp.arange(x.shape[0], dtype=jnp.int32)
    return _Strip(x, labels, padding_mask(mask, x.shape[0], plan.strip_rows), weight)


def _where_valid(rows: _Strip, y_mask: Array | None, values: Array) -> Array:
    valid = valid_pairs(rows.mask, y_mask)
    return values if valid is None else jnp.where(valid, values, jnp.zeros_like(values))


class SiglipLoss(Loss):
    """`siglip_loss` as a training loss."""

    implementations: ClassVar[tuple[str, ...]] = tuple(XLA_RINGS)

    def __call__(self, output: "CLIPOutput", **inputs: Any) -> LossOutput:
        """Compute the loss of the model output for the global batch.

        Raises:
          ValueError: the model has no logit bias.
        """
        if output.logit_bias is None:
            raise ValueError("the siglip loss needs a model with a logit bias; set model_overrides init_logit_bias=-10")
        return LossOutput(siglip_loss(*output, mesh=self.mesh, implementation=self.implementation))
