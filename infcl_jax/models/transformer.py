"""The pre-LayerNorm transformer that both towers share.

Parameters are stored in `param_dtype` and matrix products run in `dtype`. LayerNorm, the softmax of the
attention and the final projection to features are float32 whatever `dtype` is.

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

Activation = Literal["gelu", "quick_gelu"]
AttentionImplementation = Literal["xla", "cudnn"]
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
        needs `dtype` "bfloat16" or "float16" and heads of a multiple of 8 channels.
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
    attention: AttentionImplementation = "xla"
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
        check_choice("attention", self.attention, get_args(AttentionImplementation))
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, float_dtype_name(name, getattr(self, name)))
        if self.attention == "cudnn" and (self.dtype == "float32" or self.width // self.heads % 8):
            raise ValueError(
                "attention 'cudnn' needs dtype 'bfloat16' or 'float16' and a multiple of 8 channels per head; "
                f"got {self.dtype!r} and {self.width // self.heads}. Use attention 'xla'."
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


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": quick_gelu,
}


def layer_norm(config: TransformerConfig, x: jax.Array, name: str) -> jax.Array:
    """LayerNorm over the last axis in float32; to be called inside a module's compact method.

    Args:
      config: gives the dtype of the parameters.
      x: activations [..., width], any floating dtype.
      name: of the submodule, whose parameters are `scale` and `bias`.

    Returns:
      float32 [..., width]. A dense layer that follows casts it to the compute dtype.
    """
    norm = nn.LayerNorm(LAYER_NORM_EPSILON, dtype=jnp.float32, param_dtype=config.param_dtype, name=name)
    return norm(x.astype(jnp.float32))


def projection(config: TransformerConfig, features: int, std: float, name: str) -> nn.Dense:
    """A dense layer with normal weights of standard deviation `std` and zero bias."""
    return nn.Dense(
        features,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.normal(std),
        name=name,
    )


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


@jax.custom_vjp
def attention_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """All products of queries and keys, summed in float32, with products of 16-bit inputs in the backward pass too.

    The automatic gradient would multiply float32 cotangents with 16-bit inputs, which widens the inputs and runs as a
    float32 product (and strict dtype promotion refuses it). Here the cotangent is rounded to the inputs' dtype first,
    as fused attention kernels do.

    Args:
      query: [b, t, heads, d], floating.
      key: [b, s, heads, d], of the same dtype.

    Returns:
      float32 [b, heads, t, s].
    """
    return jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)


def _scores_forward(query: jax.Array, key: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return attention_scores(query, key), (query, key)


def _scores_backward(inputs: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    query, key = inputs
    cotangent = cotangent.astype(query.dtype)
    return jnp.einsum("bnts,bsnd->btnd", cotangent, key), jnp.einsum("bnts,btnd->bsnd", cotangent, query)


attention_scores.defvjp(_scores_forward, _scores_backward)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool, implementation: AttentionImplementation
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) with a float32 softmax.

    Args:
      query: [b, t, heads, d], floating.
      key: [b, t, heads, d], of the same dtype.
      value: [b, t, heads, d], of the same dtype.
      causal: whether position i sees only positions up to i.
      implementation: "xla", or "cudnn" for the fused kernel through `jax.nn.dot_product_attention`.

    Returns:
      [b, t, heads, d] in the dtype of the inputs.
    """
    if implementation == "cudnn":
        return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation="cudnn")
    scores = attention_scores(query, key) * query.shape[-1] ** -0.5
    if causal:
        t = query.shape[1]
        scores = jnp.where(jnp.tri(t, dtype=bool)[None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


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
        query, key, value = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, c.heads, c.width // c.heads), 2, 0)
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
