"""Order of rows and columns by id, for kernels that process positives by tile.

Sorted rows and columns have their positives in adjacent rows and columns. A kernel then finds the positives of a row in
one range of columns, and few tiles contain positives. Groups are in the order in which ids first occur, so that
rows and columns with unique, equal ids stay in place.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int32, Shaped

from infcl_jax.ops.pairwise_lse.base import FP32_BYTES, Array, Block
from infcl_jax.ops.pairwise_lse.positives import sort_key

# Number of 4-byte vectors `[rows]` that positives by id add to the backward pass: orders, ranges, sums of positives and
# weights of both sides. Fitted to XLA's memory analysis of `clip_loss` with 512 and 1,024 features.
NUM_VECTORS = 24


def order_bytes(rows: int) -> int:
    """Bytes of positives by id on each device, if the features are needed for the loss alone.

    The sorted features and their gradients then take the memory of the features and gradients in the caller's order.
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


def sort_block(block: Block) -> tuple[Block, Order, Order]:
    """Sort rows and columns of a block by group number.

    Returns:
      The block, and the orders of its rows and columns.
    """
    x_order, y_order = Order.by(block.x_ids), Order.by(block.y_ids)
    fields = {
        name: (x_order if name.startswith("x") else y_order).sort(array)
        for name, array in block._asdict().items()
        if name != "labels"
    }
    return Block(**fields), x_order, y_order


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
