"""Times of an encoder's forward and backward pass, from its configuration."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from infcl_jax.models.config import BertConfig, TextConfig, VisionConfig
from infcl_jax.models.resnet import ResNetConfig
from infcl_jax.ops.attention.api import mosaic_gpu_accepts
from infcl_jax.planner.devices import Kernels, Rates

Transformer = VisionConfig | TextConfig | BertConfig

_TILE = 128  # rows and columns of the GEMM tile that one SM computes, see docs/archive/measurements.md
_CHANNELS = 3  # of images
# Width-sized arrays that a block reads and writes besides attention's and the MLP's hidden units. Forward: two
# LayerNorms, 2 each, and two residual sums, 3 each. Backward: two LayerNorms, which also sum the cotangents, 4 each,
# and the bias gradient of queries, keys and values, 3.
_FORWARD_ARRAYS, _BACKWARD_ARRAYS = 10, 11
# Arrays of hidden units: bias and activation, forward and backward.
_FORWARD_HIDDEN, _BACKWARD_HIDDEN = 2, 3
_RESIDUAL_ARRAYS = 6  # arrays of the two residual sums
# Passes over the softmax weights [heads, t, t], which attention in XLA writes to HBM: not measured.
_FORWARD_WEIGHTS, _BACKWARD_WEIGHTS = 4, 6


class TowerTime(NamedTuple):
    """Seconds of one encoder for the rows of one pass on one GPU."""

    forward: float
    backward: float  # with what `remat` recomputes
    residual: float  # part of the forward pass that a stored residual stream saves
    measured: bool  # whether the times of such a tower were compared with measurements


class _Gemm(NamedTuple):
    """A product of `[rows, inner]` and `[inner, columns]`, `repeats` times."""

    rows: int
    inner: int
    columns: int
    repeats: int = 1

    def flops(self, cores: int = 0) -> float:
        """Count the FLOPs; with a number of SMs, include idle SMs in the last wave."""
        flops = 2.0 * self.rows * self.inner * self.columns * self.repeats
        if not cores:
            return flops
        waves = math.ceil(self.rows / _TILE) * math.ceil(self.columns / _TILE) / cores
        return flops * math.ceil(waves) / waves

    def transposed(self) -> "_Gemm":
        """Product for the cotangent of the `[rows, inner]` factor."""
        return self._replace(inner=self.columns, columns=self.inner)


def tower_time(
    tower: Transformer | ResNetConfig, embed_dim: int, rows: int, rates: Rates, dtype: str, forward_flops: int
) -> TowerTime:
    """Estimate the times of a tower.

    GEMMs take their FLOPs in whole waves of tiles. All other kernels take the bytes that they move: LayerNorm, bias
    with activation and residual sums at one rate for each pass, attention at a rate by sequence length. A ResNet takes
    its `forward_flops` for each row.
    """
    # fp32 operands are rounded to TF32, whose peak is half of bf16's in NVIDIA's data sheets. Not measured.
    gemm_rate, size = (rates.gemm / 2, 4) if dtype == "float32" else (rates.gemm, 2)
    if isinstance(tower, ResNetConfig):
        # Convolutions at the rate of GEMMs, and nothing else: a lower bound.
        forward = rows * forward_flops / gemm_rate
        return TowerTime(forward, 2 * forward, 0.0, False)
    bert, positions, cores = isinstance(tower, BertConfig), _positions(tower), rates.device.cores
    hopper = rates.device.implementation == "mosaic_gpu" and size == 2
    fused = (
        hopper
        and not isinstance(tower, BertConfig)
        and tower.attention in (None, "mosaic_gpu")
        and mosaic_gpu_accepts(positions, tower.width // tower.heads, dtype)
    )
    kernels = rates.fused if hopper else rates.xla
    forward_bytes, backward_bytes = (rows * size * count for count in _elementwise(tower, positions))
    attention = _attention_times(tower, positions, rows * size, kernels if fused else rates.xla, fused)
    gemms = list(_gemms(tower, embed_dim, rows, positions))
    forward_gemm = sum(gemm.flops(cores) for gemm in gemms) / gemm_rate
    backward_gemm = sum(gemm.flops() + gemm.transposed().flops(cores) for gemm in gemms) / gemm_rate
    forward_other = forward_bytes / kernels.forward + attention[0]
    forward = forward_gemm + forward_other
    recomputed = {None: 0.0, "full": forward, "dots": forward_other}[tower.remat]
    backward = backward_gemm + backward_bytes / kernels.backward + attention[1] + recomputed
    # The GEMMs and sums that produce the residual stream.
    tokens, width, layers = rows * positions, tower.width, _whole_layers(tower)
    products = _Gemm(tokens, width, width, layers), _Gemm(tokens, _hidden(tower), width, layers)
    sums = layers * _RESIDUAL_ARRAYS * width * tokens * size
    residual = sum(gemm.flops(cores) for gemm in products) / gemm_rate + sums / kernels.forward
    return TowerTime(forward, backward, residual, size == 2 and not bert and tower.remat is None)


def _positions(tower: Transformer) -> int:
    """Sequence length in training."""
    if not isinstance(tower, VisionConfig):
        return tower.context_length
    patches = (tower.image_size // tower.patch_size) ** 2
    return int(tower.class_token) + max(1, int(patches * (1 - tower.patch_dropout)))


def _whole_layers(tower: Transformer) -> int:
    """Number of blocks that compute all positions.

    The last block of towers that pool one token computes that token alone.
    """
    one_token = tower.pool == "tok" if isinstance(tower, VisionConfig) else isinstance(tower, TextConfig)
    return tower.layers - int(one_token)


def _hidden(tower: Transformer) -> int:
    return int(tower.width * tower.mlp_ratio)


def _gemms(tower: Transformer, embed_dim: int, rows: int, positions: int) -> Iterator[_Gemm]:
    """Yield the GEMMs of the forward pass."""
    width, hidden = tower.width, _hidden(tower)
    if isinstance(tower, VisionConfig):
        patches = (tower.image_size // tower.patch_size) ** 2
        yield _Gemm(rows * patches, _CHANNELS * tower.patch_size**2, width)
    layers = _whole_layers(tower)
    shapes = ((width, 3 * width), (width, width), (width, hidden), (hidden, width))
    for inner, columns in shapes:
        yield _Gemm(rows * positions, inner, columns, layers)
    for inner, columns in ((width, 2 * width), *shapes[1:]):  # the query and the output of one position
        yield _Gemm(rows, inner, columns, tower.layers - layers)
    yield _Gemm(rows, width, embed_dim)


def _elementwise(tower: Transformer, positions: int) -> tuple[int, int]:
    """Elements that one row moves outside of GEMMs and attention, forward and backward."""
    layers, width, hidden = _whole_layers(tower), tower.width, _hidden(tower)
    forward = layers * (_FORWARD_ARRAYS * width + _FORWARD_HIDDEN * hidden)
    backward = layers * (_BACKWARD_ARRAYS * width + _BACKWARD_HIDDEN * hidden)
    one_token = tower.layers - layers  # its LayerNorm still covers all positions
    return positions * (forward + 2 * one_token * width), positions * (backward + 4 * one_token * width)


def _attention_times(
    tower: Transformer, positions: int, row_bytes: int, kernels: Kernels, fused: bool
) -> tuple[float, float]:
    """Seconds of attention, forward and backward; `row_bytes` are rows times bytes of an element."""
    tensor = row_bytes * positions * tower.width * _whole_layers(tower)
    rates, weights = kernels.attention_rates(positions), 0
    if not fused and (isinstance(tower, BertConfig) or tower.attention == "xla"):
        rates, weights = kernels[:2], row_bytes * positions**2 * tower.heads * tower.layers
    return (4 * tensor + _FORWARD_WEIGHTS * weights) / rates[0], (8 * tensor + _BACKWARD_WEIGHTS * weights) / rates[1]
