"""Backend around the fused GPU kernels.

A kernel call computes one window of a block (see `fused_windows`) from bf16 operands (see `fused_kernel_api` and
`fused_operands`). This module selects the max-shift and reduces the sums of the windows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32

from infcl_jax.ops.common.derivatives import first_derivative
from infcl_jax.ops.pairwise_lse.base import (
    Array,
    Block,
    Cotangents,
    Gradient,
    LogSum,
    NeedsGrad,
    Sums,
    constant,
    finite_shift,
    zero_gradients,
)
from infcl_jax.ops.pairwise_lse.chunking import loop_over_slices
from infcl_jax.ops.pairwise_lse.fused_gradients import Accumulators, GradientSweep, combine_rows, row_slices
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Kernels, Operands, Weights, Window
from infcl_jax.ops.pairwise_lse.fused_operands import LOG2E, Padded
from infcl_jax.ops.pairwise_lse.fused_positives import scale_gradients_by_id, sums_by_id, weights_by_id
from infcl_jax.ops.pairwise_lse.fused_windows import WindowConfig
from infcl_jax.ops.pairwise_lse.stabilization import factor, is_shared, shared_shift, shifted_log_sum, within_range

# Rows whose positives are gathered at a time: 32 MiB in bf16 for 512 features.
POSITIVE_ROWS = 1 << 15


@dataclasses.dataclass(frozen=True)
class Fused:
    """Backend around fused GPU kernels.

    Attributes:
      kernels: kernels of the default device.
      windows: limits of window sizes on that device.
    """

    kernels: Kernels
    windows: WindowConfig = dataclasses.field(default_factory=WindowConfig)

    def forward(self, block: Block, *, exclude: bool, columns: bool) -> Sums:
        """Implement `base.Backend.forward`."""
        block = first_derivative(block)
        padded = Padded.of(block, self.kernels)
        bx, by = block.x.shape[0], block.y.shape[0]
        scale_shifts = shared_shift(block.x_scale), None if block.y_scale is None else shared_shift(block.y_scale)
        row, column = self._sweep(padded.operands(block, *scale_shifts), padded, exclude, columns)
        shifts = scale_shifts
        if not is_shared(block):
            # Two more sweeps, with the maxima of the exponents as shifts, only if a sum is not exact.
            exact = within_range(row[:bx], block.x_mask, by)
            if columns:
                exact &= within_range(column[:by], block.y_mask, bx)
            row, column, *shifts = lax.cond(
                exact,
                lambda: (row, column, *scale_shifts),
                lambda: self._max_shifted_sums(block, padded, exclude, columns),
            )
        elif columns:
            shifts = scale_shifts[0], scale_shifts[0]
        by_id = (None, None) if block.x_ids is None else sums_by_id(self.kernels, block, padded, columns=columns)
        return Sums(
            shifted_log_sum(shifts[0], row[:bx]),
            shifted_log_sum(shifts[1], column[:by]) if columns else None,
            label_similarities(self.kernels, block, padded),
            *by_id,
        )

    def accumulators(self, block: Block, needs_grad: NeedsGrad, dtype: jnp.dtype) -> Gradient:
        """Implement `base.Backend.accumulators`, with padding.

        The gradient of a shared scale has no accumulator, but needs that of x or y (see `gradient`).
        """
        shared = is_shared(block)
        padded = Padded.of(block, self.kernels)
        x = needs_grad.x or (shared and needs_grad.x_scale and not needs_grad.y)
        stored = NeedsGrad(x, needs_grad.y, needs_grad.x_scale and not shared, needs_grad.y_scale)
        x_term, y_term = (a[:, : padded.width] for a in (padded.x, padded.y))
        acc = zero_gradients(x_term, y_term, block.x_scale, block.y_scale, stored, dtype)
        return acc._replace(x=row_slices(acc.x, padded, self.windows, self.kernels.tile[0]))

    def backward(self, block: Block, cotangents: Cotangents, acc: Gradient, *, exclude: bool) -> Gradient:
        """Implement `base.Backend.backward`."""
        block = first_derivative(block)
        padded = Padded.of(block, self.kernels)
        row_factor, column_factor = factor(cotangents.row, cotangents.d_row), None
        if cotangents.column is not None:
            column_factor = factor(cotangents.column, cotangents.d_column)
        if is_shared(block):
            operands = padded.operands(block, shared_shift(block.x_scale), None)
            scales = block.x_scale, block.x_scale
        else:
            operands = padded.operands(block, _finite_shift(cotangents.row), _finite_shift(cotangents.column))
            scales = block.x_scale, block.y_scale
        weights = Weights(
            scales[0] * row_factor,
            None if column_factor is None else scales[1] * column_factor,
            None if block.labels is None else cotangents.d_positive,
            None if block.x_ids is None else weights_by_id(block, cotangents),
        )
        moments = acc.x_scale is not None or acc.y_scale is not None
        sizes = self.windows.gradients(
            (padded.x.shape[0], padded.y.shape[0]),
            acc.x[0].shape[0] if acc.x else padded.x.shape[0],
            padded.width,
            self.kernels.tile,
            fp32=padded.num_terms > 1,
            fp32_accumulators=any(a.dtype == jnp.float32 for a in jax.tree.leaves((acc.x, acc.y))),
        )
        sweep = GradientSweep(self.kernels, padded, operands, padded.weights(weights), sizes, exclude, moments)
        grads = sweep.add_to(Accumulators(acc.x, acc.y))
        acc = acc._replace(x=grads.x, y=grads.y)
        needs = {"x_scale": acc.x_scale is not None, "y_scale": acc.y_scale is not None}
        if acc.x_scale is not None:
            acc = acc._replace(x_scale=acc.x_scale + grads.row_moment[: padded.bx] * row_factor)
        if acc.y_scale is not None:
            acc = acc._replace(y_scale=acc.y_scale + grads.column_moment[: padded.by] * column_factor)
        if block.x_ids is None or not moments:
            return acc
        x_scale, y_scale = scale_gradients_by_id(self.kernels, block, padded, cotangents, **needs)
        return acc._replace(
            x_scale=None if x_scale is None else acc.x_scale + x_scale,
            y_scale=None if y_scale is None else acc.y_scale + y_scale,
        )

    def gradient(self, block: Block, cotangents: Cotangents, acc: Gradient, needs_grad: NeedsGrad) -> Gradient:
        """Implement `base.Backend.gradient`.

        The gradient of a shared scale is computed from a feature gradient.
        """
        padded = Padded.of(block, self.kernels)
        scale, x_scale = block.x_scale, acc.x_scale
        if acc.x is not None:
            acc = acc._replace(x=jnp.concatenate(acc.x))
        if needs_grad.x_scale and is_shared(block):
            # The gradient of the scale is sum_ij dS_ij s_ij / scale, without the terms of the positives by label.
            features, d = (padded.x, acc.x) if acc.x is not None else (padded.y, acc.y)
            x_scale = padded.dot(features, d)
            if block.labels is not None:
                in_block = (block.labels >= 0) & (block.labels < block.y.shape[0])
                positive = jnp.where(
                    in_block, cotangents.d_positive * cotangents.positive, jnp.zeros_like(in_block, scale.dtype)
                )
                x_scale = x_scale - positive.sum()
            x_scale = x_scale / scale
        return Gradient(
            acc.x[: padded.bx, : padded.features] if needs_grad.x else None,
            acc.y[: padded.by, : padded.features] if needs_grad.y else None,
            x_scale,
            acc.y_scale,
        )

    def _max_shifted_sums(self, block: Block, padded: Padded, exclude: bool, columns: bool) -> tuple[Array | None, ...]:
        """Compute row and column sums with per-row and per-column maxima as shifts.

        Returns the sums and the shifts, in nats.
        """
        unshifted = padded.operands(block, jnp.zeros_like(block.x_scale), jnp.zeros_like(block.y[:, 0], jnp.float32))
        maxima = self._sweep(unshifted, padded, exclude, columns, maxima=True)
        shifts = [None if a is None else finite_shift(a) / LOG2E for a in maxima]  # base 2 to nats
        shifts = [None if a is None else a[:n] for a, n in zip(shifts, (padded.bx, padded.by), strict=True)]
        row, column = self._sweep(padded.operands(block, *shifts), padded, exclude, columns)
        return row, column, *shifts

    def _sweep(
        self, operands: Operands, padded: Padded, exclude: bool, columns: bool, maxima: bool = False
    ) -> tuple[Float32[Array, "bx"], Float32[Array, "by"] | None]:
        """Compute all row and column sums, or maxima, window by window."""
        combine = jnp.maximum if maxima else jnp.add
        init = -jnp.inf if maxima else 0.0
        rows, cols = operands.x.shape[0], operands.y.shape[0]
        window_rows, window_columns = self.windows.sums(rows, cols, padded.width, len(padded.pairs), self.kernels.tile)

        def add_rows(row: Array, count: int, carry: tuple) -> tuple:
            def add_window(column: Array, width: int, carry: tuple) -> tuple:
                window = Window(row, column, count, width)
                window_sums = self.kernels.sums(
                    operands, window, padded.pairs, exclude=exclude, columns=columns, maxima=maxima
                )
                return tuple(
                    None if acc is None else combine_rows(combine, acc, update, first)
                    for acc, update, first in zip(carry, window_sums, (row, column), strict=True)
                )

            return loop_over_slices(cols, window_columns, add_window, carry)

        accs = tuple(
            constant((n,), init, jnp.float32, varying_like=operands.x) if needed else None
            for n, needed in ((rows, True), (cols, columns))
        )
        return loop_over_slices(rows, window_rows, add_rows, accs)


def _finite_shift(sums: LogSum | None) -> Array | None:
    return None if sums is None else finite_shift(sums.shift)


def label_similarities(kernels: Any, block: Block, padded: Padded) -> Float32[Array, "bx"]:
    """Compute each row's similarity with its positive by label, 0 if it is in another block.

    Args:
      kernels: object with the method `Kernels.positives`.
      block: the block whose features are padded.
      padded: padded features.
    """
    bx, by = block.x.shape[0], block.y.shape[0]
    if block.labels is None:
        return jnp.zeros_like(block.x[:, 0], jnp.float32)
    labels = padded.labels(block)
    padded_rows = padded.x.shape[0]
    size = min(padded_rows, POSITIVE_ROWS)
    positive = constant((padded_rows,), 0, jnp.float32, varying_like=padded.x)

    def rows(first: Array, count: int, positive: Array) -> Array:
        x = lax.dynamic_slice_in_dim(padded.x, first, count)
        row_labels = lax.dynamic_slice_in_dim(labels, first, count)
        update = kernels.positives(x, jnp.take(padded.y, row_labels, axis=0, mode="clip"), padded.pairs)
        return lax.dynamic_update_slice_in_dim(positive, update, first, 0)

    positive = loop_over_slices(padded_rows, size, rows, positive)[:bx] * padded.gain
    return jnp.where((block.labels >= 0) & (block.labels < by), positive, jnp.zeros_like(positive))
