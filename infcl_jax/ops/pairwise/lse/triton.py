"""Kernels of `pairwise_lse` for Ampere, Ada and Hopper GPUs: launch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import Pairs, Window
from infcl_jax.ops.pairwise.lse.kernel_api import LseOperands, LseWeights, WeightsByID, positive_tiles
from infcl_jax.ops.pairwise.triton import Gemm, Settings, TritonKernels, kernels_of


@dataclasses.dataclass(frozen=True)
class LseTriton(TritonKernels):
    """`LseKernels` for GPUs from Ampere to Hopper."""

    def sums(
        self,
        operands: LseOperands,
        window: Window,
        pairs: Pairs,
        *,
        exclude: bool,
        columns: bool,
        maxima: bool,
        guide_pairs: Pairs = (),
    ) -> tuple[Float32[Array, "{window.rows}"], Float32[Array, "{window.columns}"] | None]:
        """Implement `Kernels.sums`."""
        operands = operands if exclude else operands._replace(labels=None, last=None)
        settings = self._settings(operands, pairs, guide_pairs, exclude=exclude, maxima=maxima)
        out = self._compute("sums", operands, {}, window, columns, settings)
        reduce = jnp.max if maxima else jnp.sum
        return reduce(out["row"], 0), reduce(out["column"], 0) if columns else None

    def ds(
        self,
        operands: LseOperands,
        weights: LseWeights,
        window: Window,
        pairs: Pairs,
        *,
        exclude: bool,
        terms: int,
        moments: bool,
        guide_pairs: Pairs = (),
    ) -> tuple[
        BFloat16[Array, "{window.rows} {terms*window.columns}"],
        Float32[Array, "{window.rows}"] | None,
        Float32[Array, "{window.columns}"] | None,
    ]:
        """Implement `Kernels.ds`."""
        by_id = weights.by_id or WeightsByID(*[None] * len(WeightsByID._fields))
        given = {f"{name}_weight": w for name, w in weights._asdict().items() if name != "by_id"}
        given |= {f"by_id_{name}": w for name, w in by_id._asdict().items()}
        settings = self._settings(operands, pairs, guide_pairs, ds_terms=terms, exclude=exclude)
        out = self._compute("ds", operands, given, window, moments and weights.column is not None, settings, moments)
        row, column = (out[name].sum(0) if name in out else None for name in ("row", "column"))
        return out["ds"], row, column

    def positive_sums(
        self, operands: LseOperands, pairs: Pairs, *, maxima: bool
    ) -> tuple[Float32[Array, "bx"], Float32[Array, "bx"], Float32[Array, "bx"]]:
        """Implement `LseKernels.positive_sums`."""
        rows, columns = operands.x.shape[0], operands.y.shape[0]
        first, number = positive_tiles(operands, self.config.block_m, self.config.block_n)
        names = ("x", "y", "row_scale", "row_shift", "labels", "last")
        given = {name: getattr(operands, name) for name in names} | {"first_tile": first, "num_tiles": number}
        out = dict.fromkeys(("sum", "similarity", "moment"), jax.ShapeDtypeStruct((rows,), jnp.float32))
        num_tiles, shape = rows // self.config.block_m, (rows, columns)
        settings = self.settings(operands.x, pairs, maxima=maxima)
        launch = functools.partial(self.launch, kernels_of("lse").positive_sums_kernel, "pairwise_positive_sums")
        results = launch(num_tiles, shape, given, out, settings, self.config.num_warps)
        return results["sum"], results["similarity"], results["moment"]

    def _settings(self, operands: LseOperands, pairs: Pairs, guide_pairs: Pairs, **options: Any) -> Settings:
        other = None if operands.guide_x is None else Gemm.of(operands.guide_x, guide_pairs)
        return self.settings(operands.x, pairs, other=other, **options)

    def _compute(
        self,
        kernel: str,
        operands: LseOperands,
        given: dict[str, Array | None],
        window: Window,
        columns: bool,
        settings: Settings,
        rows: bool = True,
    ) -> dict[str, Array]:
        """Compute all tiles of a window.

        Sums, maxima and moments are per tile, to be reduced over the first axis.

        Args:
          kernel: "sums" or "ds".
          operands: operands of the kernels.
          given: weights of dS by name.
          window: rows and columns to process.
          columns: whether the results of columns are needed.
          settings: settings of the kernel.
          rows: whether the results of rows are needed.
        """
        tiles_m, tiles_n = self.tiles(window)
        results = {}
        if rows:
            results["row"] = jax.ShapeDtypeStruct((tiles_n, window.rows), jnp.float32)
        if columns:
            results["column"] = jax.ShapeDtypeStruct((tiles_m, window.columns), jnp.float32)
        if settings.ds_terms:
            results["ds"] = jax.ShapeDtypeStruct((window.rows, settings.ds_terms * window.columns), jnp.bfloat16)
        vectors = {name: a for name, a in operands._asdict().items() if name not in ("lowest", "highest")}
        absent = {name: None for name in ("row", "column") if name not in results}
        # Two accumulators, two exponentials, or two terms of dS, need twice the registers, hence twice the warps.
        two = settings.other is not None or operands.column_scale is not None or settings.ds_terms > 1
        num_warps = self.config.num_warps * (2 if two else 1)
        name = f"pairwise_lse_{kernel}"
        kernel = getattr(kernels_of("lse"), f"{kernel}_kernel")
        return self.compute_tiles(kernel, name, window, vectors | given | absent, results, settings, num_warps)


KERNELS = LseTriton
