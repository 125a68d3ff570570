"""Pairwise sigmoid loss of SigLIP.

Forward and backward each rotate the text blocks around the ring once.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int32

from infcl_jax.checks import check_implementation
from infcl_jax.losses.base import Loss, LossOutput
from infcl_jax.losses.batch import Array, AxisName, check_pairs, checked_scalar, global_mean, over_mesh
from infcl_jax.losses.directions import count_extra_positives
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
from infcl_jax.ops.pairwise_lse.checks import check_axis, check_features, checked_ids, checked_mask
from infcl_jax.ops.pairwise_lse.chunking import is_positive, padding_mask, scan_strips, valid_pairs
from infcl_jax.ops.pairwise_lse.implementations import XLA_RINGS
from infcl_jax.ops.pairwise_lse.positives import Groups, is_match, match_ids

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
    image_ids: Int32[Array, "b"] | Int32[Array, "b 2"] | None = None,
    text_ids: Int32[Array, "b"] | Int32[Array, "b 2"] | None = None,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Pairwise sigmoid loss over all pairs of the global batch.

    The loss is `1/b sum_ij softplus(-z_ij (scale * s_ij + bias))` with `s_ij = <image_i, text_j>`, and z = 1 on the
    diagonal, else -1. With ids, z = 1 wherever an image and a text have equal ids. Zhai et al., "Sigmoid Loss for
    Language Image Pre-Training", eq. 1 and section 3.3 (text features rotate around the devices).

    Examples:
      >>> loss = siglip_loss(image, text, 10.0, -10.0)
      >>> print(f"{loss:.2f}")
      1.56

    Args:
      image: `[b, D]` L2-normalized features, bf16, fp16, fp32 or fp64.
      text: `[b, D]`, same dtype; row i belongs to row i of `image`.
      logit_scale: scalar inverse temperature.
      logit_bias: scalar bias.
      axis_name: mesh axis (or axes) of the batch, see `clip_loss`.
      mesh: mesh over which the global arrays are sharded, see `clip_loss`.
      mask: bool `[b]`, False for masked pairs (padding), which the sum and b exclude. Their features may have any
        values, including NaN.
      image_ids: int32 `[b]`, or `[b, 2]` for 64-bit ids. None: the positive of image i is text i.
      text_ids: int32 `[b]` or `[b, 2]`. Masked pairs match no id.
      implementation: "xla" (strips of a block), "ring" (whole blocks), or None for "xla".

    Returns:
      Scalar in fp32 (fp64 for fp64 features), the same on every device.

    Raises:
      ValueError: shapes or dtypes do not match, ids are not int32, or the implementation is unknown.
    """
    check_pairs(image, text)
    check_implementation(implementation, tuple(XLA_RINGS))
    implementation = implementation or "xla"
    check_features(image, text)
    mask = checked_mask("mask", mask, image.shape[0])
    ids = checked_ids({"image_ids": image_ids, "text_ids": text_ids}, (len(image), len(text)))
    if image.dtype == jnp.float16:
        image, text = image.astype(jnp.float32), text.astype(jnp.float32)
    shared = (checked_scalar("logit_scale", logit_scale, image), checked_scalar("logit_bias", logit_bias, image))
    return over_mesh(_loss, implementation, (image, text, mask, *ids), shared, axis_name=axis_name, mesh=mesh)


def _loss(implementation: str, axis_name: AxisName | None, sharded: Any, shared: Any) -> Float[Array, ""]:
    image, text, mask, image_ids, text_ids = sharded
    check_axis(axis_name, image, text)
    plan = _Plan(axis_name, XLA_RINGS[implementation].rows)
    groups = Groups() if image_ids is None else match_ids(image_ids, text_ids, mask, mask, axis_name)
    image, text = zero_masked(image, mask), zero_masked(text, mask)
    operands = varying_over((image, text, *shared, mask, groups.x, groups.y), axis_name)
    return global_mean(_row_sums(plan, *operands), mask, axis_name)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static settings of one call."""

    axis_name: AxisName | None
    strip_rows: int | None


class _Rows(NamedTuple):
    """Row operands, to be split into strips.

    Attributes:
      x: row features.
      labels: column of each row's positive in the own block.
      mask: False for masked rows; None: no row is masked.
      ids: group numbers, see `positives.Groups`; None: positives are given by labels.
      d_loss: cotangent of each row's sum of loss terms; None in the forward pass.
    """

    x: Array
    labels: Array
    mask: Array | None
    ids: Array | None = None
    d_loss: Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_sums(
    plan: _Plan,
    x: Array,
    y: Array,
    scale: Array,
    bias: Array,
    mask: Array | None,
    x_ids: Array | None,
    y_ids: Array | None,
) -> Array:
    """Sum each row's loss terms over the columns of all devices, `[b/n]`."""

    def compare(columns: tuple, own: bool) -> tuple[Array, None]:
        y, y_mask, y_ids = columns

        def strip(carry: None, rows: _Rows) -> tuple[None, Array]:
            logits = scale * similarities(rows.x, y) + bias
            positive = _positive(rows.labels if own else None, y, rows.ids, y_ids)
            signed = logits if positive is None else jnp.where(positive, -logits, logits)
            return carry, _where_valid(rows, y_mask, jax.nn.softplus(signed)).sum(1)

        return scan_strips(strip, None, _rows(plan, x, mask, x_ids), plan.strip_rows)[1], None

    return ring.sweep(compare, (y, mask, y_ids), add_trees, plan.axis_name)[0]


