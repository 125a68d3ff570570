"""Fused Triton kernels of the sigmoid loss, for Ampere, Ada and Hopper GPUs: launch.

Configuration, main loop and launch are those of `pairwise_lse`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise_lse.base import Array
from infcl_jax.ops.pairwise_lse.fused_kernel_api import Pairs, Window
from infcl_jax.ops.pairwise_lse.triton import TritonLauncher, load
from infcl_jax.ops.pairwise_sigmoid.fused_kernel_api import Matches, Operands, Weights


@dataclasses.dataclass(frozen=True)
class TritonKernels(TritonLauncher):
    """`fused_kernel_api.Kernels` for GPUs from Ampere to Hopper."""

    @property
    def ranges(self) -> tuple[int, int]:
        """Rows and columns of a range of `Matches`: those of a tile."""
        return self.config.block_m, self.config.block_n

    def sums(
        self, operands: Operands, window: Window, pairs: Pairs
    ) -> tuple[Float32[Array, "{window.rows}"], Float32[Array, "{window.rows}"] | None]:
        """Implement `Kernels.sums`."""
        shape = (window.columns // self.config.block_n, window.rows)
        names = ("negative", "positive") if operands.matches is not None else ("negative",)
        results = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names}
        absent: dict[str, Array | None] = {} if operands.matches is not None else {"positive": None}
        out = self._compute("sums", operands, absent, results, window, pairs, self.config.num_warps)
        return out["negative"].sum(0), out["positive"].sum(0) if "positive" in out else None

    def ds(
        self, operands: Operands, weights: Weights, window: Window, pairs: Pairs, *, terms: int, moments: bool
    ) -> tuple[BFloat16[Array, "{window.rows} {terms*window.columns}"], Float32[Array, "{window.rows} 2"] | None]:
        """Implement `Kernels.ds`."""
        if self.config.block_m * terms * window.columns >= 1 << 31:
            raise ValueError(
                f"expected a window whose tiles of dS span less than 2^31 elements, got {window}; use fewer columns"
            )
        names = ("scale_moment", "bias_moment")
        shape = (window.columns // self.config.block_n, window.rows)
        results = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names if moments}
        results |= {"ds": jax.ShapeDtypeStruct((window.rows, terms * window.columns), jnp.bfloat16)}
        given = {f"{name}_weight": w for name, w in weights._asdict().items()}
        given |= {name: None for name in names if not moments}
        # Two terms of dS need twice the registers, hence twice the warps.
        num_warps = self.config.num_warps * (1 if terms < 2 else 2)
        out = self._compute("ds", operands, given, results, window, pairs, num_warps, DS_TERMS=terms)
        return out["ds"], jnp.stack([out[name].sum(0) for name in names], axis=1) if moments else None

    def _compute(
        self,
        kernel: str,
        operands: Operands,
        given: dict[str, Array | None],
        results: dict[str, jax.ShapeDtypeStruct],
        window: Window,
        pairs: Pairs,
        num_warps: int,
        **constants: int,
    ) -> dict[str, Array]:
        """Compute all tiles of a window; partial results are per column tile."""
        rows, columns = window.rows, window.columns
        tiles_m, tiles_n = rows // self.config.block_m, columns // self.config.block_n
        matches = dict.fromkeys(Matches._fields) if operands.matches is None else operands.matches._asdict()
        vectors = {name: a for name, a in operands._asdict().items() if name != "matches"}
        return self._launch(
            getattr(_kernels(), f"{kernel}_kernel"),
            f"pairwise_sigmoid_{kernel}",
            tiles_m * tiles_n,
            (rows, columns),
            vectors
            | {f"match_{name}": a for name, a in matches.items()}
            | {"window": jnp.stack([jnp.asarray(n, jnp.int32) for n in (window.row, window.column, tiles_m, tiles_n)])}
            | given,
            results,
            pairs,
            num_warps,
            GROUP_M=self.config.group_m,
            **constants,
        )


@functools.cache
def _kernels() -> Any:
    """Import `triton_kernels` once Triton is known to work."""
    load()
    from infcl_jax.ops.pairwise_sigmoid import triton_kernels

    return triton_kernels
