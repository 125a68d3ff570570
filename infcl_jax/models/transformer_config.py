"""Shape and numerics of a transformer."""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp

from infcl_jax.ops.attention.api import AttentionImplementation, cudnn_accepts, mosaic_gpu_accepts
from infcl_jax.ops.bias_activation.api import Activation
from infcl_jax.ops.common.checks import check_choice, check_positive_int, check_rate
from infcl_jax.ops.layer_norm.api import LAYER_NORM_EPSILON

Remat = Literal["full", "dots"]
Projection = Literal["linear", "none"]  # from pooled states to features


def canonicalize_dtypes(config: Any, *names: str) -> None:
    """Replace dtypes of a configuration by their names; `feature_dtype` may be None.

    Raises:
      ValueError: a dtype is not float32, bfloat16 or float16.
    """
    for name in names:
        value = getattr(config, name)
        if value is None and name == "feature_dtype":
            continue
        try:
            value = jnp.dtype(value).name
        except TypeError:
            value = str(value)
        check_choice(name, value, ("float32", "bfloat16", "float16"))
        object.__setattr__(config, name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Shape and numerics of one tower's transformer.

    Attributes:
      width: size of the residual stream.
      layers: number of blocks.
      heads: number of attention heads; divides `width`.
      mlp_ratio: ratio of the MLP's hidden units to `width`.
      activation: "gelu" (exact, with erf), "gelu_tanh" (approximated with tanh) or "quick_gelu"
        (`x * sigmoid(1.702 x)`, with which OpenAI's weights were trained); None for the model's.
      norm_epsilon: constant added to the variance in LayerNorm.
      layer_scale: initial value of learned factors of each channel of the outputs of attention and MLP (Touvron et al.
        2021, section 2); None for no factors.
      dropout: rate of dropout in training, on the outputs of attention and MLP before the residual sum.
      remat: activations recomputed in the backward pass. None: none. "full": every block, from its input. "dots": all
        but the results of GEMMs with weights, so softmax weights (quadratic in the sequence length) are not stored.
      attention: "xla" runs on every device; it stores the softmax weights for the backward pass unless `remat` is set.
        "cudnn" is the fused kernel for NVIDIA GPUs from Ampere on, with memory linear in the sequence length. It needs
        `dtype` "bfloat16" or "float16" and heads of a multiple of 8 channels, at most 128. With several key tiles, its
        gradients are deterministic only under `XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true`.
        "mosaic_gpu" selects kernels for Hopper GPUs. They need sequences of at most 320 positions, heads of 64 channels
        and `dtype` "bfloat16" or "float16". Their gradients are deterministic.
        None: `best_attention` of the device.
    """

    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0
    activation: Activation | None = None
    norm_epsilon: float = LAYER_NORM_EPSILON
    layer_scale: float | None = None
    dropout: float = 0.0
    remat: Remat | None = None
    attention: AttentionImplementation | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(TowerConfig):
    """Shape and numerics of one transformer, see `TowerConfig`.

    Attributes:
      causal: whether a position attends only to itself and the positions before it.
      dtype: dtype of activations and GEMMs: "float32", "bfloat16" or "float16".
      param_dtype: dtype of the stored parameters: "float32", "bfloat16" or "float16".

    Raises:
      ValueError: a field has a value other than those above.
    """

    causal: bool = False
    activation: Activation = "gelu"
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads"):
            check_positive_int(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(f"expected width to be a multiple of heads, got width {self.width} and heads {self.heads}")
        if int(self.width * self.mlp_ratio) < 1:
            raise ValueError(f"expected mlp_ratio to give at least one hidden unit, got {self.mlp_ratio!r}")
        check_choice("activation", self.activation, get_args(Activation))
        if self.norm_epsilon <= 0:
            raise ValueError(f"expected norm_epsilon to be positive, got {self.norm_epsilon!r}")
        check_rate("dropout", self.dropout)
        check_choice("remat", self.remat, (None, *get_args(Remat)))
        check_choice("attention", self.attention, (None, *get_args(AttentionImplementation)))
        canonicalize_dtypes(self, "dtype", "param_dtype")
        if self.attention == "cudnn" and not cudnn_accepts(self.dtype, self.width // self.heads):
            raise ValueError(
                "expected dtype 'bfloat16' or 'float16' and a multiple of 8 channels per head, at most 128, for "
                f"attention 'cudnn', got {self.dtype!r} and {self.width // self.heads}; use attention None or 'xla'"
            )
        if self.attention == "mosaic_gpu" and not mosaic_gpu_accepts(1, self.width // self.heads, self.dtype):
            raise ValueError(
                "expected dtype 'bfloat16' or 'float16' and 64 channels per head for attention 'mosaic_gpu', got "
                f"{self.dtype!r} and {self.width // self.heads}; use attention None or 'xla'"
            )

    @property
    def input_std(self) -> float:
        """Initial standard deviation of the attention's input projection, `width^-1/2`."""
        return self.width**-0.5

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of projections into the residual stream.

        It is `(2 width layers)^-1/2`, because the variances of the 2 `layers` residual sums add up.
        """
        return self.width**-0.5 * (2 * self.layers) ** -0.5

    @property
    def mlp_std(self) -> float:
        """Initial standard deviation of the MLP's first projection, `(2 width)^-1/2`."""
        return (2 * self.width) ** -0.5
