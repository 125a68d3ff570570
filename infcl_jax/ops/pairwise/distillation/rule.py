"""Gradient rule of contrastive and distillation terms.

Student and teacher blocks rotate around the ring together. With the student's
logits `z_ij = scale * <image_i, text_j>` and the teacher's logits `t_ij` and softmax `p_ij` along a row:

    gap_i = sum_j p_ij (t_ij - z_ij) - log sum_j exp(t_ij)        KL(p_i || softmax(z_i)) = gap_i + log sum_j exp(z_ij)

Columns are alike. Backward forms all terms of `dL/dz_ij` of a pair in the accumulation dtype before it is rounded for
the products: two softmaxes that almost agree cancel, so rounding each of them first would leave only noise.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Bool

from infcl_jax.ops.pairwise.base import Array, Backend
from infcl_jax.ops.pairwise.distillation.block import (
    DistillationBlock,
    DistillationCotangents,
    DistillationGradient,
    DistillationSums,
    PairLogits,
    Side,
)
from infcl_jax.ops.pairwise.distillation.xla import DistillationStrips
from infcl_jax.ops.pairwise.gradient_rule import Loss
from infcl_jax.ops.pairwise.max_shift import within_range

# Rows of a strip of the general path around the fused kernels, which is rarely taken: 32 MiB for each fp32 array of
# 65,536 columns.
GENERAL_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Distillation(Loss):
    """`gradient_rule.Loss` of the log-sum-exps, positives and gaps of rows and columns."""

    folder = "distillation"
    gradient = DistillationGradient
    forward_mode = 'use implementation="dense", which JAX differentiates in every mode'
    other_derivatives = f'{Loss.other_derivatives}, or implementation="dense"'

    def results(self, block: DistillationBlock, sums: DistillationSums) -> PairLogits:
        """Return log-sum-exps, positives and gaps."""
        rows, positive, columns = sums
        return PairLogits(rows.negatives.log(), columns.negatives.log(), positive, rows.gap(), columns.gap())

    def cotangents(self, sums: DistillationSums, d_results: PairLogits) -> DistillationCotangents:
        """Join the sums with their cotangents."""
        rows = Side(sums.rows, d_results.row_negatives, d_results.row_gap)
        columns = Side(sums.columns, d_results.column_negatives, d_results.column_gap)
        return DistillationCotangents(rows, columns, d_results.positive)

    def exact(self, block: DistillationBlock, sums: DistillationSums, devices: int) -> Bool[Array, ""]:
        """Return whether the sums with shared max-shifts are exact."""
        exact = jnp.ones((), bool)
        for side in (sums.rows, sums.columns):
            for lse in (side.negatives, side.teacher):
                exact &= within_range(lse.sumexp, block.x_mask, len(block.x) * devices)
            difference = side.difference
            if block.x_mask is not None:
                difference = jnp.where(block.x_mask, difference, jnp.zeros_like(difference))
            exact &= jnp.isfinite(difference).all()
        return exact

    def general(self, backend: Backend, block: DistillationBlock) -> tuple[Backend, DistillationBlock]:
        """Return strips of rows without a limit of the exponentials' range."""
        return DistillationStrips(getattr(backend, "rows", GENERAL_ROWS), shared=False), block
