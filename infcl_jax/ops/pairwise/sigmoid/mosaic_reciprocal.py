"""Reciprocal in one instruction for the Hopper kernels of the sigmoid loss, in Mosaic GPU.

Pallas divides with `rcp.approx.f32`, which takes five more instructions for subnormal numbers.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Float32

from infcl_jax.ops.pairwise.base import Array
from infcl_jax.ops.pairwise.mosaic_schedule import WGMMA_LAYOUT


def reciprocal(a: Float32[Array, "rows columns"]) -> Float32[Array, "rows columns"]:
    """Compute 1 / a up to one unit in the last place; 0 where it would be subnormal, as for infinity.

    Args:
      a: array in `WGMMA_LAYOUT`.
    """

    @plgpu.inline_mgpu(
        arg_types=(WGMMA_LAYOUT,), return_type=plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=WGMMA_LAYOUT)
    )
    def invert(_: Any, a: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        inverses = np.empty_like(a.registers)
        for index, pair in np.ndenumerate(a.registers):
            inverses[index] = vector.from_elements(pair.type, [_rcp(vector.extract(pair, [], [i])) for i in range(2)])
        return mgpu.FragmentedArray(_registers=inverses, _layout=a.layout, _is_signed=None)

    return invert(a)


def _rcp(value: ir.Value) -> ir.Value:
    return llvm.inline_asm(value.type, [value], "rcp.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False)
