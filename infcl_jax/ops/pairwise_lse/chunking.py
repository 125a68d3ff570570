"""Loops over the rows of a block, in plain JAX.

A strip is a range of rows whose similarities with all columns of the block are in memory at once.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int32, Shaped

from infcl_jax.ops.pairwise_lse.base import Array

# Rows of one strip: enough for full GEMM throughput, with a workspace linear in the number of columns.
STRIP_ROWS = 512


def scan_strips(strip: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any, strip_rows: int | None) -> Any:
    """Scan `strip(carry, rows_of_strip) -> (carry, per_row_results)` over equal strips.

    Args:
      strip: function of the carry and the rows of one strip.
      carry: initial carry.
      rows: pytree of arrays with rows on the first axis. If strips do not divide the rows, the last strip is padded
        with zeros. A mask is thus padded with False, see `padding_mask`.
      strip_rows: maximum rows of one strip; None for a single strip.

    Returns:
      `(carry, per-row results of all strips, without padding)`.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    strips, size = _strip_count_and_rows(count, strip_rows)
    if strips == 1:
        return strip(carry, rows)

    def split(a: Array) -> Array:
        a = jnp.pad(a, ((0, strips * size - count),) + ((0, 0),) * (a.ndim - 1))
        return a.reshape(strips, size, *a.shape[1:])

    carry, results = lax.scan(strip, carry, jax.tree.map(split, rows))
    return carry, jax.tree.map(lambda a: a.reshape(strips * size, *a.shape[2:])[:count], results)


def loop_over_slices(length: int, size: int, step: Callable[[Array, int, Any], Any], carry: Any) -> Any:
    """Run `carry = step(first, count, carry)` over slices of `length` rows.

    `count` is static: `size`, or the remainder in the last slice.
    """
    full, rest = divmod(length, size)
    if full == 1:
        carry = step(jnp.int32(0), size, carry)
    elif full:
        carry = lax.fori_loop(0, full, lambda i, carry: step(i * size, size, carry), carry)
    return step(jnp.int32(full * size), rest, carry) if rest else carry


def update_rows(
    array: Shaped[Array, "n *rest"], rows: Shaped[Array, "_ *rest"], first: Int32[Array, ""]
) -> Shaped[Array, "n *rest"]:
    """Write `rows` into `array` from row `first` on, in the dtype of `array`."""
    rows = rows.astype(array.dtype)
    return rows if array.shape == rows.shape else lax.dynamic_update_slice_in_dim(array, rows, first, 0)


def padding_mask(
    mask: Bool[Array, "{count}"] | None, count: int, strip_rows: int | None
) -> Bool[Array, "{count}"] | None:
    """Return the row mask; create one if `scan_strips` pads the rows."""
    strips, size = _strip_count_and_rows(count, strip_rows)
    return jnp.ones(count, bool) if mask is None and strips * size != count else mask


def valid_pairs(
    x_mask: Bool[Array, "rows"] | None,
    y_mask: Bool[Array, "columns"] | None,
    pairs: Bool[Array, "rows columns"] | None = None,
) -> Bool[Array, "#rows #columns"] | None:
    """Combine row, column and pair masks into a mask `[rows, columns]`.

    Returns None if all pairs are valid.
    """
    masks = [None if x_mask is None else x_mask[:, None], None if y_mask is None else y_mask[None, :], pairs]
    valid = None
    for mask in masks:
        if mask is not None:
            valid = mask if valid is None else valid & mask
    return valid


def is_positive(labels: Int32[Array, "rows"], y: Shaped[Array, "columns d"]) -> Bool[Array, "rows columns"]:
    """Return bool `[rows, columns]`, True at each row's positive."""
    return labels[:, None] == jnp.arange(y.shape[0], dtype=labels.dtype)[None, :]


def positives(s: Float[Array, "rows columns"], labels: Int32[Array, "rows"]) -> Float[Array, "rows"]:
    """Gather each row's positive `[rows]` from `s` `[rows, columns]`.

    The result is 0 for labels that are not a column of `s`.
    """
    chosen = jnp.take_along_axis(s, labels[:, None], axis=1, mode="clip")[:, 0]
    return jnp.where((labels >= 0) & (labels < s.shape[1]), chosen, jnp.zeros_like(chosen))


def _strip_count_and_rows(count: int, strip_rows: int | None) -> tuple[int, int]:
    """Return the number of strips and the rows of one strip.

    Strips are as equal as possible; the last one may need padding.
    """
    strips = 1 if strip_rows is None else max(1, math.ceil(count / strip_rows))
    return strips, math.ceil(count / strips)
