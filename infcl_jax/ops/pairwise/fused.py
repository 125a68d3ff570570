"""Backend around the fused GPU kernels of a loss.

A kernel call computes one window of a block (see `fused_windows`) from bf16 operands (see `kernel_api` and
`fused_operands`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, Int32

from infcl_jax.ops.pairwise.base import Array, constant, zero_gradients
from infcl_jax.ops.pairwise.fused_gradients import Accumulators, GradientSweep, combine_rows, row_slices
from infcl_jax.ops.pairwise.fused_operands import Padded
from infcl_jax.ops.pairwise.fused_windows import WindowConfig
from infcl_jax.ops.pairwise.kernel_api import Kernels, Window
from infcl_jax.ops.pairwise.strips import loop_over_slices

# Rows whose positives are gathered at a time: 32 MiB in bf16 for 512 features.
POSITIVE_ROWS = 1 << 15


@dataclasses.dataclass(frozen=True)
class Fused:
    """Common part of the fused backends; see `base.Backend`.

    Attributes:
      kernels: kernels of the default device.
      windows: limits of window sizes on that device.
    """

    kernels: Any
    windows: WindowConfig = dataclasses.field(default_factory=WindowConfig)

    def padded(self, block: Any) -> Padded:
        """Pad the features of a block."""
        return Padded.of(block.x, block.y, self.kernels)

    def accumulators(self, block: Any, needs_grad: Any, dtype: jnp.dtype) -> Any:
        """Implement `base.Backend.accumulators`, with padding and row slices."""
        padded = self.padded(block)
        x_term, y_term = (a[:, : padded.width] for a in (padded.x, padded.y))
        acc = zero_gradients(block._replace(x=x_term, y=y_term), needs_grad, dtype)
        return acc._replace(x=row_slices(acc.x, padded, self.windows, self.kernels.tile[0]))

    def gradient(self, block: Any, cotangents: Any, acc: Any, needs_grad: Any) -> Any:
        """Implement `base.Backend.gradient`: join row slices and remove padding."""
        (rows, width), columns = block.x.shape, block.y.shape[0]
        return acc._replace(
            x=None if acc.x is None else jnp.concatenate(acc.x)[:rows, :width],
            y=None if acc.y is None else acc.y[:columns, :width],
        )

    def empty_sums(
        self, padded: Padded, value: float = 0.0
    ) -> tuple[Float32[Array, "rows"], Float32[Array, "columns"]]:
        """Return an empty sum of each row and of each column."""
        row, column = (constant((len(a),), value, jnp.float32, varying_like=padded.x) for a in (padded.x, padded.y))
        return row, column

    def reduce_windows(
        self,
        padded: Padded,
        sizes: tuple[int, int],
        sums: Callable[[Window], tuple[Any, Any]],
        init: tuple[Any, Any],
        combine: Callable[[Array, Array], Array] = jnp.add,
    ) -> tuple[Any, Any]:
        """Combine the sums of all windows of a block.

        Args:
          padded: features of the block.
          sizes: rows and columns of a window.
          sums: `sums(window)` returns the sums of rows and of columns, see `Kernels.sums`.
          init: empty sums of all rows and of all columns, of the same structure.
          combine: combination of two sums.
        """
        rows, columns = padded.x.shape[0], padded.y.shape[0]

        def add_rows(row: Array, count: int, accs: tuple) -> tuple:
            def add_window(column: Array, width: int, accs: tuple) -> tuple:
                updates = sums(Window(row, column, count, width))
                return tuple(
                    jax.tree.map(lambda a, u, first=first: combine_rows(combine, a, u, first), acc, update)
                    for acc, update, first in zip(accs, updates, (row, column), strict=True)
                )

            return loop_over_slices(columns, sizes[1], add_window, accs)

        return loop_over_slices(rows, sizes[0], add_rows, init)

    def add_windows(
        self,
        padded: Padded,
        acc: Any,
        ds: Callable[[Window], tuple[Array, Array | None, Array | None]],
        row_moment: tuple[int, ...] | None,
        *,
        column_moment: bool = False,
    ) -> tuple[Any, Accumulators]:
        """Add the features' gradients of all windows to the accumulators `acc`.

        For the other arguments see `GradientSweep`.

        Returns:
          The accumulators, and the moments of all rows and columns.
        """
        sizes = self.windows.gradients(
            (padded.x.shape[0], padded.y.shape[0]),
            acc.x[0].shape[0] if acc.x else padded.x.shape[0],
            padded.width,
            self.kernels.tile,
            fp32=padded.num_terms > 1,
            fp32_accumulators=any(a.dtype == jnp.float32 for a in jax.tree.leaves((acc.x, acc.y))),
        )
        grads = GradientSweep(ds, padded, sizes, row_moment, column_moment).add_to(Accumulators(acc.x, acc.y))
        return acc._replace(x=grads.x, y=grads.y), grads


def label_similarities(kernels: Kernels, labels: Int32[Array, "bx"] | None, padded: Padded) -> Float32[Array, "bx"]:
    """Compute each row's similarity with its positive by label as in the tiles, 0 if it is in another block.

    Args:
      kernels: kernels of the loss.
      labels: column of each row's positive; None for no positives.
      padded: features of the block.
    """
    if labels is None:
        return jnp.zeros_like(padded.x[: padded.bx, 0], jnp.float32)
    padded_labels = padded.labels(labels)
    padded_rows = padded.x.shape[0]
    size = min(padded_rows, POSITIVE_ROWS)
    positive = constant((padded_rows,), 0, jnp.float32, varying_like=padded.x)

    def rows(first: Array, count: int, positive: Array) -> Array:
        x = lax.dynamic_slice_in_dim(padded.x, first, count)
        row_labels = lax.dynamic_slice_in_dim(padded_labels, first, count)
        update = kernels.positives(x, jnp.take(padded.y, row_labels, axis=0, mode="clip"), padded.pairs)
        return lax.dynamic_update_slice_in_dim(positive, update, first, 0)

    positive = loop_over_slices(padded_rows, size, rows, positive)[: padded.bx]
    return jnp.where((labels >= 0) & (labels < padded.by), positive, jnp.zeros_like(positive))
