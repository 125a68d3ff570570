"""The pre-LayerNorm transformer that both towers share.

Parameters are stored in `param_dtype` and matrix products run in `dtype`. Between products everything is computed in
float32 and stored in `dtype`: LayerNorm, biases, activation functions, the softmax of the attention. The final
projection to features is float32.

Layers are unrolled (`block_00`, `block_01`, ...) rather than scanned. A scan would compile a deep tower faster, but it
stacks the weights of all layers into one array, and then neither a rule per layer (learning rate, freezing) nor the
conversion to and from other CLIP implementations can address a layer by its name.
"""

import dataclasses
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from infcl_jax.models.layers import PRODUCT, Dense, LayerNorm, products, take_positions
from infcl_jax.ops.attention.api import (
    AttentionImplementation,
    attend,
    attend_from,
    cudnn_accepts,
    kernel_accepts,
    padding_for,
    takes_packed,
)
from infcl_jax.ops.bias_activation.api import Activation
from infcl_jax.ops.linear import route_gradient

Remat = Literal["full", "dots"]

# Name of the residual stream after each part of each block, for the policies of `jax.checkpoint`.
RESIDUAL = "residual"


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
        "mosaic_gpu" are kernels for Hopper GPUs and sequences of up to 320 positions, with heads of 64 channels in
        the same dtypes; their gradients always repeat.
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
        if self.attention == "mosaic_gpu" and not kernel_accepts(1, self.width // self.heads, self.dtype):
            raise ValueError(
                "attention 'mosaic_gpu' needs dtype 'bfloat16' or 'float16' and 64 channels per head; got "
                f"{self.dtype!r} and {self.width // self.heads}. Use attention None or 'xla'."
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


def layer_norm(config: TransformerConfig, name: str, dtype: Any = None) -> LayerNorm:
    """LayerNorm over the last axis with float32 statistics.

    Args:
      config: gives the dtypes.
      name: of the submodule, whose parameters are `scale` and `bias`.
      dtype: of the result; None for the compute dtype.

    Returns:
      The module, for activations [..., width] of any floating dtype.
    """
    return LayerNorm(dtype or config.dtype, config.param_dtype, name=name)


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

    Two biases need no pass over activations. That of the keys adds the same to all scores of a query, which the softmax
    does not see: it has no influence, and no gradient. That of the values comes out of the attention as it went in,
    since weights add up to 1: it is multiplied with `out_proj` and added there.

    Attributes:
      config: of the transformer.
      positions: t, of every sequence.
      padding: positions at the end of every sequence that the others do not see.
    """

    config: TransformerConfig
    positions: int
    padding: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, position: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Maps [b * t, width] to [b * t, width] in the compute dtype.

        Args:
          x: tokens.
          position: integer [b], which token of each sequence is asked for; None for all.

        Returns:
          [b * t, width], or [b, width] with a position, and the bias [width] in it, which has its gradient from where
          the result goes to.
        """
        c = self.config
        x = x.astype(c.dtype)
        kernel, bias = projection(c, 3 * c.width, c.input_std, "in_proj").weights(c.width)
        query_bias, _, value_bias = jnp.split(bias, 3)
        out_kernel, out_bias = projection(c, c.width, c.residual_std, "out_proj").weights(c.width)
        if position is None:
            parts = self._parts(x, kernel, query_bias)
            y = attend(*parts, causal=c.causal, padding=self.padding, implementation=c.attention)
        else:
            of_query, of_key, of_value = jnp.split(kernel, 3, axis=1)
            tokens = x.reshape(-1, self.positions, c.width)
            (query,) = products(take_positions(tokens, position), (of_query,), (query_bias,))
            query = query.reshape(-1, c.heads, c.width // c.heads)
            y = attend_from(query, tokens, of_key, of_value, position, causal=c.causal, padding=self.padding)
        wide = (a.astype(jnp.float32) for a in (value_bias, out_kernel))
        bias = jnp.matmul(*wide, precision=jax.lax.Precision.HIGHEST) + out_bias.astype(jnp.float32)
        return products(y.reshape(-1, c.width), (out_kernel,), (jax.lax.stop_gradient(bias),))[0], bias

    def _parts(self, x: jax.Array, kernel: jax.Array, query_bias: jax.Array) -> tuple[jax.Array, ...]:
        """Queries, keys and values of all tokens, as `attend` takes them."""
        c, positions = self.config, self.positions
        channels = c.width // c.heads
        if takes_packed((len(x) // positions, positions, c.heads, channels), c.dtype, c.attention):
            bias = jnp.pad(jax.lax.stop_gradient(query_bias), (0, 2 * c.width))
            (packed,) = products(x, (kernel,), (bias,))
            return (route_gradient(packed, query_bias).reshape(-1, positions, 3 * c.heads, channels),)
        parts = products(x, tuple(jnp.split(kernel, 3, axis=1)), (query_bias, None, None))
        return tuple(part.reshape(-1, positions, c.heads, channels) for part in parts)


class Mlp(nn.Module):
    """Two dense layers, `c_fc` [width, hidden] and `c_proj` [hidden, width], with the activation between them."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps [..., width] to the same in the compute dtype, and the bias [width] in it, as `SelfAttention` does."""
        c = self.config
        hidden = projection(c, int(c.width * c.mlp_ratio), c.mlp_std, "c_fc").activated(x, c.activation)
        return projection(c, c.width, c.residual_std, "c_proj").without_bias_gradient(hidden)


class Block(nn.Module):
    """One pre-LayerNorm block: `x + attention(LN(x))`, then `x + MLP(LN(x))`.

    Attributes:
      config: of the transformer.
      positions: as of `SelfAttention`.
      padding: likewise.
    """

    config: TransformerConfig
    positions: int
    padding: int = 0

    @nn.compact
    def __call__(
        self, x: jax.Array, added: jax.Array | None, position: jax.Array | None, train: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Runs the block.

        Args:
          x: [b * t, width] in the compute dtype.
          added: [width], a bias in `x` that has its gradient from here, see `normalize_beside`; None for none.
          position: integer [b], the token of each sequence that is asked for; None for all.
          train: turns dropout on.

        Returns:
          [b * t, width] or with a position [b, width], and the bias in it, likewise.
        """
        c = self.config

        def dropped(part: tuple[jax.Array, jax.Array], name: str) -> tuple[jax.Array, jax.Array | None]:
            if not (train and c.dropout):
                return part
            return nn.Dropout(c.dropout, deterministic=False, name=name)(route_gradient(*part)), None

        attention = SelfAttention(c, self.positions, self.padding, name="attn")
        y, x = layer_norm(c, "ln_1").with_residual(x, added)
        found, added = dropped(attention(y, position), "drop_1")
        if position is not None:
            x = take_positions(x.reshape(-1, self.positions, c.width), position)
        x = checkpoint_name(x + found, RESIDUAL)
        y, x = layer_norm(c, "ln_2").with_residual(x, added)
        found, added = dropped(Mlp(c, name="mlp")(y), "drop_2")
        return x + found, added


def _block_class(remat: Remat | None) -> type[Block]:
    if remat is None:
        return Block
    policies = {"full": None, "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT)}
    return nn.remat(Block, policy=policies[remat], static_argnums=(4,))


class Transformer(nn.Module):
    """`config.layers` blocks named `block_00`, `block_01`, ..."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, position: jax.Array | None = None, *, train: bool = False) -> jax.Array:
        """Runs the blocks.

        Args:
          x: [b, t, width] in `config.dtype`.
          position: integer [b], from 0 and below t: the one token of each sequence that is asked for. The last block
            then computes for that token alone what it gathers from all. None for all tokens.
          train: turns dropout on; it then needs the "dropout" rng if the rate is not 0.

        Returns:
          [b, t, width], or [b, width] with a position, in `config.dtype`, not normalised.
        """
        c, (b, t, _) = self.config, x.shape
        block = _block_class(c.remat)
        padding = padding_for((b, t, c.heads, c.width // c.heads), c.dtype, c.attention)
        positions = t + padding
        # Rows are all tokens: with a batch axis XLA lays activations out in ways that have to be transposed again.
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0))).reshape(b * positions, c.width)
        added = None
        for i in range(c.layers):
            asked = position if i == c.layers - 1 else None
            x, added = block(c, positions, padding, name=f"block_{i:02d}")(x, added, asked, train)
            x = checkpoint_name(x, RESIDUAL)  # out here, where the policy of the block's own remat does not hide it
        x = x if added is None else route_gradient(x, added)
        return x if position is not None else x.reshape(b, positions, c.width)[:, :t]