def _forward(plan: _Plan, *operands: Array | None) -> tuple[Array, tuple]:
    return _row_sums(plan, *operands), operands


def _backward(plan: _Plan, operands: tuple, d_loss: Array) -> tuple:
    x, y, scale, bias, mask, x_ids, y_ids = operands
    dtype = accumulation_dtype(x.dtype)
    slices = ring.split((y, mask, y_ids), plan.axis_name)

    def compare(i: int, column_slice: tuple, local: tuple, d_y: Array, own: bool) -> tuple[tuple, Array]:
        first, (y, y_mask, y_ids) = slices[i][0], column_slice

        def strip(carry: tuple, rows: _Rows) -> tuple[tuple, Array]:
            d_y, d_scale, d_bias = carry
            s = similarities(rows.x, y)
            logits = scale * s + bias
            d_logits = jax.nn.sigmoid(logits)
            positive = _positive(rows.labels - first if own else None, y, rows.ids, y_ids)
            if positive is not None:  # sigmoid(z) - 1 = -sigmoid(-z), without cancellation
                d_logits = jnp.where(positive, -jax.nn.sigmoid(-logits), d_logits)
            d_logits = _where_valid(rows, y_mask, rows.d_loss[:, None] * d_logits)
            d_s = (scale * d_logits).astype(x.dtype)
            d_y = d_y + matmul(d_s, rows.x, contract=(0, 0))
            carry = (d_y, d_scale + (d_logits * s).sum(), d_bias + d_logits.sum())
            return carry, matmul(d_s, y, contract=(1, 0))

        d_x, *scalars = local
        rows = _rows(plan, x, mask, x_ids, d_loss)
        (d_y, *scalars), d_x_slice = scan_strips(strip, (d_y, *scalars), rows, plan.strip_rows)
        return (d_x + d_x_slice, *scalars), d_y

    local = tuple(constant(shape, 0, dtype, varying_like=x) for shape in (x.shape, (), ()))
    remote = [constant(columns[0].shape, 0, dtype, varying_like=x) for _, columns in slices]
    local, remote = ring.accumulate(compare, [columns for _, columns in slices], local, remote, plan.axis_name)
    d_x, d_scale, d_bias = local
    return d_x.astype(x.dtype), jnp.concatenate(remote).astype(y.dtype), d_scale, d_bias, None, None, None


_row_sums.defvjp(_forward, _backward)


def _rows(plan: _Plan, x: Array, mask: Array | None, ids: Array | None = None, d_loss: Array | None = None) -> _Rows:
    labels = jnp.arange(x.shape[0], dtype=jnp.int32)
    return _Rows(x, labels, padding_mask(mask, x.shape[0], plan.strip_rows), ids, d_loss)


def _positive(labels: Array | None, y: Array, x_ids: Array | None, y_ids: Array | None) -> Array | None:
    """Return bool `[rows, columns]`, True at the positives; None if there are none."""
    if x_ids is not None:
        return is_match(x_ids, y_ids)
    return None if labels is None else is_positive(labels, y)


def _where_valid(rows: _Rows, y_mask: Array | None, values: Array) -> Array:
    valid = valid_pairs(rows.mask, y_mask)
    return values if valid is None else jnp.where(valid, values, jnp.zeros_like(values))


class SiglipLoss(Loss):
    """`siglip_loss` as a training loss.

    Examples:
      >>> loss = SiglipLoss(name="siglip")
      >>> value = loss(CLIPOutput(image, text, jnp.float32(10.0), jnp.float32(-10.0))).value
      >>> print(f"{value:.2f}")
      1.56
    """

    implementations: ClassVar[tuple[str, ...]] = tuple(XLA_RINGS)

    def __call__(self, output: "CLIPOutput", **inputs: Any) -> LossOutput:
        """Compute the loss of the model output for the global batch.

        Raises:
          ValueError: the model has no logit bias.
        """
        if output.logit_bias is None:
            raise ValueError(
                "expected a model with a logit bias for the siglip loss, got none; set model_overrides "
                "init_logit_bias=-10"
            )
        ids = inputs.get("ids")
        value = siglip_loss(
            *output,
            axis_name=self.axis_name,
            mesh=self.mesh,
            image_ids=ids,
            text_ids=ids,
            implementation=self.implementation,
        )
        return LossOutput(value, extra_positives=count_extra_positives(ids))
