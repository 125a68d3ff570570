"""Groups of rows and columns with equal ids, and their order for kernels that process positives by tile.

Sorting makes the rows and columns of positives adjacent. A kernel then finds the positives of a row in
one range of columns, and few tiles contain positives. Groups are in the order in which ids first occur, so that
rows and columns with unique, equal ids stay in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Int32, Shaped

from infcl_jax.ops.pairwise.base import FP32_BYTES, Array, AxisName, varying_over, zero_masked

# Number of 4-byte vectors `[rows]` that positives by id add to the backward pass: orders, ranges, sums of positives and
# weights of both sides. Fitted to XLA's memory analysis of `clip_loss` with 512 and 1,024 features.
NUM_VECTORS = 24


class Groups(NamedTuple):
    """Group numbers of this device's rows and columns.

    A pair with equal numbers is a positive. Numbers start at 1, so that rows padded with zeros match nothing. They are
    in the order in which ids first occur, columns before rows and devices by index. All fields are None without
    ids.

    Attributes:
      x: int32 `[bx]`, an even negative number for masked rows, see `sort_key`.
      y: int32 `[by]`, an odd negative number for masked columns.
      x_count: int32 `[bx]`, number of positives of each row over all devices.
      y_count: int32 `[by]`, number of positives of each column over all devices.
    """

    x: Array | None = None
    y: Array | None = None
    x_count: Array | None = None
    y_count: Array | None = None


def match_ids(
    x_ids: Int32[Array, "bx *k"],
    y_ids: Int32[Array, "by *k"],
    x_mask: Bool[Array, "bx"] | None,
    y_mask: Bool[Array, "by"] | None,
    axis_name: AxisName | None,
) -> Groups:
    """Number the distinct ids of all devices and count each row's and column's positives.

    Every device sorts the ids of all devices, a few bytes a row.

    Args:
      x_ids: int32 `[bx]` or `[bx, 2]`.
      y_ids: int32 `[by]` or `[by, 2]`.
      x_mask: bool `[bx]`, False for masked rows.
      y_mask: bool `[by]`, False for masked columns.
      axis_name: mesh axes of the batch; None for one device.
    """
    x_ids, y_ids, x_mask, y_mask = varying_over((x_ids, y_ids, x_mask, y_mask), axis_name)
    all_ids = [_gather(ids.reshape(len(ids), -1), axis_name) for ids in (y_ids, x_ids)]
    numbers = _numbers(jnp.concatenate(all_ids))
    y, x = jnp.split(numbers, [len(all_ids[0])])
    x_in_group, y_in_group = (
        jnp.zeros(len(numbers) + 1, jnp.int32)
        .at[group]
        .add(zero_masked(jnp.ones_like(group), _gather(mask, axis_name)))
        for group, mask in ((x, x_mask), (y, y_mask))
    )

    def own(group: Array, ids: Array) -> Array:
        """Return this device's group numbers."""
        if axis_name is None:
            return group
        return lax.dynamic_slice_in_dim(group, lax.axis_index(axis_name) * len(ids), len(ids))

    def masked(group: Array, mask: Array | None, odd: int) -> Array:
        return group if mask is None else jnp.where(mask, group, -2 * group - odd)

    x, y = own(x, x_ids), own(y, y_ids)
    counts = zero_masked(y_in_group[x], x_mask), zero_masked(x_in_group[y], y_mask)
    return Groups(masked(x, x_mask, 0), masked(y, y_mask, 1), *counts)


def _numbers(ids: Int32[Array, "n k"]) -> Int32[Array, "n"]:
    """Number the distinct rows of `ids` by their first occurrence, from 1."""
    order = jnp.lexsort(tuple(ids.T)).astype(jnp.int32)  # stable
    ordered = ids[order]
    is_first = jnp.concatenate([jnp.ones_like(order[:1], bool), (ordered[1:] != ordered[:-1]).any(1)])
    first = lax.cummax(jnp.where(is_first, jnp.arange(len(order), dtype=jnp.int32), jnp.zeros_like(order)))
    return jnp.zeros_like(ids[:, 0]).at[order].set(order[first] + 1)


