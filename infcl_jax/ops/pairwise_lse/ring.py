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

from infcl_jax.ops.pairwise_lse.base import (
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
    add_trees,
    round_up,
    zero_after,
)

# Straight-line code needs no copies between the steps; longer rings are unrolled in pieces.
MAX_UNROLL = 16
# A block's columns travel in so many panels at most, or fewer but at least two for products of so many columns; in
# multiples of some.
PANELS = 4
LARGE_PANEL = 4096
PANEL_COLUMNS = 256

Compare = Callable[[Any, bool], tuple[Any, Any]]
Merge = Callable[[Any, Any], Any]
Accumulate = Callable[[int, Any, Any, Any, bool], tuple[Any, Any]]


def sweep(compare: Compare, travelling: Any, merge: Merge, axis_name: AxisName | None) -> tuple[Any, Any]:
    """Shows every device's `travelling` to every device and merges what they make of it.

    While a device compares one block, the next one arrives and what the previous step found leaves. Only the last hop
    of what was found has no comparison beside it: for contributions that are small.

    Args:
      compare: `compare(travelling, own) -> (home, away)`: contributions that stay on this device, and contributions
        that belong to the owner of `travelling`. `own` (static) is True in the step in which this device owns it.
      travelling: pytree of this device's arrays.
      merge: associative merge of two contributions of the same structure.
      axis_name: mesh axis of the ring; or several, slowest links first; None for a single device.

    Returns:
      `(home, away)`: all contributions, each merged on the device where it belongs.
    """
    axes = ring_axes(axis_name)
    home, away = _sweep(compare, travelling, merge, axes, own=True)
    return home, _shift(away, axes, 1)


def _sweep(compare: Compare, travelling: Any, merge: Merge, axes: tuple[str, ...], *, own: bool) -> tuple[Any, Any]:
    """One trip along all axes, from the own block (if `own`) to the furthest one.

    `away` is left where its block is compared last: one hop short of its owner along every axis.
    """
    if not axes:
        return compare(travelling, own)
    size, inner = lax.axis_size(axes[0]), axes[1:]

    def visit(travelling: Any, own: bool) -> tuple[Any, Any]:
        return _sweep(compare, travelling, merge, inner, own=own)

    def hop(tree: Any) -> Any:
        return _shift(tree, axes[:1], 1)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        travelling, away, home = carry
        following, leaving = hop(travelling), hop(away)
        more_home, more_away = visit(travelling, False)
        # A step's hops and comparison belong together: a hop combined with one of the next step would start too late.
        return lax.optimization_barrier((following, merge(leaving, more_away), merge(home, more_home))), None

    following = hop(travelling)
    home, away = visit(travelling, own)
    carry = lax.optimization_barrier((following, away, home))
    if size > 2:
        unroll = 1 if inner else min(size - 2, MAX_UNROLL)
        carry, _ = lax.scan(step, carry, length=size - 2, unroll=unroll)
    travelling, away, home = carry
    leaving = hop(away)
    more_home, more_away = visit(travelling, False)
    return merge(home, more_home), merge(leaving, more_away)


def accumulate(
    compare: Accumulate, panels: list, home: Any, away: list, axis_name: AxisName | None
) -> tuple[Any, list]:
    """Shows every device's panels to every device, which adds to accumulators in place.

    For accumulators that are larger than what they belong to: they travel along with their panels, so that none is ever
    held beside a contribution to it. While a device compares one panel the next one arrives, and only that one is in
    memory twice. The own block comes last; only the first panel's first hop has no comparison beside it.

    Args:
      compare: `compare(i, panel, home, away, own) -> (home, away)` adds panel number `i` (static) to this device's
        accumulators and to those of the panel's owner. `own` (static) is True where this device is the owner.
      panels: pytrees of this device's arrays, one for each panel.
      home: pytree of this device's accumulators.
      away: pytrees of accumulators that belong to the panels, zeros.
      axis_name: mesh axis of the ring; or several, slowest links first; None for a single device.

    Returns:
      `(home, away)` with everyone's contributions, each on the device where it belongs.
    """
    axes = ring_axes(axis_name)
    if not axes:
        for i, panel in enumerate(panels):
            home, away[i] = compare(i, panel, home, away[i], True)
        return home, away
    first, *others = panels
    panels = [_shift(first, axes, -1), *_shift(others, axes[:-1], -1)]
    return _tour(compare, panels, home, away, axes, own=True)


def _tour(
    compare: Accumulate, panels: list, home: Any, away: list, axes: tuple[str, ...], *, own: bool
) -> tuple[Any, list]:
    """One trip along all axes, from the furthest block to the nearest one, which is the own one if `own`.

    The first panel starts where it is compared first, the others one hop along the last axis before. `away` is left
    where its block is compared last.
    """
    size, inner = lax.axis_size(axes[0]), axes[1:]
    if not inner:

        def visit(state: tuple, _: None) -> tuple[tuple, None]:
            return _step(compare, state, axes, own=False, last=False), None

        state, _ = lax.scan(visit, (panels, home, away), length=size - 1)
        return _step(compare, state, axes, own=own, last=True)[1:]
    nothing = jax.tree.map(jnp.zeros_like, away)

    def hop(tree: Any) -> Any:
        return _shift(tree, axes[:1], -1)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        panels, home, away = carry
        following, leaving = hop(panels), hop(away)
        home, more = _tour(compare, panels, home, nothing, inner, own=False)
        return (following, home, add_trees(leaving, more)), None

    following = hop(panels)
    home, away = _tour(compare, panels, home, nothing, inner, own=False)
    (panels, home, away), _ = lax.scan(step, (following, home, away), length=size - 2)
    leaving = hop(away)
    home, more = _tour(compare, panels, home, nothing, inner, own=own)
    return home, add_trees(leaving, more)


