"""The ring: columns travel round the mesh axis, rows stay, and no device ever holds more than one block of features.

Cheng et al., "Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss" (Inf-CL), section
3.3, with both directions in one trip. Only `shard_map`-level collectives here; the comparison itself is the backend's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from infcl_jax.pairwise.tiles import Array, AxisName, Backend, Block, Cotangents, Gradient, LogSum, Sums, Wanted

# Straight-line code lets the scheduler put a hop under the previous comparison; longer rings are unrolled in pieces.
MAX_UNROLL = 16


def sweep(
    compare: Callable[[Any, bool], tuple[Any, Any]],
    travelling: Any,
    merge: Callable[[Any, Any], Any],
    axis_name: AxisName | None,
) -> tuple[Any, Any]:
    """Shows every device's `travelling` to every device and merges what they make of it.

    Args:
      compare: `compare(travelling, own) -> (home, away)`: contributions that stay on this device, and contributions
        that belong to the owner of `travelling`. `own` (static) is True on the first step, when this device owns it.
      travelling: pytree of this device's arrays.
      merge: associative merge of two contributions of the same structure.
      axis_name: mesh axis (or axes) of the ring; None for a single device.

    Returns:
      `(home, away)`: all contributions, each merged on the device where it belongs.
    """
    home, away = compare(travelling, True)
    devices = 1 if axis_name is None else lax.axis_size(axis_name)
    if devices == 1:
        return home, away

    def hop(tree: Any) -> Any:
        to_next = [(i, (i + 1) % devices) for i in range(devices)]
        return jax.tree.map(lambda a: lax.ppermute(a, axis_name, to_next), tree)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        travelling, home, away = carry
        # What the previous step found travels while this step compares: the comparison does not depend on it.
        travelling, away = hop(travelling), hop(away)
        more_home, more_away = compare(travelling, False)
        return (travelling, merge(home, more_home), merge(away, more_away)), None

    carry = (travelling, home, away)
    (_, home, away), _ = lax.scan(step, carry, length=devices - 1, unroll=min(devices - 1, MAX_UNROLL))
    return home, hop(away)


def forward(backend: Backend, block: Block, *, axis_name: AxisName | None, exclude: bool, columns: bool) -> Sums:
    """Sums of this device's rows over all columns, of its columns over all rows, and its rows' positives.

    Args:
      backend: compares one block.
      block: this device's rows and columns; its labels index into its own columns.
      axis_name: the ring's mesh axis, None for one device.
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

    def compare(travelling: tuple, own: bool) -> tuple[Gradient, Gradient]:
        columns, statistics = travelling
        arrived = cotangents._replace(column=statistics[0], column_weight=statistics[1])
        part = backend.backward(_arrived(block, columns, own), arrived, exclude=exclude, wanted=wanted)
        return part._replace(y=None, y_scale=None), part._replace(x=None, x_scale=None)

    travelling = (_travelling(block), (cotangents.column, cotangents.column_weight))
    home, away = sweep(compare, travelling, add_trees, axis_name)
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
