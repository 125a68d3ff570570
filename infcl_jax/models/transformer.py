"""The pre-LayerNorm transformer that both towers share.

Parameters are stored in `param_dtype` and matrix products run in `dtype`. Between products everything is computed in
float32 and stored in `dtype`: LayerNorm, biases, activation functions, the softmax of the attention. The final
projection to features is float32.

Layers are unrolled (`block_00`, `block_01`, ...) rather than scanned. A scan would compile a deep tower faster, but it
stacks the weights of all layers into one array, and then neither a rule per layer (learning rate, freezing) nor the
conversion to and from other CLIP implementations can address a layer by its name.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from infcl_jax.models.attention import AttentionImplementation, attend, cudnn_accepts

Activation = Literal["gelu", "quick_gelu"]
Remat = Literal["full", "dots"]

LAYER_NORM_EPSILON = 1e-5


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def check_positive_int(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer; got {value!r}.")


def check_rate(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a probability below 1."""
    if not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be a number in [0, 1); got {value!r}.")


def float_dtype_name(name: str, value: Any) -> str:
    """The name of a floating dtype given as a string, a NumPy dtype or a JAX scalar type.

    Raises:
      ValueError: it is none of float32, bfloat16 and float16.
    """
    try:
        dtype = jnp.dtype(value).name
    except TypeError:
        dtype = str(value)
    check_choice(name, dtype, ("float32", "bfloat16", "float16"))
    return dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape and numerics of one transformer.

    Attributes:
      width: size of the residual stream.
      layers: number of blocks.
      heads: attention heads; divides `width`.
      mlp_ratio: hidden units of the MLP over `width`.
      causal: whether a position sees only itself and the positions before it.
      activation: "gelu" (exact, with erf) or "quick_gelu" (`x * sigmoid(1.702 x)`, what OpenAI's weights were
        trained with).
      dropout: rate applied to the output of the attention and of the MLP, before the residual sum, when training.
      remat: what the backward pass recomputes. None: nothing. "full": every block from its input. "dots": everything
        but the products with weight matrices, so the attention (quadratic in the sequence length) is never stored.
      attention: "xla" runs everywhere and stores the attention weights for the backward pass unless `remat` is set;
        "cudnn" is the fused kernel of NVIDIA GPUs from Ampere on, whose memory is linear in the sequence length. It
        needs `dtype` "bfloat16" or "float16" and heads of a multiple of 8 channels, at most 128. With several blocks
        of keys its gradients repeat bit for bit under `XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true` alone.
        None: `best_attention` of the device that runs.
      dtype: of activations and matrix products: "float32", "bfloat16" or "float16".
      param_dtype: of the stored parameters, one of the same.

    Raises:
      ValueError: a field outside the values above.
    """

    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0
    causal: bool = False
    activation: Activation = "gelu"
    dropout: float = 0.0
    remat: Remat | None = None
    attention: AttentionImplementation | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads"):
            check_positive_int(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(f"heads must divide width; got heads {self.heads}, width {self.width}.")
        if int(self.width * self.mlp_ratio) < 1:
            raise ValueError(f"mlp_ratio must give at least one hidden unit; got {self.mlp_ratio!r}.")
        check_choice("activation", self.activation, get_args(Activation))
        check_rate("dropout", self.dropout)
        check_choice("remat", self.remat, (None, *get_args(Remat)))
        check_choice("attention", self.attention, (None, *get_args(AttentionImplementation)))
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, float_dtype_name(name, getattr(self, name)))
        if self.attention == "cudnn" and not cudnn_accepts(self.dtype, self.width // self.heads):
            raise ValueError(
                "attention 'cudnn' needs dtype 'bfloat16' or 'float16' and a multiple of 8 channels per head, at most "
                f"128; got {self.dtype!r} and {self.width // self.heads}. Use attention None or 'xla'."
            )

    @property
    def input_std(self) -> float:
        """Standard deviation at which the attention's input projection starts: `width^-1/2`."""
        return self.width**-0.5

    @property
    def residual_std(self) -> float:
        """Standard deviation of projections into the residual stream; the variance of its 2 `layers` sums adds up."""
        return self.width**-0.5 * (2 * self.layers) ** -0.5

    @property
    def mlp_std(self) -> float:
        """Standard deviation of the MLP's first projection: `(2 width)^-1/2`."""
        return (2 * self.width) ** -0.5


