"""The ring: columns travel round the mesh, rows stay, and no device ever holds more than two blocks of features.

Cheng et al., "Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss" (Inf-CL), section
3.3, with both directions in one trip. Only `shard_map`-level collectives here; the comparison itself is the backend's.

Several mesh axes make a ring of rings: blocks go round the last axis (the devices of a host) once for each step along
the axis before it (the hosts), so that few blocks take the slow links, with a whole round's comparisons to hide it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infcl_jax.pairwise.tiles import (
    Array,
    AxisName,
    Backend,
    Block,
    Cotangents,
    Gradient,
    LogSum,
    Sums,
    Wanted,
    accumulation_dtype,
)

# Straight-line code needs no copies between the steps; longer rings are unrolled in pieces.
MAX_UNROLL = 16

Compare = Callable[[Any, bool], tuple[Any, Any]]
Merge = Callable[[Any, Any], Any]


def sweep(
    compare: Compare, travelling: Any, merge: Merge, axis_name: AxisName | None, *, own_last: bool = False
) -> tuple[Any, Any]:
    """Shows every device's `travelling` to every device and merges what they make of it.

    While a device compares one block, the next one arrives and what the previous step found leaves. Only one hop has
    no comparison beside it: the last one of the contributions, or with `own_last` the first one of `travelling`.

    Args:
      compare: `compare(travelling, own) -> (home, away)`: contributions that stay on this device, and contributions
        that belong to the owner of `travelling`. `own` (static) is True in the step in which this device owns it.
      travelling: pytree of this device's arrays.
      merge: associative merge of two contributions of the same structure.
      axis_name: mesh axis of the ring; or several, slowest links first; None for a single device.
      own_last: go round the other way, the own block last: for contributions that are larger than `travelling`.

    Returns:
      `(home, away)`: all contributions, each merged on the device where it belongs.
    """
    axes = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    axes = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    if own_last:
        return _ring(compare, _shift(travelling, axes, -1), merge, axes, own=True, own_last=True)
    home, away = _ring(compare, travelling, merge, axes, own=True, own_last=False)
    return home, _shift(away, axes, 1)


def _ring(
    compare: Compare, travelling: Any, merge: Merge, axes: tuple[str, ...], *, own: bool, own_last: bool
) -> tuple[Any, Any]:
    """One trip along all axes, from the own block to the furthest one or, with `own_last`, back.

    `away` is left where its block is compared last: at its owner, or without `own_last` one hop short along every axis.
    `own` is whether the trip includes the own block.
    """
    if not axes:
        return compare(travelling, own)
    size, inner = lax.axis_size(axes[0]), axes[1:]

    def visit(travelling: Any, own: bool) -> tuple[Any, Any]:
        return _ring(compare, travelling, merge, inner, own=own, own_last=own_last)

    def hop(tree: Any) -> Any:
        return _shift(tree, axes[:1], -1 if own_last else 1)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        travelling, away, home = carry
        following, leaving = hop(travelling), hop(away)
        more_home, more_away = visit(travelling, False)
        # A step's hops and comparison belong together: a hop combined with one of the next step would start too late.
        return lax.optimization_barrier((following, merge(leaving, more_away), merge(home, more_home))), None

    following = hop(travelling)
    home, away = visit(travelling, own and not own_last)
    carry = lax.optimization_barrier((following, away, home))
    if size > 2:
        unroll = 1 if inner else min(size - 2, MAX_UNROLL)
        carry, _ = lax.scan(step, carry, length=size - 2, unroll=unroll)
    travelling, away, home = carry
    leaving = hop(away)
    more_home, more_away = visit(travelling, own and own_last)
    return merge(home, more_home), merge(leaving, more_away)


def _shift(tree: Any, axes: tuple[str, ...], by: int) -> Any:
    """Every device's arrays to the device whose coordinates along all of `axes` are larger by `by`."""
    if not axes:
        return tree
    sizes = tuple(lax.axis_size(axis) for axis in axes)
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    targets = np.asarray(np.ravel_multi_index(tuple(coordinates + by), sizes, mode="wrap"))
    return jax.tree.map(lambda a: lax.ppermute(a, axes, list(enumerate(targets.tolist()))), tree)


def forward(backend: Backend, block: Block, *, axis_name: AxisName | None, exclude: bool, columns: bool) -> Sums:
    """Sums of this device's rows over all columns, of its columns over all rows, and its rows' positives.

    Args:
      backend: compares one block.
      block: this device's rows and columns; its labels index into its own columns.
      axis_name: the ring's mesh axis (or axes, see `sweep`), None for one device.
      exclude: leave positives out.
      columns: whether column sums are asked for.
    """

    def compare(travelling: tuple, own: bool) -> tuple[tuple[LogSum, Array], LogSum | None]:
        part = backend.forward(_arrived(block, travelling, own), exclude=exclude, columns=columns)
        return (part.row, part.positive), part.column

    (row, positive), column = sweep(compare, _travelling(block), _merge, axis_name)
    return Sums(row, column, positive)


def backward(
    backend: Backend,
    block: Block,
    cotangents: Cotangents,
    *,
    axis_name: AxisName | None,
    exclude: bool,
    wanted: Wanted,
) -> Gradient:
    """Gradients of this device's rows, columns and scales; the columns' accumulators travel with the columns."""

    alone = axis_name is None or lax.axis_size(axis_name) == 1

    def compare(travelling: tuple, own: bool) -> tuple[Gradient, Gradient]:
        columns, statistics = travelling
        arrived = cotangents._replace(column=statistics[0], column_weight=statistics[1])
        # Contributions are added up in full precision; a whole gradient is rounded at once, without a copy.
        dtype = block.x.dtype if alone else accumulation_dtype(block.x.dtype)
        part = backend.backward(_arrived(block, columns, own), arrived, exclude=exclude, wanted=wanted, dtype=dtype)
        return part._replace(y=None, y_scale=None), part._replace(x=None, x_scale=None)

    travelling = (_travelling(block), (cotangents.column, cotangents.column_weight))
    home, away = sweep(compare, travelling, add_trees, axis_name, own_last=True)
    return Gradient(home.x, away.y, home.x_scale, away.y_scale)


def add_trees(a: Any, b: Any) -> Any:
    """Leaf by leaf sum of two pytrees."""
    return jax.tree.map(jnp.add, a, b)


def _travelling(block: Block) -> tuple:
    return block.y, block.y_scale, block.y_mask


def _arrived(block: Block, travelling: tuple, own: bool) -> Block:
    y, y_scale, y_mask = travelling
    return block._replace(y=y, y_scale=y_scale, y_mask=y_mask, labels=block.labels if own else None)


def _merge(a: Any, b: Any) -> Any:
    """Log-sum-exps are merged, everything else is added."""

    def is_log_sum(value: Any) -> bool:
        return isinstance(value, LogSum)

    return jax.tree.map(lambda a, b: a.merge(b) if is_log_sum(a) else a + b, a, b, is_leaf=is_log_sum)
