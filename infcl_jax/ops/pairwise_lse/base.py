"""Interface between communication strategies (ring, all-gather) and compute backends.

A backend computes one `Block` on one device, without a mesh or collectives. A strategy moves blocks between devices,
without kernels. This module defines the data that they exchange.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int32, Shaped

Array = jax.Array
AxisName = str | tuple[str, ...]
FP32_BYTES = 4


class Block(NamedTuple):
    """Rows and columns that a backend compares in one call.

    Attributes:
      x: row features `[bx, D]`, bf16, fp32 or fp64.
      y: column features `[by, D]`, same dtype.
      x_scale: inverse temperature of the rows `[bx]` in the accumulation dtype. A scalar `[]` is a shared scale: it
        applies to every row and every column, and `y_scale` is None.
      y_scale: inverse temperature of the columns `[by]`. None with a shared scale or without column sums.
      x_mask: bool `[bx]`, False for masked rows; None: no row is masked.
      y_mask: bool `[by]`, False for masked columns; None: no column is masked.
      labels: int32 `[bx]`, the column of each row's positive. A value outside `[0, by)` means that the row's positive
        is in another block. None: the block contains no positives, or they are given by ids.
      x_ids: int32 `[bx]`, group numbers of the rows, see `positives.Groups`. A pair with equal numbers is a positive.
        None: positives are given by labels.
      y_ids: int32 `[by]`, group numbers of the columns.
    """

    x: Float[Array, "bx d"]
    y: Float[Array, "by d"]
    x_scale: Float[Array, ""] | Float[Array, "bx"]
    y_scale: Float[Array, "by"] | None = None
    x_mask: Bool[Array, "bx"] | None = None
    y_mask: Bool[Array, "by"] | None = None
    labels: Int32[Array, "bx"] | None = None
    x_ids: Int32[Array, "bx"] | None = None
    y_ids: Int32[Array, "by"] | None = None


class LogSum(NamedTuple):
    """Log-sum-exp as the pair (shift, sumexp): `lse = shift + log(sumexp)`.

    The pair keeps full precision. At scale 100 an fp32 `lse` is rounded to 8e-6. The probability of a well-aligned pair
    differs from one by less, so the rounding would hide its gradient. An empty sum is (-inf, 0).
    """

    shift: Float[Array, "..."]
    sumexp: Float[Array, "..."]

    def log(self) -> Float[Array, "..."]:
        """Return the log-sum-exp; -inf for an empty sum."""
        return self.shift + jnp.log(self.sumexp)

    def merge(self, other: "LogSum") -> "LogSum":
        """Return the log-sum-exp over both sets of terms."""
        shift = jnp.maximum(self.shift, other.shift)
        finite = finite_shift(shift)
        sumexp = self.sumexp * exp_below(self.shift, finite) + other.sumexp * exp_below(other.shift, finite)
        return LogSum(shift, sumexp)


def finite_shift(shift: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Replace -inf, the shift of an empty sum, by 0.

    The result can be subtracted from exponents without NaN.
    """
    return jnp.where(jnp.isneginf(shift), jnp.zeros_like(shift), shift)


