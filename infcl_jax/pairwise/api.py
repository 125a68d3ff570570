"""`pairwise_lse`: validation, choice of implementation, and the differentiation rule."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from infcl_jax.pairwise import gather, ring
from infcl_jax.pairwise.checks import (
    check_axis,
    check_choice,
    check_features,
    check_implementation,
    checked_labels,
    checked_mask,
    checked_scales,
)
from infcl_jax.pairwise.devices import FUSED, best_implementation, check_device, fused_backend
from infcl_jax.pairwise.tiles import Array, AxisName, Backend, Block, Cotangents, Sums, Wanted, constant, varying_over
from infcl_jax.pairwise.xla import XlaStrips


class PairwiseLSE(NamedTuple):
    """Result of `pairwise_lse`, in fp32 (fp64 for fp64 features).

    Attributes:
      row: `[bx]` log-sum-exp of each row over all columns of all devices.
      col: `[by]` log-sum-exp of each column over all rows, or None if not asked for.
      positive: `[bx]` similarity of each row with its positive, not scaled.
    """

    row: Array
    col: Array | None
    positive: Array


@dataclasses.dataclass(frozen=True)
class _Blockwise:
    """A strategy whose gradient is written by hand, with the backend that compares its blocks."""

    backend: Backend
    forward: Callable
    backward: Callable


_BLOCKWISE = {
    "disco": _Blockwise(XlaStrips(rows=None), gather.disco_forward, gather.disco_backward),
    "ring": _Blockwise(XlaStrips(rows=None), ring.forward, ring.backward),
    "xla": _Blockwise(XlaStrips(), ring.forward, ring.backward),
}
_GATHERED = {"dense": gather.dense, "local": gather.local}
IMPLEMENTATIONS = (*_GATHERED, *_BLOCKWISE, *FUSED)


def pairwise_lse(
    x: Array,
    y: Array,
    x_scale: Array | float,
    y_scale: Array | float | None = None,
    *,
    axis_name: AxisName | None = None,
    positives: str = "include",
    labels: Array | None = None,
    x_mask: Array | None = None,
    y_mask: Array | None = None,
    columns: bool = True,
    implementation: str | None = None,
) -> PairwiseLSE:
    """Row and column log-sum-exp over all pairs of a batch, without storing the pair matrix.

    With `s_ij = <x_i, y_j>` over the rows and columns of all devices of `axis_name`:

        row_i = log sum_j exp(x_scale_i * s_ij)
        col_j = log sum_i exp(y_scale_j * s_ij)
        positive_i = s_{i, labels_i}

    Every contrastive loss of this package is a function of these vectors. Differentiable in `x`, `y`, `x_scale` and
    `y_scale`; only the gradients that are asked for are computed. Inside `shard_map` (with its default
    `check_vma=True`) the gradient of a sum over all devices is exact, also that of arguments that all devices share.

    Method: Cheng et al., "Breaking the Memory Barrier" (Inf-CL), Algorithms 1-4, with both directions from one sweep.

    Args:
      x: `[bx, D]` row features of this device, bf16, fp16, fp32 or fp64. Usually L2-normalised; need not be.
      y: `[by, D]` column features of this device, same dtype.
      x_scale: inverse temperature of the rows, scalar or `[bx]`.
      y_scale: inverse temperature of the columns, scalar or `[by]`; `x_scale` if None.
      axis_name: mesh axis (or tuple of axes) over which the batch is sharded, inside `shard_map`; None for one device.
      positives: "include" them in the sums or "exclude" them.
      labels: int `[bx]`, row of this device's `y` that is each row's positive; row i by default. A label out of range
        is an error where its value is known, and gives a NaN `positive` where it is traced.
      x_mask: bool `[bx]`, False for rows that do not exist (padding): they are in no sum, and their results are 0.
      y_mask: bool `[by]`, likewise for columns.
      columns: False if only rows are needed (one-directional retrieval); `col` is None then.
      implementation: None (the best for the platform) or one of `IMPLEMENTATIONS`.

    Returns:
      `PairwiseLSE`. A log-sum-exp over no pair at all is -inf, with zero gradient.

    Raises:
      ValueError: shapes, dtypes, labels, the axis name or the implementation are not as described.
    """
    check_features(x, y)
    check_choice("positives", positives, ("include", "exclude"))
    check_implementation(implementation, IMPLEMENTATIONS)
    if implementation is None:
        implementation = best_implementation() if x.dtype != jnp.float64 else "xla"
    check_device(implementation, x.dtype)
    check_axis(axis_name)
    labels = checked_labels(labels, x.shape[0], y.shape[0])
    x_mask, y_mask = checked_mask("x_mask", x_mask, x.shape[0]), checked_mask("y_mask", y_mask, y.shape[0])
    if x.dtype == jnp.float16:  # fp16's range is too narrow for products of probabilities
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    x_scale, y_scale = checked_scales(x_scale, y_scale, x, y, columns)
    block = varying_over(Block(x, y, x_scale, y_scale, x_mask, y_mask, labels), axis_name)
    exclude = positives == "exclude"
    if implementation in _GATHERED:
        row, column, positive = _GATHERED[implementation](block, axis_name=axis_name, exclude=exclude, columns=columns)
    else:
        plan = _Plan(implementation, axis_name, exclude, columns)
        row, column, positive = _blockwise(plan, *block)
    positive = jnp.where((labels >= 0) & (labels < y.shape[0]), positive, jnp.full_like(positive, jnp.nan))
    return PairwiseLSE(
        _zero_where_masked(row, x_mask),
        _zero_where_masked(column, y_mask) if columns else None,
        _zero_where_masked(positive, x_mask),
    )


def _strategy(implementation: str) -> _Blockwise:
    if implementation in FUSED:
        return _Blockwise(fused_backend(implementation), ring.forward, ring.backward)
    return _BLOCKWISE[implementation]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static part of one call."""

    implementation: str
    axis_name: AxisName | None
    exclude: bool
    columns: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(
    plan: _Plan,
    x: Array,
    y: Array,
    x_scale: Array,
    y_scale: Array | None,
    x_mask: Array | None,
    y_mask: Array | None,
    labels: Array,
) -> tuple[Array, Array | None, Array]:
    return _logarithms(_sums(plan, Block(x, y, x_scale, y_scale, x_mask, y_mask, labels)))


