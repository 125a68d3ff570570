"""Kernels of distillation for Ampere, Ada and Hopper GPUs: launch.

The accumulators of both models need twice the registers, hence a program has twice the warps. One program of a
128 x 128 tile then fits on an SM.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.distillation.kernel_api import (
    BothPairs,
    DistillationOperands,
    DistillationWeights,
    KernelSums,
)
from infcl_jax.ops.pairwise.kernel_api import Window
from infcl_jax.ops.pairwise.triton import Gemm, TritonKernels, kernels_of


@dataclasses.dataclass(frozen=True)
class DistillationTriton(TritonKernels):
    """`kernel_api.Kernels` for GPUs from Ampere to Hopper."""

    def sums(self, operands: DistillationOperands, window: Window, pairs: BothPairs) -> tuple[KernelSums, KernelSums]:
        """Implement `Kernels.sums`."""
        tiles_m, tiles_n = self.tiles(window)
        shapes = {"row": (tiles_n, window.rows), "column": (tiles_m, window.columns)}
        results = {
            f"{side}_{name}": jax.ShapeDtypeStruct(shape, jnp.float32)
            for side, shape in shapes.items()
            for name in KernelSums._fields
        }
        out = self._compute("sums", operands, {}, results, window, pairs)
        row, column = (KernelSums(*(out[f"{side}_{name}"].sum(0) for name in KernelSums._fields)) for side in shapes)
        return row, column

    def ds(
        self,
        operands: DistillationOperands,
        weights: DistillationWeights,
        window: Window,
        pairs: BothPairs,
        *,
        terms: int,
        moments: bool,
    ) -> tuple[BFloat16[Array, "{window.rows} {terms*window.columns}"], Float32[Array, "{window.rows}"] | None, None]:
        """Implement `Kernels.ds`."""
        results = {"ds": jax.ShapeDtypeStruct((window.rows, terms * window.columns), jnp.bfloat16)}
        given = {f"{name}_weight": w for name, w in weights._asdict().items()}
        if moments:
            shape = (self.tiles(window)[1], window.rows)
            results = {"moment": jax.ShapeDtypeStruct(shape, jnp.float32)} | results
        else:
            given["moment"] = None
        out = self._compute("ds", operands, given, results, window, pairs, terms)
        return out["ds"], out["moment"].sum(0) if moments else None, None

    def _compute(
        self,
        kernel: str,
        operands: DistillationOperands,
        given: dict[str, Array | None],
        results: dict[str, jax.ShapeDtypeStruct],
        window: Window,
        pairs: BothPairs,
        terms: int = 0,
    ) -> dict[str, Array]:
        """Compute all tiles of a window; partial results are per tile."""
        vectors = {name: a for name, a in operands._asdict().items() if name not in ("lowest", "highest")} | given
        other = Gemm.of(operands.teacher_x, pairs[1])
        settings = self.settings(operands.x, pairs[0], other=other, ds_terms=terms)
        name, num_warps = f"pairwise_distillation_{kernel}", 2 * self.config.num_warps
        kernel = getattr(kernels_of("distillation"), f"{kernel}_kernel")
        return self.compute_tiles(kernel, name, window, vectors, results, settings, num_warps)


KERNELS = DistillationTriton
