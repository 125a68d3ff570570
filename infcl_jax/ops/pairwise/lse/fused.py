"""Fused backend of `pairwise_lse`: selection of the max-shift, and gradients of the scales."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, Int32

from infcl_jax.ops.common.derivatives import first_derivative
from infcl_jax.ops.pairwise.base import Array, LogSum, finite_shift
from infcl_jax.ops.pairwise.fused import Fused, label_similarities
from infcl_jax.ops.pairwise.fused_operands import LOG2E, Padded
from infcl_jax.ops.pairwise.kernel_api import Window
from infcl_jax.ops.pairwise.lse.block import LseBlock, LseCotangents, LseGradient, LseSums
from infcl_jax.ops.pairwise.lse.fused_positives import scale_gradients_by_id, sums_by_id, weights_by_id
from infcl_jax.ops.pairwise.lse.kernel_api import LseOperands, LseWeights, operands_of, padded_weights
from infcl_jax.ops.pairwise.max_shift import factor, shared_shift, shifted_log_sum, within_range


@dataclasses.dataclass(frozen=True)
class LseFused(Fused):
    """`base.Backend` around `LseKernels`.

    Attributes:
      exclude: leave the positives out of the sums.
      columns: whether to compute column sums.
    """

    exclude: bool = False
    columns: bool = True

    def guide(self, block: LseBlock) -> Padded | None:
        """Pad the guide's features of a block; None without a guide."""
        return None if block.x_guide is None else Padded.of(block.x_guide, block.y_guide, self.kernels)

    def own_similarities(self, block: LseBlock, own: Int32[Array, "bx"]) -> Float32[Array, "bx"]:
        """Return the guide's similarity of each row with the column `own`, as in the tiles."""
        return label_similarities(self.kernels, own, self.guide(block))

    def forward(self, block: LseBlock) -> LseSums:
        """Implement `base.Backend.forward`."""
        block = first_derivative(block)
        padded, guide = self.padded(block), self.guide(block)
        scale_shifts = shared_shift(block.x_scale), None if block.y_scale is None else shared_shift(block.y_scale)
        row, column = self._sums(operands_of(padded, guide, block, *scale_shifts), padded, guide)
        shifts = scale_shifts
        if not block.shared:
            # Two more sweeps, with the maxima of the exponents as shifts, only if a sum is not exact.
            exact = within_range(row[: padded.bx], block.x_mask, padded.by)
            if self.columns:
                exact &= within_range(column[: padded.by], block.y_mask, padded.bx)
            row, column, *shifts = lax.cond(
                exact, lambda: (row, column, *scale_shifts), lambda: self._max_shifted_sums(block, padded, guide)
            )
        elif self.columns:
            shifts = scale_shifts[0], scale_shifts[0]
        by_id: tuple = () if block.x_ids is None else sums_by_id(self.kernels, block, padded, columns=self.columns)
        return LseSums(
            shifted_log_sum(shifts[0], row[: padded.bx]),
            shifted_log_sum(shifts[1], column[: padded.by]) if self.columns else None,
            padded.gain * label_similarities(self.kernels, block.labels, padded),
            *by_id,
        )

    def accumulators(self, block: LseBlock, needs_grad: LseGradient, dtype: jnp.dtype) -> LseGradient:
        """Implement `base.Backend.accumulators`.

        The gradient of a shared scale has no accumulator, but needs that of x or y (see `gradient`).
        """
        x = needs_grad.x or (block.shared and needs_grad.x_scale and not needs_grad.y)
        stored = needs_grad._replace(x=x, x_scale=needs_grad.x_scale and not block.shared)
        return super().accumulators(block, stored, dtype)

    def backward(self, block: LseBlock, cotangents: LseCotangents, acc: LseGradient) -> LseGradient:
        """Implement `base.Backend.backward`."""
        block = first_derivative(block)
        padded, guide = self.padded(block), self.guide(block)
        row_factor, column_factor = factor(cotangents.row, cotangents.d_row), None
        if cotangents.column is not None:
            column_factor = factor(cotangents.column, cotangents.d_column)
        if block.shared:
            operands = operands_of(padded, guide, block, shared_shift(block.x_scale), None)
            scales = block.x_scale, block.x_scale
        else:
            shifts = _finite_shift(cotangents.row), _finite_shift(cotangents.column)
            operands = operands_of(padded, guide, block, *shifts)
            scales = block.x_scale, block.y_scale
        weights = LseWeights(
            scales[0] * row_factor,
            None if column_factor is None else scales[1] * column_factor,
            None if block.labels is None else cotangents.d_positive,
            None if block.x_ids is None else weights_by_id(block, cotangents),
        )
        weights = padded_weights(padded, weights)
        moments = acc.x_scale is not None or acc.y_scale is not None

        def ds(window: Window) -> tuple[Array, Array | None, Array | None]:
            options: dict[str, Any] = {"exclude": self.exclude, "terms": padded.num_ds_terms, "moments": moments}
            options |= _guide_options(guide)
            return self.kernels.ds(operands, weights, window, padded.pairs, **options)

        column_moment = moments and column_factor is not None
        acc, grads = self.add_windows(padded, acc, ds, () if moments else None, column_moment=column_moment)
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

    def gradient(
        self, block: LseBlock, cotangents: LseCotangents, acc: LseGradient, needs_grad: LseGradient
    ) -> LseGradient:
        """Implement `base.Backend.gradient`.

        The gradient of a shared scale is computed from a feature gradient.
        """
        grads = super().gradient(block, cotangents, acc, needs_grad)
        if needs_grad.x_scale and block.shared:
            # The gradient of the scale is sum_ij dS_ij s_ij / scale, without the terms of the positives by label.
            padded = self.padded(block)
            features, d = (padded.x, jnp.concatenate(acc.x)) if acc.x is not None else (padded.y, acc.y)
            x_scale = padded.dot(features, d)
            if block.labels is not None:
                in_block = (block.labels >= 0) & (block.labels < block.y.shape[0])
                zeros = jnp.zeros_like(in_block, block.x_scale.dtype)
                x_scale = x_scale - jnp.where(in_block, cotangents.d_positive * cotangents.positive, zeros).sum()
            grads = grads._replace(x_scale=x_scale / block.x_scale)
        return grads if needs_grad.x else grads._replace(x=None)

    def _max_shifted_sums(self, block: LseBlock, padded: Padded, guide: Padded | None) -> tuple[Array | None, ...]:
        """Compute row and column sums with per-row and per-column maxima as shifts.

        Returns the sums and the shifts, in nats.
        """
        zeros = jnp.zeros_like(block.y[:, 0], jnp.float32)
        operands = operands_of(padded, guide, block, jnp.zeros_like(block.x_scale), zeros)
        maxima = self._sums(operands, padded, guide, maxima=True)
        shifts = [None if a is None else finite_shift(a) / LOG2E for a in maxima]  # base 2 to nats
        shifts = [None if a is None else a[:n] for a, n in zip(shifts, (padded.bx, padded.by), strict=True)]
        row, column = self._sums(operands_of(padded, guide, block, *shifts), padded, guide)
        return row, column, *shifts

    def _sums(
        self, operands: LseOperands, padded: Padded, guide: Padded | None, *, maxima: bool = False
    ) -> tuple[Float32[Array, "bx"], Float32[Array, "by"] | None]:
        """Compute all row and column sums, or maxima, window by window."""
        sizes = self.windows.sums(len(padded.x), len(padded.y), padded.width, len(padded.pairs), self.kernels.tile)

        def sums(window: Window) -> tuple[Array, Array | None]:
            options: dict[str, Any] = {"exclude": self.exclude, "columns": self.columns, "maxima": maxima}
            options |= _guide_options(guide)
            return self.kernels.sums(operands, window, padded.pairs, **options)

        row, column = self.empty_sums(padded, -jnp.inf if maxima else 0.0)
        init = row, column if self.columns else None
        return self.reduce_windows(padded, sizes, sums, init, jnp.maximum if maxima else jnp.add)


def _guide_options(guide: Padded | None) -> dict[str, Any]:
    """Return the kernels' options of a guide."""
    return {} if guide is None else {"guide_pairs": guide.pairs}


def _finite_shift(sums: LogSum | None) -> Array | None:
    return None if sums is None else finite_shift(sums.shift)


BACKEND = LseFused