def _sums(plan: _Plan, block: Block) -> Sums:
    strategy = _strategy(plan.implementation)
    return strategy.forward(
        strategy.backend, block, axis_name=plan.axis_name, exclude=plan.exclude, columns=plan.columns
    )


def _logarithms(sums: Sums) -> tuple[Array, Array | None, Array]:
    return sums.row.log(), None if sums.column is None else sums.column.log(), sums.positive


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StaticWanted:
    """Carries the static `Wanted` from the forward rule to the backward rule."""

    wanted: Wanted


def _blockwise_forward(plan: _Plan, *primals: CustomVJPPrimal) -> tuple:
    block = Block(*jax.tree.map(lambda p: p.value, primals, is_leaf=_is_primal))
    wanted = Wanted(*(p is not None and p.perturbed for p in primals[:4]))
    sums = _sums(plan, block)
    return _logarithms(sums), (block, sums, _StaticWanted(wanted))


def _blockwise_backward(plan: _Plan, residuals: tuple, cotangents: tuple) -> tuple:
    block, sums, static = residuals
    d_row, d_column, d_positive = (_instantiate(c, block.x) for c in cotangents)
    size = _largest((d_row, d_column, d_positive), plan.axis_name)
    d_row, d_column, d_positive = (None if d is None else d / size for d in (d_row, d_column, d_positive))
    strategy = _strategy(plan.implementation)
    gradient = strategy.backward(
        strategy.backend,
        block,
        Cotangents(sums.row, d_row, sums.column, d_column, sums.positive, d_positive),
        axis_name=plan.axis_name,
        exclude=plan.exclude,
        wanted=static.wanted,
    )
    # The mean's 1/b is in `size`: applied last, nothing small is ever rounded.
    gradient = jax.tree.map(lambda g: g.astype(size.dtype) * size, gradient)
    d_x, d_y = (None if g is None else g.astype(block.x.dtype) for g in (gradient.x, gradient.y))
    return d_x, d_y, gradient.x_scale, gradient.y_scale, None, None, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward, symbolic_zeros=True)


def _is_primal(value: object) -> bool:
    return isinstance(value, CustomVJPPrimal)


def _instantiate(cotangent: Array | SymbolicZero | None, like: Array) -> Array | None:
    if isinstance(cotangent, SymbolicZero):
        return constant(cotangent.shape, 0, cotangent.dtype, varying_like=like)
    return cotangent


def _largest(cotangents: tuple[Array | None, ...], axis_name: AxisName | None) -> Array:
    """The largest absolute cotangent of all devices, 1 if all are zero."""
    largest = jnp.stack([jnp.abs(c).max() for c in cotangents if c is not None]).max()
    if axis_name is not None:
        largest = lax.pmax(varying_over(largest, axis_name), axis_name)
    return jnp.where(largest > 0, largest, jnp.ones_like(largest))


def _zero_where_masked(array: Array, mask: Array | None) -> Array:
    return array if mask is None else jnp.where(mask, array, jnp.zeros_like(array))