def _step(
    compare: Accumulate, state: tuple[list, Any, list], axes: tuple[str, ...], *, own: bool, last: bool
) -> tuple[list, Any, list]:
    """Compares every panel once; each arrives while the one before it is compared, the first one for the next step.

    The state is what `accumulate` is given: `(panels, home, away)`.
    """
    panels, home, away = list(state[0]), state[1], list(state[2])

    def fetch(i: int) -> None:
        panels[i], away[i] = _shift((panels[i], away[i]), axes, -1, number=i)

    for i, following in enumerate([*range(1, len(panels)), 0]):
        more, alone = following or not last, following == i
        if more and not alone:
            if i:  # one panel on its way at a time
                panels[following], away[following] = _after(away[i - 1], (panels[following], away[following]))
            fetch(following)
        if i:
            panels[i] = _after((home, away[i - 1]), panels[i])
        home, away[i] = compare(i, panels[i], home, away[i], own)
        if more and alone:
            fetch(i)
    return panels, home, away


def _after(done: Any, tree: Any) -> Any:
    """`tree`, whose matrices have to wait for `done`: a row is written onto itself at a place that comes from `done`.

    XLA would start all transfers at once and make one product of those of several panels.
    """
    if not jax.tree.leaves(done):
        return tree
    zero = zero_after(done)
    return jax.tree.map(lambda a: lax.dynamic_update_slice_in_dim(a, a[:1], zero, 0) if a.ndim > 1 else a, tree)


def split(tree: Any, axis_name: AxisName | None) -> list[tuple[int, Any]]:
    """What belongs to the columns of a block as panels, each with the number of its first column; alone as one."""
    if not ring_axes(axis_name):
        return [(0, tree)]
    columns = jax.tree.leaves(tree)[0].shape[0]
    width = panel_columns(columns)
    return [(n, jax.tree.map(lambda a, n=n: a[n : n + width], tree)) for n in range(0, columns, width)]


def panel_columns(columns: int) -> int:
    """Columns of a panel of a block with so many, fewer in the last one."""
    return min(columns, round_up(max(-(-columns // PANELS), min(-(-columns // 2), LARGE_PANEL)), PANEL_COLUMNS))


def ring_axes(axis_name: AxisName | None) -> tuple[str, ...]:
    """Mesh axes of a ring that have several devices, slowest links first."""
    axes = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    return tuple(axis for axis in axes if lax.axis_size(axis) > 1)


def _shift(tree: Any, axes: tuple[str, ...], by: int, number: int = 0) -> Any:
    """Every device's arrays to the device whose coordinates along all of `axes` are larger by `by`.

    XLA makes one transfer of shifts that list the same pairs of devices: those of different `number` stay apart.
    """
    if not axes:
        return tree
    sizes = tuple(lax.axis_size(axis) for axis in axes)
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    targets = np.asarray(np.ravel_multi_index(tuple(coordinates + by), sizes, mode="wrap"))
    pairs = np.roll(list(enumerate(targets.tolist())), number, axis=0).tolist()
    return jax.tree.map(lambda a: lax.ppermute(a, axes, pairs), tree)


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
        here = _arrived(block, travelling, block.labels if own else None)
        part = backend.forward(here, exclude=exclude, columns=columns)
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
    """Gradients of this device's rows, columns and scales; the columns' accumulators travel with the columns.

    Args:
      backend: compares one block.
      block: as for `forward`.
      cotangents: of this device's rows and columns.
      axis_name: as for `forward`.
      exclude: as for `forward`.
      wanted: which gradients.

    Returns:
      Those of the features in the accumulation dtype, or in their own on a single device.
    """
    alone = not ring_axes(axis_name)
    # What is added up hop by hop keeps full precision; a whole gradient is rounded at once, without a copy.
    into = backend.accumulators(block, wanted, block.x.dtype if alone else accumulation_dtype(block.x.dtype))
    travelling = _travelling(block), (cotangents.column, cotangents.column_weight), (into.y, into.y_scale)
    parts = split(travelling, axis_name)

    def compare(i: int, panel: tuple, home: Gradient, away: tuple, own: bool) -> tuple[Gradient, tuple]:
        columns, (column, column_weight) = panel
        here = _arrived(block, columns, block.labels - parts[i][0] if own else None)
        arrived = cotangents._replace(column=column, column_weight=column_weight)
        found = home._replace(y=away[0], y_scale=away[1])
        found = backend.backward(here, arrived, found, exclude=exclude)
        return found._replace(y=None, y_scale=None), (found.y, found.y_scale)

    panels, away = [part[:2] for _, part in parts], [part[2] for _, part in parts]
    home, away = accumulate(compare, panels, into._replace(y=None, y_scale=None), away, axis_name)
    d_y, d_y_scale = jax.tree.map(lambda *parts: jnp.concatenate(parts), *away)
    return backend.gradient(block, cotangents, home._replace(y=d_y, y_scale=d_y_scale), wanted)


def _travelling(block: Block) -> tuple:
    return block.y, block.y_scale, block.y_mask


def _arrived(block: Block, travelling: tuple, labels: Array | None) -> Block:
    y, y_scale, y_mask = travelling
    return block._replace(y=y, y_scale=y_scale, y_mask=y_mask, labels=labels)


def _merge(a: Any, b: Any) -> Any:
    """Log-sum-exps are merged, everything else is added."""

    def is_log_sum(value: Any) -> bool:
        return isinstance(value, LogSum)

    return jax.tree.map(lambda a, b: a.merge(b) if is_log_sum(a) else a + b, a, b, is_leaf=is_log_sum)