@jax.custom_jvp
def exp_below(z: Float[Array, "..."], shift: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `exp(z - shift)` for logits of at most `shift`.

    The result is 1 at the maximum, whatever its size. XLA contracts a product and a difference to one fused operation,
    `scale * s - shift`, which does not round the product. At logits of 1e10 its difference from the rounded maximum is
    hundreds, so that the exponential would overflow or vanish.
    """
    return jnp.where(z >= shift, jnp.ones_like(z), jnp.exp(z - shift))


exp_below.defjvps(lambda dz, e, z, shift: e * dz, lambda d_shift, e, z, shift: -e * d_shift)


def empty_log_sum(like: Float[Array, "..."]) -> LogSum:
    """Return empty log-sum-exps shaped like `like`.

    They vary over the same mesh axes as `like`.
    """
    zeros = constant(like.shape, 0, like.dtype, varying_like=like)
    return LogSum(zeros - jnp.inf, zeros)


class PositiveSums(NamedTuple):
    """Sums over the positives by id of each row or column of one block.

    Attributes:
      lse: log-sum-exp of the positives' logits `[n]`; with a shared scale, its sum need not be exact where there is
        one positive.
      similarity: sum of the positives' unscaled similarities `[n]`.
    """

    lse: LogSum
    similarity: Float[Array, "n"]

    def merge(self, other: "PositiveSums") -> "PositiveSums":
        """Return the sums over both sets of positives."""
        return PositiveSums(self.lse.merge(other.lse), self.similarity + other.similarity)


class PositiveLogits(NamedTuple):
    """Log-sum-exp and sum of the logits of each row's or column's positives by id.

    Attributes:
      lse: `[n]`, -inf without a positive.
      sum: `[n]`, 0 without a positive.
    """

    lse: Float[Array, "n"]
    sum: Float[Array, "n"]


# Row log-sum-exp `[bx]`, column log-sum-exp `[by]` (None without column sums), and positives: with labels each row's
# similarity with its positive `[bx]`, with ids the `PositiveLogits` of the rows and of the columns (or None).
Results = tuple[Array, Array | None, Any]


class Sums(NamedTuple):
    """Forward results of one block.

    Attributes:
      row: log-sum-exp of each row over the columns `[bx]`.
      column: log-sum-exp of each column over the rows `[by]`; None without column sums.
      positive: similarity of each row with its positive `[bx]`; 0 if the positive is in another block. It comes from
        the same GEMM as the sums, so that rounding errors cancel in the loss.
      row_positives: sums over each row's positives by id `[bx]`; None without ids.
      column_positives: sums over each column's positives by id `[by]`; None without ids or without column sums.
    """

    row: LogSum
    column: LogSum | None
    positive: Float[Array, "bx"]
    row_positives: PositiveSums | None = None
    column_positives: PositiveSums | None = None


class PositiveCotangents(NamedTuple):
    """Sums over the positives by id of each row or column, and their cotangents.

    Attributes:
      lse: final `LogSum` over all blocks `[n]`.
      d_lse: dL / d lse `[n]`.
      d_sum: dL / d (sum of the positives' logits) `[n]`.
    """

    lse: LogSum
    d_lse: Float[Array, "n"]
    d_sum: Float[Array, "n"]


class Cotangents(NamedTuple):
    """Forward results and their cotangents, as inputs of the backward pass.

    Vectors are in the accumulation dtype.

    Attributes:
      row: final `LogSum` of the rows over all blocks `[bx]`.
      d_row: dL / d row_lse `[bx]`.
      column: final `LogSum` of the columns over all blocks `[by]`; None without column sums.
      d_column: dL / d col_lse `[by]`; None without column sums.
      positive: similarity of each row with its positive `[bx]`; only read with labels.
      d_positive: dL / d positive `[bx]`; only read with labels, None with ids.
      row_positives: sums and cotangents of the rows' positives by id `[bx]`; None without ids.
      column_positives: sums and cotangents of the columns' positives by id `[by]`; None without ids or column sums.
    """

    row: LogSum
    d_row: Float[Array, "bx"]
    column: LogSum | None
    d_column: Float[Array, "by"] | None
    positive: Float[Array, "bx"]
    d_positive: Float[Array, "bx"] | None
    row_positives: PositiveCotangents | None = None
    column_positives: PositiveCotangents | None = None


class Gradient(NamedTuple):
    """Gradients or their accumulators; None for gradients that are not needed.

    Gradients of scales are in the accumulation dtype.

    Attributes:
      x: `[bx, D]`; its accumulator may be any pytree that the backend chooses.
      y: `[by, D]`.
      x_scale: same shape as `Block.x_scale`.
      y_scale: same shape as `Block.y_scale`.
    """

    x: Any
    y: Float[Array, "padded_by padded_d"] | None
    x_scale: Float[Array, ""] | Float[Array, "bx"] | None
    y_scale: Float[Array, "by"] | None


class NeedsGrad(NamedTuple):
    """Static flags of the required gradients.

    A frozen tower, for example, needs no gradient of its features.
    """

    x: bool = True
    y: bool = True
    x_scale: bool = True
    y_scale: bool = True


class Backend(Protocol):
    """Computation of one block of any size on one device."""

    def forward(self, block: Block, *, exclude: bool, columns: bool) -> Sums:
        """Compute row sums, column sums (if `columns`) and positives of a block.

        `exclude` leaves the positives out of both sums. Sums of masked rows or columns are arbitrary but never NaN.
        With a shared scale all sums use the shared shift, whether they are exact or not (see `stabilization`).
        """

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Return zero accumulators; those of the features in `dtype`.

        The backend chooses their layout. The first axis of the column accumulator is the columns, optionally padded at
        the end.
        """

    def backward(self, block: Block, cotangents: Cotangents, acc: Gradient, *, exclude: bool) -> Gradient:
        """Add the block's gradients to `acc`, in place where that saves memory.

        Masked rows and columns contribute nothing. Cotangents are scaled so that the largest is between 1/2 and 1.
        """

    def gradient(self, block: Block, cotangents: Cotangents, acc: Gradient, needs_grad: NeedsGrad) -> Gradient:
        """Convert complete accumulators into the gradients of rows, columns and scales.

        Only the sum of the scale gradient over all devices is defined. The share of one device is arbitrary.
        """


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Communication strategy with a hand-written gradient.

    Attributes:
      forward: function with the arguments and results of `ring.forward`.
      backward: function with the arguments and results of `ring.backward`.
    """

    forward: Callable[..., Sums]
    backward: Callable[..., Gradient]


def zero_gradients(
    x: Float[Array, "padded_bx padded_d"],
    y: Float[Array, "padded_by padded_d"],
    x_scale: Float[Array, ""] | Float[Array, "bx"],
    y_scale: Float[Array, "by"] | None,
    needs_grad: NeedsGrad,
    dtype: jnp.dtype,
) -> Gradient:
    """Return zeros for every needed gradient; those of the features in `dtype`."""

    def zeros(like: Array | None, needed: bool, dtype: jnp.dtype) -> Array | None:
        return constant(like.shape, 0, dtype, varying_like=x) if needed and like is not None else None

    return Gradient(
        zeros(x, needs_grad.x, dtype),
        zeros(y, needs_grad.y, dtype),
        zeros(x_scale, needs_grad.x_scale, x_scale.dtype),
        zeros(y_scale, needs_grad.y_scale, x_scale.dtype),
    )


def zero_masked(array: Shaped[Array, "n *rest"], mask: Bool[Array, "n"] | None) -> Shaped[Array, "n *rest"]:
    """Set the masked rows of `array` `[n, ...]` to zero.

    `mask` is bool `[n]`, False for masked rows; None leaves `array` unchanged.
    """
    if mask is None:
        return array
    return jnp.where(jnp.expand_dims(mask, range(1, array.ndim)), array, jnp.zeros_like(array))


def add_trees(a: Any, b: Any) -> Any:
    """Add two pytrees leaf by leaf, in the dtypes of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), a, b)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return fp64 for fp64 features, else fp32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def similarities(x: Float[Array, "bx d"], y: Float[Array, "by d"]) -> Float[Array, "bx by"]:
    """Compute all `<x_i, y_j>` `[bx, by]`, never in TF32.

    The result is in the accumulation dtype.
    """
    return matmul(x, y, contract=(1, 1))


