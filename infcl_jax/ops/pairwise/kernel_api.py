"""Contract between the fused backends and their GPU kernels.

Operands are in bf16, exponents in base 2.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float, Float32, Int32

from infcl_jax.ops.pairwise.base import Array

# Rows per label range. A tile whose columns are outside the ranges of its rows skips the comparison with labels.
LABEL_RANGE_ROWS = 64

# Pairs (bf16 term of the left operand, bf16 term of the right operand) whose GEMMs are summed.
Pairs = tuple[tuple[int, int], ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["row", "column"], meta_fields=["rows", "columns"])
@dataclasses.dataclass(frozen=True)
class Window:
    """Row and column range of a block that one kernel call computes.

    Attributes:
      row: first row, an int32 scalar.
      column: first column, an int32 scalar.
      rows: number of rows, static.
      columns: number of columns, static.
    """

    row: Array
    column: Array
    rows: int
    columns: int


class Kernels(Protocol):
    """GPU kernels of one loss; all results are bitwise reproducible.

    A loss defines the named tuples of their operands and weights. Operands begin with `x` `[bx, num_terms * K]` and `y`
    `[by, num_terms * K]`, the concatenated bf16 terms of the features. Similarities `s_ij` are the fp32 sums of the
    GEMMs over `pairs` of these terms.
    """

    @property
    def tile(self) -> tuple[int, int]:
        """Row and column multiples of every window."""

    @property
    def depth(self) -> int:
        """Multiple to which K is padded."""

    def sums(self, operands: Any, window: Window, pairs: Any, **options: bool) -> tuple[Any, Any]:
        """Compute the sums of a window, of its rows `[rows]` and of its columns `[columns]`, fp32.

        `options` depend on the loss. Sums that are not needed are None.
        """

    def ds(
        self, operands: Any, weights: Any, window: Window, pairs: Any, *, terms: int, moments: bool, **options: bool
    ) -> tuple[BFloat16[Array, "{window.rows} {terms*window.columns}"], Any, Any]:
        """Compute a window of dS = dL / ds, and moments if `moments`.

        Returns:
          dS as `terms` concatenated bf16 terms `[rows, terms * columns]`, and the moments of rows `[rows, *]` and of
          columns `[columns]`, fp32 sums for the gradients of scales and biases, or None.
        """

    def positives(
        self, x: BFloat16[Array, "rows k"], y: BFloat16[Array, "rows k"], pairs: Pairs
    ) -> Float32[Array, "rows"]:
        """Compute `s_ii` fp32 `[rows]`, bitwise equal to the other kernels' values."""


def row_ranges(
    labels: Int32[Array, "rows"], last: Int32[Array, "rows"], size: int
) -> tuple[Int32[Array, "ranges"], Int32[Array, "ranges"]]:
    """Return the lowest of `labels` other than -1, and the highest of `last`, of each range of `size` rows."""
    labels = labels.reshape(-1, size)
    valid = jnp.where(labels < 0, jnp.full_like(labels, jnp.iinfo(jnp.int32).max), labels)
    return valid.min(1), last.reshape(-1, size).max(1)


def term_width(x: Float[Array, "rows k"], pairs: Pairs) -> int:
    """Return the padded number of features K of operands `[bx, num_terms * K]`."""
    return x.shape[1] // (1 + max(p for p, _ in pairs))
