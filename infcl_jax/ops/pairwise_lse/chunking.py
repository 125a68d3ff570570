"""Going through a block strip by strip of rows, in plain JAX."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from infcl_jax.ops.pairwise_lse.base import Array

# Rows of one strip: large enough for a full-rate product, and a workspace that is linear in the number of columns.
STRIP_ROWS = 512


def scan_strips(strip: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any, strip_rows: int | None) -> Any:
    """`lax.scan` of `strip(carry, rows_of_strip) -> (carry, per_row_results)` over equal strips.

    Args:
      strip: what to do with one strip.
      carry: its initial carry.
      rows: pytree of arrays with the rows on their first axis. Where strips do not divide them, the last one is padded
        with zeros, masks among them with False: see `padding_mask`.
      strip_rows: most rows of one strip; None for one strip.

    Returns:
      `(carry, per-row results of all strips, without padding)`.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    strips, size = _division(count, strip_rows)
    if strips == 1:
        return strip(carry, rows)

    def split(a: Array) -> Array:
        a = jnp.pad(a, ((0, strips * size - count),) + ((0, 0),) * (a.ndim - 1))
        return a.reshape(strips, size, *a.shape[1:])

    carry, results = lax.scan(strip, carry, jax.tree.map(split, rows))
    return carry, jax.tree.map(lambda a: a.reshape(strips * size, *a.shape[2:])[:count], results)


def march(total: int, size: int, step: Callable[[Array, int, Any], Any], carry: Any) -> Any:
    """`carry = step(first, count, carry)` for one part of `size` (static) after the other, and for the rest."""
    full, rest = divmod(total, size)
    if full == 1:
        carry = step(jnp.int32(0), size, carry)
    elif full:
        carry = lax.fori_loop(0, full, lambda i, carry: step(i * size, size, carry), carry)
    return step(jnp.int32(full * size), rest, carry) if rest else carry


def written(whole: Array, part: Array, first: Array) -> Array:
    """`whole` with `part` in its place from row `first` on, in the dtype of `whole`."""
    part = part.astype(whole.dtype)
    return part if whole.shape == part.shape else lax.dynamic_update_slice_in_dim(whole, part, first, 0)


def padding_mask(mask: Array | None, count: int, strip_rows: int | None) -> Array | None:
    """The rows' mask, made where there is none but `scan_strips` will pad."""
    strips, size = _division(count, strip_rows)
    return jnp.ones(count, bool) if mask is None and strips * size != count else mask


def valid_pairs(x_mask: Array | None, y_mask: Array | None, pairs: Array | None = None) -> Array | None:
    """Which pairs `[rows, columns]` count, from a mask of rows, of columns and of pairs; None when all do."""
    parts = [None if x_mask is None else x_mask[:, None], None if y_mask is None else y_mask[None, :], pairs]
    valid = None
    for part in parts:
        if part is not None:
            valid = part if valid is None else valid & part
    return valid


def is_positive(labels: Array, y: Array) -> Array:
    """Bool `[rows, columns]`: which column is the row's positive."""
    return labels[:, None] == jnp.arange(y.shape[0], dtype=labels.dtype)[None, :]


def positives(s: Array, labels: Array) -> Array:
    """Each row's similarity with its positive `[rows]` out of `s` `[rows, columns]`; 0 where that is not a column."""
    chosen = jnp.take_along_axis(s, labels[:, None], axis=1, mode="clip")[:, 0]
    return jnp.where((labels >= 0) & (labels < s.shape[1]), chosen, jnp.zeros_like(chosen))


def _division(count: int, strip_rows: int | None) -> tuple[int, int]:
    """Number of strips and rows of each, as equal as can be."""
    strips = 1 if strip_rows is None else max(1, math.ceil(count / strip_rows))
    return strips, math.ceil(count / strips)