def matmul(a: Float[Array, "_ _"], b: Float[Array, "_ _"], contract: tuple[int, int]) -> Float[Array, "_ _"]:
    """Contract one axis of each operand, in the accumulation dtype.

    `contract` holds the axes of `a` and `b`. fp32 operands are never rounded to TF32.
    """
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
        preferred_element_type=accumulation_dtype(a.dtype),
    )


def as_varying(array: Array, axes: frozenset[str]) -> Array:
    """Mark `array` as varying over the mesh axes `axes`.

    JAX then sums its gradient over these axes.
    """
    missing = tuple(axes - jax.typeof(array).manual_axis_type.varying)
    return lax.pcast(array, missing, to="varying") if missing else array


def varying_over(tree: Any, axis_name: AxisName | None) -> Any:
    """Apply `as_varying` to a pytree, over `axis_name` and all axes over which one of its arrays varies.

    A gradient rule returns one type for all of them, also for a replicated scale.
    """
    axes = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    every = frozenset(axes).union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(tree)))
    return jax.tree.map(lambda a: as_varying(a, every), tree)


def constant(shape: tuple[int, ...], value: float, dtype: Any, varying_like: Array) -> Array:
    """Create a constant array that varies over the axes of `varying_like`."""
    return as_varying(jnp.full(shape, value, dtype), jax.typeof(varying_like).manual_axis_type.varying)


def zero_after(done: Any) -> Int32[Array, ""]:
    """Return int32 0 with a data dependency on the arrays of `done`.

    XLA removes optimization barriers before it schedules, so only a data dependency fixes an order. XLA does not
    simplify the minimum of absolute values and 0.
    """
    first = [jnp.abs(a[(0,) * a.ndim]).astype(jnp.float32) for a in jax.tree.leaves(done)]
    return jnp.minimum(sum(first, jnp.float32(0)), 0).astype(jnp.int32)


def round_up(count: int, multiple: int) -> int:
    """Round `count` up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


def accumulator_bytes(rows: int, width: int) -> int:
    """Bytes of the fp32 gradients of `rows` rows and `rows` columns."""
    return 2 * rows * width * FP32_BYTES


def similarity_bytes(rows: int, columns: int) -> int:
    """Bytes of the fp32 similarities of a block and of dS."""
    return 2 * rows * columns * FP32_BYTES
