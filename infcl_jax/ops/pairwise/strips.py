"""Backends in plain XLA that loop over strips of rows.

A strip is a range of rows whose similarities with all columns of the block are in memory at once.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int32, Shaped

from infcl_jax.ops.pairwise.base import (
    Array,
    accumulation_dtype,
    accumulator_bytes,
    matmul,
    similarity_bytes,
    zero_gradients,
)

# Rows of one strip: enough for full GEMM throughput, with a workspace linear in the number of columns.
STRIP_ROWS = 512


@dataclasses.dataclass(frozen=True)
class Strips:
    """Common part of the backends in plain XLA; see `base.Backend`.

    Attributes:
      rows: rows of one strip, so that `rows * by` similarities are in memory; None: one strip for the whole block.
    """

    rows: int | None = STRIP_ROWS

    def accumulators(self, block: Any, needs_grad: Any, dtype: jnp.dtype) -> Any:
        """Implement `base.Backend.accumulators`."""
        return zero_gradients(block, needs_grad, dtype)

    def gradient(self, block: Any, cotangents: Any, acc: Any, needs_grad: Any) -> Any:
        """Implement `base.Backend.gradient`."""
        return acc

    def workspace_bytes(self, rows: int, width: int, dtype: Any, devices: int) -> int:
        """Bytes of one strip of a square block, and of the block's fp32 gradients."""
        strip_rows = rows if self.rows is None else min(self.rows, rows)
        return similarity_bytes(strip_rows, rows) + accumulator_bytes(rows, width)

    def add_gradients(
        self, pair_gradients: Callable[[Any], tuple[Array, tuple]], block: Any, rows: Any, acc: Any
    ) -> Any:
        """Add the gradients of a block to `acc`, in whose dtypes they are rounded once.

        Args:
          pair_gradients: `pair_gradients(rows_of_strip)` returns dS `[rows, by]` in the accumulation dtype, and the
            terms `[rows, by]` whose sums are the gradients of the scalars.
          block: block of the loss.
          rows: pytree of rows with the features `x`, see `scan_strips`.
          acc: accumulators; those that are None are not computed.
        """

        def strip(carry: Any, rows: Any) -> tuple[Any, Array | None]:
            d_s, terms = pair_gradients(rows)
            d_s = d_s.astype(block.x.dtype)
            y = None if carry.y is None else carry.y + matmul(d_s, rows.x, contract=(0, 0))
            scalars = (None if a is None else a + term.sum() for a, term in zip(carry[2:], terms, strict=True))
            return type(acc)(None, y, *scalars), None if acc.x is None else matmul(d_s, block.y, contract=(1, 0))

        y = None if acc.y is None else jnp.zeros_like(acc.y, accumulation_dtype(block.x.dtype))
        carry, d_x = scan_strips(strip, acc._replace(x=None, y=y), rows, self.rows)
        return carry._replace(
            x=None if acc.x is None else acc.x + d_x.astype(acc.x.dtype),
            y=None if acc.y is None else acc.y + carry.y.astype(acc.y.dtype),
        )

    def padding_mask(self, block: Any) -> Bool[Array, "bx"] | None:
        """Return the row mask of a block; create one if `scan_strips` pads the rows."""
        count = len(block.x)
        strips, size = _strip_count_and_rows(count, self.rows)
        return jnp.ones(count, bool) if block.x_mask is None and strips * size != count else block.x_mask


def scan_strips(strip: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any, strip_rows: int | None) -> Any:
    """Scan `strip(carry, rows_of_strip) -> (carry, per_row_results)` over equal strips.

    Args:
      strip: function of the carry and the rows of one strip.
      carry: initial carry.
      rows: pytree of arrays with rows on the first axis. If strips do not divide the rows, the last strip is padded
        with zeros. A mask is thus padded with False, see `Strips.padding_mask`.
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


def where_valid(valid: Bool[Array, "#rows #by"] | None, values: Float[Array, "rows by"]) -> Float[Array, "rows by"]:
    """Set the values of invalid pairs to zero; see `valid_pairs`."""
    return values if valid is None else jnp.where(valid, values, jnp.zeros_like(values))


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


def labels_from(labels: Int32[Array, "rows"] | None, first: int | None) -> Int32[Array, "rows"] | None:
    """Return labels relative to the column `first`; None if the columns contain no positives (`first` None)."""
    return labels if labels is None or first == 0 else None if first is None else labels - first


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
