"""The strategies that go block by block: which way their exponentials stay in range, and the rule of their gradient."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from infcl_jax.ops.pairwise_lse import all_gather, ring
from infcl_jax.ops.pairwise_lse.base import (
    Array,
    AxisName,
    Backend,
    Block,
    Cotangents,
    Gradient,
    Sums,
    Wanted,
    constant,
    varying_over,
)
from infcl_jax.ops.pairwise_lse.chunking import march, written
from infcl_jax.ops.pairwise_lse.implementations import FUSED, fused_backend
from infcl_jax.ops.pairwise_lse.stabilization import all_within_range, is_shared, per_sample
from infcl_jax.ops.pairwise_lse.xla_chunked import XlaStrips


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A strategy whose gradient is written by hand, with the backend that compares its blocks."""

    backend: Backend
    forward: Callable
    backward: Callable


_PORTABLE = {
    "disco": Strategy(XlaStrips(rows=None), all_gather.disco_forward, all_gather.disco_backward),
    "ring": Strategy(XlaStrips(rows=None), ring.forward, ring.backward),
    "xla": Strategy(XlaStrips(), ring.forward, ring.backward),
}
BLOCKWISE = (*_PORTABLE, *FUSED)
# Rows of a gradient that are scaled at a time.
PART = 1 << 15


def _strategy(plan: "Plan") -> Strategy:
    if plan.implementation in FUSED:
        alone = not ring.ring_axes(plan.axis_name)
        return Strategy(fused_backend(plan.implementation, alone), ring.forward, ring.backward)
    return _PORTABLE[plan.implementation]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of one call."""

    implementation: str
    axis_name: AxisName | None
    exclude: bool
    columns: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(
    plan: Plan,
    x: Array,
    y: Array,
    x_scale: Array,
    y_scale: Array | None,
    x_mask: Array | None,
    y_mask: Array | None,
    labels: Array,
) -> tuple[Array, Array | None, Array]:
    """Log-sum-exp of rows and columns, and positives, of what `tiles.Block` describes."""
    sums = _sums(plan, Block(x, y, x_scale, y_scale, x_mask, y_mask, labels))
    return _logarithms(sums.final)


class _Found(NamedTuple):
    """Sums of a block.

    Attributes:
      first: as found at first, with a shared scale against the shared reference.
      exact: whether those of all devices are exact; None where no scale is shared.
      final: those that are exact.
    """

    first: Sums
    exact: Array | None
    final: Sums


def _sums(plan: Plan, block: Block) -> _Found:
    """Of this device's rows and columns over all devices."""
    strategy, axis_name = _strategy(plan), plan.axis_name

    def sums(block: Block) -> Sums:
        return strategy.forward(
            strategy.backend, block, axis_name=axis_name, exclude=plan.exclude, columns=plan.columns
        )

    found = sums(block)
    if not is_shared(block):
        return _Found(found, None, found)
    # Once for all blocks and devices: they wait for each other anyway, and for the host where it has to decide.
    exact = all_within_range(block, found, 1 if axis_name is None else lax.axis_size(axis_name))
    if axis_name is not None:
        exact = lax.pmin(varying_over(exact.astype(jnp.int32), axis_name), axis_name) > 0
    return _Found(found, exact, _or_else(exact, found, lambda: sums(per_sample(block, plan.columns))))


def _or_else[T](exact: Array, found: T, other: Callable[[], T]) -> T:
    """What is found if it is exact, or else `other()`.

    The host decides, on GPUs, and has to wait for `exact`: nothing that does not need the result waits with it. Unlike
    a conditional, a loop that does not run leaves what is found where it is.
    """
    return lax.while_loop(lambda state: ~state[0], lambda _: (jnp.ones_like(exact), other()), (exact, found))[1]


def _logarithms(sums: Sums) -> tuple[Array, Array | None, Array]:
    return sums.row.log(), None if sums.column is None else sums.column.log(), sums.positive


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StaticWanted:
    """Carries the static `Wanted` from the forward rule to the backward rule."""

    wanted: Wanted


def _forward(plan: Plan, *primals: CustomVJPPrimal) -> tuple:
    block = Block(*jax.tree.map(lambda p: p.value, primals, is_leaf=_is_primal))
    wanted = Wanted(*(p is not None and p.perturbed for p in primals[:4]))
    sums = _sums(plan, block)
    return _logarithms(sums.final), (block, sums, _StaticWanted(wanted))


def _backward(plan: Plan, residuals: tuple, cotangents: tuple) -> tuple:
    block, sums, static = residuals
    d_row, d_column, d_positive = (_instantiate(c, block.x) for c in cotangents)
    size = _largest((d_row, d_column, d_positive), plan.axis_name)
    d_row, d_column, d_positive = (None if d is None else d / size for d in (d_row, d_column, d_positive))
    strategy = _strategy(plan)

    def gradient(block: Block, sums: Sums, wanted: Wanted) -> Gradient:
        found = strategy.backward(
            strategy.backend,
            block,
            Cotangents(sums.row, d_row, sums.column, d_column, sums.positive, d_positive),
            axis_name=plan.axis_name,
            exclude=plan.exclude,
            wanted=wanted,
        )
        # The mean's 1/b is in `size`: applied last and exactly, nothing small is ever rounded.
        d_x, d_y = (None if g is None else _times(g, size, block.x.dtype) for g in (found.x, found.y))
        x_scale, y_scale = (None if g is None else g * size for g in (found.x_scale, found.y_scale))
        return Gradient(d_x, d_y, x_scale, y_scale)

    def general() -> Gradient:
        wanted = static.wanted._replace(y_scale=static.wanted.x_scale)
        found = gradient(per_sample(block, plan.columns), sums.final, wanted)
        if not wanted.x_scale:
            return found
        x_scale = found.x_scale.sum()
        return found._replace(x_scale=x_scale if found.y_scale is None else x_scale + found.y_scale.sum(), y_scale=None)

    # From the first sums, whether exact or not: so the backward pass is on its way before the host is asked.
    found = gradient(block, sums.first, static.wanted)
    if sums.exact is not None:
        found = _or_else(sums.exact, found, general)
    return *found, None, None, None


blockwise.defvjp(_forward, _backward, symbolic_zeros=True)


def _is_primal(value: object) -> bool:
    return isinstance(value, CustomVJPPrimal)


def _instantiate(cotangent: Array | SymbolicZero | None, like: Array) -> Array | None:
    if isinstance(cotangent, SymbolicZero):
        return constant(cotangent.shape, 0, cotangent.dtype, varying_like=like)
    return cotangent


def _times(array: Array, factor: Array, dtype: jnp.dtype) -> Array:
    """The product, rounded once; in place, part by part, if it keeps its dtype: XLA would hold a copy of the whole."""
    if array.dtype != dtype:
        return (array * factor).astype(dtype)

    def multiply(first: Array, count: int, array: Array) -> Array:
        part = lax.dynamic_slice_in_dim(array, first, count)
        return written(array, part.astype(factor.dtype) * factor, first)

    return march(array.shape[0], min(array.shape[0], PART), multiply, array)


def _largest(cotangents: tuple[Array | None, ...], axis_name: AxisName | None) -> Array:
    """The power of two above the largest absolute cotangent of all devices, 1 if all are zero."""
    largest = jnp.stack([jnp.abs(c).max() for c in cotangents if c is not None]).max()
    if axis_name is not None:
        largest = lax.pmax(varying_over(largest, axis_name), axis_name)
    power = jnp.ldexp(jnp.ones_like(largest), jnp.frexp(largest)[1])
    return jnp.where(largest > 0, power, jnp.ones_like(power))
