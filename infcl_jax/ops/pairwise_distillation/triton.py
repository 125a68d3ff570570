"""Fused Triton kernels of distillation, for Ampere, Ada and Hopper GPUs: launch.

Configuration, main loop and launch are those of `pairwise_lse`. The accumulators of both models need twice the
registers, hence a program has twice the warps. One program of a 128 x 128 tile then fits on an SM.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise_distillation.fused_kernel_api import BothPairs, KernelSums, Operands, Weights
from infcl_jax.ops.pairwise_lse.base import Array
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Window, term_width
from infcl_jax.ops.pairwise_lse.triton import TritonLauncher, load, pair_constants


@dataclasses.dataclass(frozen=True)
class TritonKernels(TritonLauncher):
    """`fused_kernel_api.Kernels` for GPUs from Ampere to Hopper."""

    def sums(self, operands: Operands, window: Window, pairs: BothPairs) -> tuple[KernelSums, KernelSums]:
        """Implement `Kernels.sums`."""
        tiles_m, tiles_n = self._tiles(window)
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
        self, operands: Operands, weights: Weights, window: Window, pairs: BothPairs, *, terms: int, moments: bool
    ) -> tuple[BFloat16[Array, "{window.rows} {terms*window.columns}"], Float32[Array, "{window.rows}"] | None]:
        """Implement `Kernels.ds`."""
        if self.config.block_m * terms * window.columns >= 1 << 31:
            raise ValueError(
                f"expected a window whose tiles of dS span less than 2^31 elements, got {window}; use fewer columns"
            )
        results = {"ds": jax.ShapeDtypeStruct((window.rows, terms * window.columns), jnp.bfloat16)}
        given = {f"{name}_weight": w for name, w in weights._asdict().items()}
        if moments:
            shape = (self._tiles(window)[1], window.rows)
            results = {"moment": jax.ShapeDtypeStruct(shape, jnp.float32)} | results
        else:
            given["moment"] = None
        out = self._compute("ds", operands, given, results, window, pairs, DS_TERMS=terms)
        return out["ds"], out["moment"].sum(0) if moments else None

    def _tiles(self, window: Window) -> tuple[int, int]:
        return window.rows // self.config.block_m, window.columns // self.config.block_n

    def _compute(
        self,
        kernel: str,
        operands: Operands,
        given: dict[str, Array | None],
        results: dict[str, jax.ShapeDtypeStruct],
        window: Window,
        pairs: BothPairs,
        **constants: int,
    ) -> dict[str, Array]:
        """Compute all tiles of a window; partial results are per tile."""
        tiles_m, tiles_n = self._tiles(window)
        width = term_width(operands.teacher_x, pairs[1])
        if width % self.config.block_d:
            raise ValueError(f"expected features of the teacher in multiples of {self.config.block_d}, got {width}")
        teacher = {
            "TEACHER_WIDTH": width,
            "TEACHER_STRIDE": operands.teacher_x.shape[1],
            **{f"TEACHER_{name.removeprefix('NUM_')}": n for name, n in pair_constants(pairs[1]).items()},
        }
        named = {name: a for name, a in operands._asdict().items() if name not in ("lowest", "highest")}
        named["window"] = jnp.stack([jnp.asarray(n, jnp.int32) for n in (window.row, window.column, tiles_m, tiles_n)])
        return self._launch(
            getattr(_kernels(), f"{kernel}_kernel"),
            f"pairwise_distillation_{kernel}",
            tiles_m * tiles_n,
            (window.rows, window.columns),
            named | given,
            results,
            pairs[0],
            2 * self.config.num_warps,
            GROUP_M=self.config.group_m,
            **teacher,
            **constants,
        )


@functools.cache
def _kernels() -> Any:
    """Import `triton_kernels` once Triton is known to work."""
    load()
    from infcl_jax.ops.pairwise_distillation import triton_kernels

    return triton_kernels
