"""Kernels of `pairwise_lse` for Ampere, Ada and Hopper GPUs: launch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import Pairs, Window
from infcl_jax.ops.pairwise.lse.kernel_api import LseOperands, LseWeights, WeightsByID, positive_tiles
from infcl_jax.ops.pairwise.triton import TritonKernels, kernels_of


@dataclasses.dataclass(frozen=True)
class LseTriton(TritonKernels):
    """`LseKernels` for GPUs from Ampere to Hopper."""

    def sums(
        self, operands: LseOperands, window: Window, pairs: Pairs, *, exclude: bool, columns: bool, maxima: bool
    ) -> tuple[Float32[Array, "{window.rows}"], Float32[Array, "{window.columns}"] | None]:
        """Implement `Kernels.sums`."""
        operands = operands if exclude else operands._replace(labels=None, last=None)
        needed = ("row_partials", "column_partials") if columns else ("row_partials",)
        out = self._compute_tiles(operands, None, window, pairs, needed, exclude=exclude, maxima=maxima)
        reduce = jnp.max if maxima else jnp.sum
        return reduce(out["row_partials"], 0), reduce(out["column_partials"], 0) if columns else None

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
    ) -> tuple[
        BFloat16[Array, "{window.rows} {terms*window.columns}"],
        Float32[Array, "{window.rows}"] | None,
        Float32[Array, "{window.columns}"] | None,
    ]:
        """Implement `Kernels.ds`."""
        column_moment = moments and weights.column is not None
        needed = ("row_partials",) * moments + ("column_partials",) * column_moment + ("ds",)
        out = self._compute_tiles(operands, weights, window, pairs, needed, exclude=exclude, terms=terms)
        row = out["row_partials"].sum(0) if moments else None
        return out["ds"], row, out["column_partials"].sum(0) if column_moment else None

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
        launch = functools.partial(self.launch, kernels_of("lse").positive_sums_kernel, "pairwise_positive_sums")
        results = launch(num_tiles, shape, given, out, pairs, self.config.num_warps, MAXIMA=maxima)
        return results["sum"], results["similarity"], results["moment"]

    def _compute_tiles(
        self,
        operands: LseOperands,
        weights: LseWeights | None,
        window: Window,
        pairs: Pairs,
        needed: tuple[str, ...],
        *,
        exclude: bool,
        maxima: bool = False,
        terms: int = 0,
    ) -> dict[str, Array]:
        """Compute all tiles of a window.

        Partial sums and maxima are per tile, to be reduced over the first axis.

        Args:
          operands: operands of the kernels.
          weights: factors of dS; None for sums and maxima.
          window: rows and columns to process.
          pairs: pairs of bf16 terms whose GEMMs are summed.
          needed: names of the results that are needed: "row_partials", "column_partials", "ds".
          exclude: whether the positives are excluded.
          maxima: whether to compute maxima of exponents.
          terms: number of bf16 terms of dS.
        """
        rows, columns = window.rows, window.columns
        tiles_m, tiles_n = self.tiles(window)
        results = {
            "row_partials": jax.ShapeDtypeStruct((tiles_n, rows), jnp.float32),
            "column_partials": jax.ShapeDtypeStruct((tiles_m, columns), jnp.float32),
            "ds": jax.ShapeDtypeStruct((rows, terms * columns), jnp.bfloat16),
        }
        vectors = {name: a for name, a in operands._asdict().items() if name not in ("lowest", "highest")}
        factors = dict.fromkeys(LseWeights._fields) if weights is None else weights._asdict()
        by_id = factors.pop("by_id") or WeightsByID(*[None] * len(WeightsByID._fields))
        absent = {name: None for name in results if name not in needed}
        return self.compute_tiles(
            kernels_of("lse").tile_kernel,
            "pairwise_tile",
            window,
            vectors
            | {f"{name}_weight": factor for name, factor in factors.items()}
            | {f"by_id_{name}": factor for name, factor in by_id._asdict().items()}
            | absent,
            {name: result for name, result in results.items() if name in needed},
            pairs,
            # Two exponentials, or two terms of dS, need twice the registers, hence twice the warps.
            self.config.num_warps * (1 if operands.column_scale is None and terms < 2 else 2),
            EXCLUDE=exclude,
            MAXIMA=maxima,
            DS_TERMS=terms,
        )


KERNELS = LseTriton
