"""Kernels of the sigmoid loss for Ampere, Ada and Hopper GPUs: launch."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Float32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.kernel_api import Pairs, Window
from infcl_jax.ops.pairwise.sigmoid.kernel_api import Matches, SigmoidOperands, SigmoidWeights
from infcl_jax.ops.pairwise.triton import TritonKernels, kernels_of


@dataclasses.dataclass(frozen=True)
class SigmoidTriton(TritonKernels):
    """`kernel_api.Kernels` for GPUs from Ampere to Hopper."""

    @property
    def ranges(self) -> tuple[int, int]:
        """Rows and columns per range of `Matches`: the size of a tile."""
        return self.config.block_m, self.config.block_n

    def sums(
        self, operands: SigmoidOperands, window: Window, pairs: Pairs
    ) -> tuple[Float32[Array, "{window.rows}"], Float32[Array, "{window.rows}"] | None]:
        """Implement `Kernels.sums`."""
        shape = (self.tiles(window)[1], window.rows)
        names = ("negative", "positive") if operands.matches is not None else ("negative",)
        results = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names}
        absent: dict[str, Array | None] = {} if operands.matches is not None else {"positive": None}
        out = self._compute("sums", operands, absent, results, window, pairs)
        return out["negative"].sum(0), out["positive"].sum(0) if "positive" in out else None

    def ds(
        self,
        operands: SigmoidOperands,
        weights: SigmoidWeights,
        window: Window,
        pairs: Pairs,
        *,
        terms: int,
        moments: bool,
    ) -> tuple[BFloat16[Array, "{window.rows} {terms*window.columns}"], Float32[Array, "{window.rows} 2"] | None, None]:
        """Implement `Kernels.ds`."""
        names = ("scale_moment", "bias_moment")
        shape = (self.tiles(window)[1], window.rows)
        results = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names if moments}
        results |= {"ds": jax.ShapeDtypeStruct((window.rows, terms * window.columns), jnp.bfloat16)}
        given = {f"{name}_weight": w for name, w in weights._asdict().items()}
        given |= {name: None for name in names if not moments}
        out = self._compute("ds", operands, given, results, window, pairs, terms)
        return out["ds"], jnp.stack([out[name].sum(0) for name in names], axis=1) if moments else None, None

    def _compute(
        self,
        kernel: str,
        operands: SigmoidOperands,
        given: dict[str, Array | None],
        results: dict[str, jax.ShapeDtypeStruct],
        window: Window,
        pairs: Pairs,
        terms: int = 0,
    ) -> dict[str, Array]:
        """Compute all tiles of a window; partial results are per column tile."""
        matches = dict.fromkeys(Matches._fields) if operands.matches is None else operands.matches._asdict()
        vectors = {name: a for name, a in operands._asdict().items() if name != "matches"}
        vectors |= {f"match_{name}": a for name, a in matches.items()}
        name = f"pairwise_sigmoid_{kernel}"
        kernel = getattr(kernels_of("sigmoid"), f"{kernel}_kernel")
        settings = self.settings(operands.x, pairs, ds_terms=terms)
        # Two terms of dS need twice the registers, hence twice the warps.
        num_warps = self.config.num_warps * (1 if terms < 2 else 2)
        return self.compute_tiles(kernel, name, window, vectors | given, results, settings, num_warps)


KERNELS = SigmoidTriton