def quick_gelu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(1.702 x)`, the sigmoid approximation of GELU (Hendrycks & Gimpel 2016, section 2)."""
    return x * jax.nn.sigmoid(1.702 * x)


def recomputed(function: Callable[..., jax.Array], **options: Any) -> Callable[..., jax.Array]:
    """An elementwise function or a normalisation of which the backward pass keeps the arguments alone."""
    return jax.checkpoint(function, prevent_cse=False, **options)  # no barrier, which would keep XLA from fusing it


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def _quick_gelu(x: jax.Array) -> jax.Array:
    return quick_gelu(x.astype(jnp.float32)).astype(x.dtype)


_ACTIVATIONS = {"gelu": recomputed(_gelu), "quick_gelu": recomputed(_quick_gelu)}


def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, dtype: Any) -> jax.Array:
    """One pass over `x` for both statistics."""
    x, scale, bias = (a.astype(jnp.float32) for a in (x, scale, bias))
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean, 0.0)
    leading = (1,) * (x.ndim - 1)
    x = (x - mean) * jax.lax.rsqrt(variance + LAYER_NORM_EPSILON)
    return (x * scale.reshape(*leading, -1) + bias.reshape(*leading, -1)).astype(dtype)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis, in float32 from inputs to a result of any dtype; parameters `scale` and `bias`."""

    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., width] to [..., width] in `dtype`."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], self.param_dtype)
        return recomputed(_normalize, static_argnums=3)(x, scale, bias, jnp.dtype(self.dtype))


def layer_norm(config: TransformerConfig, x: jax.Array, name: str, dtype: Any = None) -> jax.Array:
    """LayerNorm over the last axis with float32 statistics; to be called inside a module's compact method.

    Args:
      config: gives the dtypes.
      x: activations [..., width], any floating dtype.
      name: of the submodule, whose parameters are `scale` and `bias`.
      dtype: of the result; None for the compute dtype.

    Returns:
      [..., width] in `dtype`.
    """
    return LayerNorm(dtype or config.dtype, config.param_dtype, name=name)(x)


class Dense(nn.Module):
    """A dense layer whose bias is added in float32, so that the bias's gradient sums all rows in float32.

    Parameters: `kernel` [inputs, features], `bias` [features].
    """

    features: int
    std: float
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [b, t, inputs] to [b, t, features] in `dtype`."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(self.std), shape, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, shape[1:], self.param_dtype)
        y = x.astype(self.dtype) @ kernel.astype(self.dtype)
        return (y.astype(jnp.float32) + bias[None, None].astype(jnp.float32)).astype(self.dtype)


def projection(config: TransformerConfig, features: int, std: float, name: str) -> Dense:
    """A dense layer with normal weights of standard deviation `std` and zero bias."""
    return Dense(features, std, config.dtype, config.param_dtype, name=name)


def feature_projection(config: TransformerConfig, embed_dim: int, name: str) -> nn.Dense:
    """The matrix without bias from a tower's pooled state to the features; float32, since it costs next to nothing."""
    return nn.Dense(
        embed_dim,
        use_bias=False,
        dtype=jnp.float32,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.normal(config.input_std),
        name=name,
    )


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Parameters: `in_proj` {kernel [width, 3 width], bias}, whose columns are query, key, value, each ordered by head;
    `out_proj` {kernel [width, width], bias}.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [b, t, width] to [b, t, width] in the compute dtype."""
        c = self.config
        qkv = projection(c, 3 * c.width, c.input_std, "in_proj")(x)
        by_head = (*x.shape[:2], c.heads, c.width // c.heads)
        query, key, value = (part.reshape(by_head) for part in jnp.split(qkv, 3, axis=-1))
        y = attend(query, key, value, causal=c.causal, implementation=c.attention)
        return projection(c, c.width, c.residual_std, "out_proj")(y.reshape(x.shape))


class Mlp(nn.Module):
    """Two dense layers, `c_fc` [width, hidden] and `c_proj` [hidden, width], with the activation between them."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [b, t, width] to [b, t, width] in the compute dtype."""
        c = self.config
        hidden = projection(c, int(c.width * c.mlp_ratio), c.mlp_std, "c_fc")(x)
        return projection(c, c.width, c.residual_std, "c_proj")(_ACTIVATIONS[c.activation](hidden))


class Block(nn.Module):
    """One pre-LayerNorm block: `x + attention(LN(x))`, then `x + MLP(LN(x))`."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps [b, t, width] to [b, t, width]; `train` turns dropout on."""
        c = self.config
        drop = functools.partial(nn.Dropout, c.dropout, deterministic=not train)
        x = x + drop(name="drop_1")(SelfAttention(c, name="attn")(layer_norm(c, x, "ln_1")))
        return x + drop(name="drop_2")(Mlp(c, name="mlp")(layer_norm(c, x, "ln_2")))


def _block_class(remat: Remat | None) -> type[Block]:
    if remat is None:
        return Block
    # "dots" keeps products with weights alone: the attention's own products have batch dimensions and are quadratic
    # in the sequence length.
    policies = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    return nn.remat(Block, policy=policies[remat], static_argnums=(2,))


class Transformer(nn.Module):
    """`config.layers` blocks named `block_00`, `block_01`, ..."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """Runs the blocks.

        Args:
          x: [b, t, width] in `config.dtype`.
          train: turns dropout on; it then needs the "dropout" rng if the rate is not 0.

        Returns:
          [b, t, width] in `config.dtype`, not normalised.
        """
        block = _block_class(self.config.remat)
        for i in range(self.config.layers):
            x = block(self.config, name=f"block_{i:02d}")(x, train)
        return x