def sort_key(group: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """Return sort keys of group numbers: even, or odd for masked rows and columns.

    Masked rows follow the others of their group.
    """
    return jnp.where(group < 0, -group | 1, 2 * group)


def _gather(array: Array | None, axis_name: AxisName | None) -> Array | None:
    return array if array is None or axis_name is None else lax.all_gather(array, axis_name, tiled=True)


def is_match(x_ids: Int32[Array, "rows"], y_ids: Int32[Array, "columns"]) -> Bool[Array, "rows columns"]:
    """Return bool `[rows, columns]`, True at the positives by id."""
    return x_ids[:, None] == y_ids[None, :]


def order_bytes(rows: int) -> int:
    """Bytes of positives by id on each device, if the features are needed for the loss alone.

    The sorted features and their gradients then reuse the memory of the arrays in the caller's order.
    """
    return NUM_VECTORS * rows * FP32_BYTES


class Order(NamedTuple):
    """Permutation of rows or columns.

    Attributes:
      rows: int32 `[n]`, row at each sorted position.
      positions: int32 `[n]`, sorted position of each row.
    """

    rows: Int32[Array, "n"]
    positions: Int32[Array, "n"]

    @classmethod
    def by(cls, group: Int32[Array, "n"]) -> "Order":
        """Return the stable order of group numbers."""
        rows = jnp.argsort(sort_key(group)).astype(jnp.int32)
        positions = jnp.zeros_like(rows).at[rows].set(jnp.arange(len(rows), dtype=jnp.int32), unique_indices=True)
        return cls(rows, positions)

    def sort(self, array: Shaped[Array, "*n"] | None) -> Shaped[Array, "*n"] | None:
        """Sort the rows of an array; None and scalars stay as they are."""
        return array if array is None or array.ndim == 0 else _permute(array, self.rows, self.positions)

    def restore(self, array: Shaped[Array, "n *rest"]) -> Shaped[Array, "n *rest"]:
        """Invert `sort`."""
        return _permute(array, self.positions, self.rows)


@jax.custom_vjp
def _permute(array: Array, rows: Array, positions: Array) -> Array:
    """Return `array[rows]`; its gradient is a permutation too, instead of a scatter."""
    return jnp.asarray(array).at[rows].get(mode="promise_in_bounds", unique_indices=True)


def _permute_forward(array: Array, rows: Array, positions: Array) -> tuple[Array, tuple[Array, Array]]:
    return _permute(array, rows, positions), (rows, positions)


def _permute_backward(order: tuple[Array, Array], cotangent: Array) -> tuple[Array, None, None]:
    rows, positions = order
    return _permute(cotangent, positions, rows), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def sort_block(block: Any) -> tuple[Any, Order, Order]:
    """Sort rows and columns of a block by group number.

    Returns:
      The block, and the orders of its rows and columns.
    """
    x_order, y_order = Order.by(block.x_ids), Order.by(block.y_ids)
    orders = {name: {"x": x_order, "y": y_order}.get(name[0]) for name in block._fields}
    return (
        block._replace(**{name: order.sort(getattr(block, name)) for name, order in orders.items() if order}),
        x_order,
        y_order,
    )


def ranges_by_id(
    rows: Int32[Array, "rows"], columns: Int32[Array, "columns"]
) -> tuple[Int32[Array, "rows"], Int32[Array, "rows"]]:
    """Return the first and the last column of each row's positives.

    Both are -1 for a row without a positive.

    Args:
      rows: group numbers of the rows, sorted.
      columns: group numbers of the columns, sorted.
    """
    keys, among = sort_key(rows), sort_key(columns)
    first, end = (
        jnp.searchsorted(among, keys, side=side, method="scan_unrolled").astype(jnp.int32) for side in ("left", "right")
    )
    none = (rows < 0) | (end <= first)
    return jnp.where(none, jnp.full_like(first, -1), first), jnp.where(none, jnp.full_like(end, -1), end - 1)
