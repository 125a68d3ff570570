"""Operands and results of distillation on one device, and its dense implementation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from infcl_jax.ops.pairwise_lse.base import Array, AxisName, accumulation_dtype, similarities, zero_masked


class Operands(NamedTuple):
    """Pairs of one device, with the features of both models.

    Attributes:
      x: student's image features `[b/n, D]`.
      y: student's text features `[b/n, D]`, same dtype.
      scale: student's inverse temperature, scalar in the accumulation dtype.
      teacher_x: teacher's image features `[b/n, Dt]`, any floating dtype; no gradient.
      teacher_y: teacher's text features `[b/n, Dt]`; no gradient.
      teacher_scale: teacher's inverse temperature; no gradient.
      mask: bool `[b/n]`, False for masked pairs, whose features must be finite; None: no pair is masked.
    """

    x: Array
    y: Array
    scale: Array
    teacher_x: Array
    teacher_y: Array
    teacher_scale: Array
    mask: Array | None


class Logits(NamedTuple):
    """Log-sum-exps, positives and gaps of rows and columns, in the accumulation dtype.

    Attributes:
      row_negatives: `[b/n]` log-sum-exp of each row's negatives; -inf without one.
      column_negatives: `[b/n]` log-sum-exp of each column's negatives.
      positive: `[b/n]` logit of each pair.
      row_gap: `[b/n]` see `divergence`; 0 for masked rows.
      column_gap: `[b/n]`.
    """

    row_negatives: Array
    column_negatives: Array
    positive: Array
    row_gap: Array
    column_gap: Array

    def divergence(self) -> tuple[Float[Array, "b"], Float[Array, "b"]]:
        """Return KL(teacher || student) of each row and of each column, in nats."""
        row = self.row_gap + jnp.logaddexp(self.row_negatives, self.positive)
        return row, self.column_gap + jnp.logaddexp(self.column_negatives, self.positive)


def operands_of(
    image: Array, text: Array, scale: Array, teacher: tuple[Array, Array, Array], mask: Array | None
) -> Operands:
    """Return this device's operands.

    Masked rows are set to zero, and fp16 features become fp32.
    """
    features = [zero_masked(jnp.asarray(a), mask) for a in (image, text, *teacher[:2])]
    x, y, teacher_x, teacher_y = (a.astype(jnp.float32) if a.dtype == jnp.float16 else a for a in features)
    dtype = accumulation_dtype(x.dtype)
    return Operands(x, y, scale.astype(dtype), teacher_x, teacher_y, teacher[2].astype(dtype), mask)


def teacher_logits(operands: Operands, x: Array, y: Array) -> Array:
    """Compute the teacher's logits in the accumulation dtype of the student."""
    return operands.teacher_scale * similarities(x, y).astype(operands.teacher_scale.dtype)


def dense_logits(axis_name: AxisName | None, operands: Operands) -> Logits:
    """Compute `pair_logits` from the whole pair matrices on every device, differentiated by JAX."""
    dtype, rows = operands.scale.dtype, len(operands.x)
    names = ("x", "y", "teacher_x", "teacher_y", "mask")
    if axis_name is not None:
        gathered = {name: getattr(operands, name) for name in names}
        gathered = jax.tree.map(lambda a: lax.all_gather(a, axis_name, tiled=True), gathered)
        operands = operands._replace(**gathered)
    x, y = operands.x.astype(dtype), operands.y.astype(dtype)  # both terms of a gradient are added before rounding
    z, t = operands.scale * similarities(x, y), teacher_logits(operands, operands.teacher_x, operands.teacher_y)
    mask = jnp.ones(len(x), bool) if operands.mask is None else operands.mask
    valid = mask[:, None] & mask[None, :]
    negative = valid & ~jnp.eye(len(x), dtype=bool)

    def side(axis: int) -> tuple[Array, Array]:
        masked = jnp.where(valid, t, jnp.full_like(t, -jnp.finfo(dtype).max))
        shift = masked.max(axis)
        e = jnp.where(valid, jnp.exp(masked - jnp.expand_dims(shift, axis)), jnp.zeros_like(t))
        sumexp = jnp.maximum(e.sum(axis), 1)  # the largest term is 1; masked rows have none
        lse = shift + jnp.log(sumexp)
        # Not exp(t - lse): at a large scale the rounding of lse would keep the probabilities from adding up to one.
        gap = zero_masked((e * (t - z)).sum(axis) / sumexp - lse, mask)
        lowest = jnp.where(negative, z, jnp.full_like(z, -jnp.finfo(dtype).max))
        negatives = jnp.where(negative.any(axis), jax.nn.logsumexp(lowest, axis), jnp.full_like(lse, -jnp.inf))
        return negatives, gap

    (row, row_gap), (column, column_gap) = side(1), side(0)
    logits = Logits(row, column, jnp.diagonal(z), row_gap, column_gap)
    if axis_name is None:
        return logits
    first = lax.axis_index(axis_name) * rows
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, rows), logits)
