"""The contract between the strategies that move features (ring, gather) and the backends that compare them.

A backend compares the rows of one `Block` with its columns on one device. It knows no mesh and no collective; a
strategy knows no kernel. What they exchange is defined here.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
AxisName = str | tuple[str, ...]


class Block(NamedTuple):
    """The rows and columns that one device compares in one call.

    Attributes:
      x: row features `[bx, D]`, bf16, fp32 or fp64.
      y: column features `[by, D]`, same dtype.
      x_scale: inverse temperature of the rows in the accumulation dtype, `[bx]`; or `[]`, in which case it is the
        inverse temperature of every row and every column ("shared scale") and `y_scale` is None.
      y_scale: inverse temperature of the columns `[by]`, or None (shared scale, or no columns are asked for).
      x_mask: bool `[bx]`, False for rows that take part in nothing; None: all take part.
      y_mask: likewise for columns, `[by]`.
      labels: int32 `[bx]`, the column of each row's positive. A value outside `[0, by)` means that the row's positive
        is in another block. None: the block holds no positives at all.
    """

    x: Array
    y: Array
    x_scale: Array
    y_scale: Array | None = None
    x_mask: Array | None = None
    y_mask: Array | None = None
    labels: Array | None = None


class LogSum(NamedTuple):
    """A log-sum-exp as the pair (reference, total): `lse = reference + log(total)`.

    Kept apart so that no digits are lost: at scale 100 an fp32 `lse` is rounded to 8e-6, which would hide the gradient
    of a well-aligned pair, whose probability differs from one by less. A sum over nothing is (-inf, 0).
    """

    reference: Array
    total: Array

    def log(self) -> Array:
        """The log-sum-exp itself; -inf for a sum over nothing."""
        return self.reference + jnp.log(self.total)

    def merge(self, other: "LogSum") -> "LogSum":
        """The log-sum-exp over both sets of terms."""
        reference = jnp.maximum(self.reference, other.reference)
        finite = finite_reference(reference)
        total = self.total * jnp.exp(self.reference - finite) + other.total * jnp.exp(other.reference - finite)
        return LogSum(reference, total)


def finite_reference(reference: Array) -> Array:
    """The reference with -inf (a sum over nothing) replaced by 0, so that differences with it are numbers."""
    return jnp.where(jnp.isneginf(reference), jnp.zeros_like(reference), reference)


def empty_log_sum(like: Array) -> LogSum:
    """The log-sum-exp over nothing for every element of `like`, varying over the same mesh axes."""
    zeros = constant(like.shape, 0, like.dtype, varying_like=like)
    return LogSum(zeros - jnp.inf, zeros)


class Sums(NamedTuple):
    """What a forward comparison finds.

    Attributes:
      row: log-sum-exp of each row over the columns `[bx]`.
      column: log-sum-exp of each column over the rows `[by]`, or None when columns were not asked for.
      positive: similarity of each row's positive `[bx]`, from the same products as the sums, so that their rounding
        errors cancel in the loss; 0 for a row whose positive is in another block.
    """

    row: LogSum
    column: LogSum | None
    positive: Array


class Cotangents(NamedTuple):
    """What a backward block needs of the forward results and of their cotangents; vectors in the accumulation dtype.

    Attributes:
      row: the rows' final `LogSum` over all blocks `[bx]`.
      row_weight: dL / d row_lse `[bx]`.
      column: the columns' final `LogSum` `[by]`, or None when columns were not asked for.
      column_weight: dL / d col_lse `[by]` or None.
      positive: the rows' similarities with their positives `[bx]`; like `positive_weight` only read with labels.
      positive_weight: dL / d positive `[bx]`.
    """

    row: LogSum
    row_weight: Array
    column: LogSum | None
    column_weight: Array | None
    positive: Array
    positive_weight: Array


class Gradient(NamedTuple):
    """Gradients as they accumulate; None for what was not wanted. Scales in the accumulation dtype.

    Attributes:
      x: `[bx, D]`; accumulators are whatever the backend makes of it.
      y: `[by, D]`.
      x_scale: shaped like `Block.x_scale`.
      y_scale: shaped like `Block.y_scale`.
    """

    x: Any
    y: Array | None
    x_scale: Array | None
    y_scale: Array | None


class Wanted(NamedTuple):
    """Which gradients are asked for (static); a locked tower, say, needs none for its features."""

    x: bool = True
    y: bool = True
    x_scale: bool = True
    y_scale: bool = True


class Backend(Protocol):
    """Compares one block on one device, exactly, whatever its size."""

    def forward(self, block: Block, *, exclude: bool, columns: bool) -> Sums:
        """Row sums over the block's columns, column sums over its rows if `columns`, and its positives.

        `exclude` leaves the positives out of both sums. Sums of masked rows or columns are arbitrary but never NaN.
        With a shared scale all sums are taken against the shared reference, be they exact or not (see `references`).
        """

    def accumulators(self, block: Block, wanted: Wanted, dtype: jnp.dtype) -> Gradient:
        """Zeros to add to, those for features in `dtype`; what exactly they add up is the backend's affair.

        Columns are on the first axis of theirs, perhaps with padding after the last.
        """

    def backward(self, block: Block, cotangents: Cotangents, into: Gradient, *, exclude: bool) -> Gradient:
        """`into` with the block's contribution added, in place where that saves memory.

        Masked rows and columns contribute nothing. The largest cotangents are about one.
        """

    def gradient(self, block: Block, cotangents: Cotangents, found: Gradient, wanted: Wanted) -> Gradient:
        """The wanted gradients for this device's rows, columns and scales, when all contributions are in `found`.

        The scale's sum over all devices counts: its parts may be any.
        """


def no_gradient(block: Block, wanted: Wanted, dtype: jnp.dtype) -> Gradient:
    """Zeros for every gradient that is wanted, those of the features in `dtype`."""

    def zeros(like: Array | None, kept: bool, dtype: jnp.dtype) -> Array | None:
        return constant(like.shape, 0, dtype, varying_like=block.x) if kept and like is not None else None

    return Gradient(
        zeros(block.x, wanted.x, dtype),
        zeros(block.y, wanted.y, dtype),
        zeros(block.x_scale, wanted.x_scale, block.x_scale.dtype),
        zeros(block.y_scale, wanted.y_scale, block.x_scale.dtype),
    )


def zero_masked(array: Array, mask: Array | None) -> Array:
    """`array` `[n, ...]` with zeros in the rows where `mask` `[n]` is False; all rows are kept if it is None."""
    if mask is None:
        return array
    return jnp.where(jnp.expand_dims(mask, range(1, array.ndim)), array, jnp.zeros_like(array))


def add_trees(a: Any, b: Any) -> Any:
    """Leaf by leaf sum of two pytrees, in the dtypes of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), a, b)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """fp32 for bf16 and fp32 features, fp64 for fp64 features."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def similarities(x: Array, y: Array) -> Array:
    """All `<x_i, y_j>` `[bx, by]` in the accumulation dtype, never through TF32."""
    return matmul(x, y, contract=(1, 1))


def matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Product over one dimension of each operand, accumulated and returned in the accumulation dtype."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
        preferred_element_type=accumulation_dtype(a.dtype),
    )


def as_varying(array: Array, axes: frozenset[str]) -> Array:
    """`array` typed as different on each device along `axes`, so that its gradient is summed over them by JAX."""
    missing = tuple(axes - jax.typeof(array).manual_axis_type.varying)
    return lax.pcast(array, missing, to="varying") if missing else array


def varying_over(tree: Any, axis_name: AxisName | None) -> Any:
    """`as_varying` over the axes of `axis_name`, for a pytree; nothing to do for None."""
    axes = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    return jax.tree.map(lambda a: as_varying(a, frozenset(axes)), tree)


def constant(shape: tuple[int, ...], value: float, dtype: jnp.dtype, varying_like: Array) -> Array:
    """`jnp.full`, typed as varying over the same mesh axes as `varying_like`."""
    return as_varying(jnp.full(shape, value, dtype), jax.typeof(varying_like).manual_axis_type.varying)


def zero_after(done: Any) -> Array:
    """int32 0 that cannot be known before the arrays of `done`: barriers are gone when XLA schedules."""
    first = [jnp.abs(a[(0,) * a.ndim]).astype(jnp.float32) for a in jax.tree.leaves(done)]
    return jnp.minimum(sum(first, jnp.float32(0)), 0).astype(jnp.int32)


def round_up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple
