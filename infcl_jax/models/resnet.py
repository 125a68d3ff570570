"""ResNet image tower of CLIP.

It has a three-layer stem, average pooling in place of strided convolutions after the stem, and a final attention pool.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from infcl_jax.models.layers import normal
from infcl_jax.ops.attention.api import xla_attention
from infcl_jax.ops.common.checks import check_positive_int

_REDUCTION = 32  # pixels per position of the last stage; also the ratio of its channels to the stem's
_EXPANSION = 4  # ratio of a bottleneck's output channels to its planes (He et al. 2016)
_EPSILON, _MOMENTUM = 1e-5, 0.1  # added to the variance, weight of a new batch statistic; PyTorch's defaults
# Uniform within fan_in^-1/2: PyTorch's default for convolutions, which OpenCLIP uses.
_CONV_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Configuration of the ResNet image tower.

    Examples:
      >>> ResNetConfig(layers=(3, 4, 23, 3)).image_size  # RN101
      224

    Attributes:
      width: channels after the stem; the last stage has 32 times as many.
      layers: number of bottlenecks of each of the four stages.
      heads: attention heads of the attention pool; divides 32 times the width.
      image_size: height and width of the input in pixels; a multiple of 32.

    Raises:
      ValueError: a field has an invalid value.
    """

    width: int = 64
    layers: tuple[int, int, int, int] = (3, 4, 6, 3)
    heads: int = 32
    image_size: int = 224

    def __post_init__(self) -> None:
        for name in ("width", "heads", "image_size"):
            check_positive_int(f"vision.{name}", getattr(self, name))
        object.__setattr__(self, "layers", tuple(self.layers))  # a list from a config file would not hash
        if len(self.layers) != 4:
            raise ValueError(
                f"expected vision.layers to be four numbers of bottlenecks, one per stage, got {self.layers}"
            )
        for blocks in self.layers:
            check_positive_int("vision.layers", blocks)
        if self.width % 2 or self.width * _REDUCTION % self.heads:
            raise ValueError(
                f"expected an even vision.width and vision.heads that divide {_REDUCTION} times it, "
                f"got {self.width} and {self.heads}"
            )
        if self.image_size % _REDUCTION:
            raise ValueError(f"expected vision.image_size to be a multiple of {_REDUCTION}, got {self.image_size}")

    @property
    def patch_size(self) -> int:
        """Height and width in pixels of a position of the last stage."""
        return _REDUCTION


class BatchNorm(nn.Module):
    """Float32 batch normalization with PyTorch's running statistics (Ioffe & Szegedy 2015).

    Parameters: `scale` and `bias`. Variables in the collection "batch_stats": running `mean` and `var` (unbiased). Each
    training batch updates them with weight 0.1 if that collection is mutable. In training, the layer normalizes by the
    statistics of the global batch under `jit`, and of one device's rows inside `shard_map`.
    """

    param_dtype: str
    scale_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], *, train: bool) -> Float32[Array, "b h w c"]:
        """Normalize [b, h, w, c] over all axes but the last, to float32."""
        x, channels = x.astype(jnp.float32), x.shape[-1:]
        scale = self.param("scale", self.scale_init, channels, self.param_dtype).astype(jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, self.param_dtype).astype(jnp.float32)
        if train:
            mean = x.mean((0, 1, 2))
            var = jnp.square(x - mean[None, None, None]).mean((0, 1, 2))
        if not train or self.is_mutable_collection("batch_stats"):
            running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
            running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
            if not train:
                mean, var = running_mean.value, running_var.value
            elif not self.is_initializing():
                count = x.size // x.shape[-1]
                unbiased = var * (count / max(1, count - 1))
                running_mean.value += _MOMENTUM * (mean - running_mean.value)
                running_var.value += _MOMENTUM * (unbiased - running_var.value)
        factor = scale * jax.lax.rsqrt(var + _EPSILON)
        return (x - mean[None, None, None]) * factor[None, None, None] + bias[None, None, None]


class AttentionPool(nn.Module):
    """Attention pool with the mean over positions as the only query (Radford et al. 2021, section 2.4).

    Parameters: `positional_embedding` [1 + positions, c], `q_proj`, `k_proj`, `v_proj`, `c_proj`.
    """

    heads: int
    embed_dim: int
    dtype: str
    param_dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float32[Array, "b {self.embed_dim}"]:
        """Map [b, h, w, c] to float32 [b, embed_dim]."""
        b, h, w, c = x.shape
        init = normal(c**-0.5)
        x = x.astype(jnp.float32).reshape(b, h * w, c)
        positions = self.param("positional_embedding", init, (1 + h * w, c), self.param_dtype).astype(jnp.float32)
        x = (jnp.concatenate([x.mean(1, keepdims=True), x], axis=1) + positions[None]).astype(self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=init)
        query = dense(c, name="q_proj")(x[:, :1])
        key, value = dense(c, name="k_proj")(x), dense(c, name="v_proj")(x)
        query, key, value = (a.reshape(b, -1, self.heads, c // self.heads) for a in (query, key, value))
        # `jax.nn.dot_product_attention` asks for an fp16 algorithm that XLA has on GPUs only.
        pooled = xla_attention(query, key, value, None, query.shape[-1] ** -0.5).reshape(b, c)
        output_projection = nn.Dense(
            self.embed_dim, dtype=jnp.float32, param_dtype=self.param_dtype, kernel_init=init, name="c_proj"
        )
        return output_projection(pooled)


class Bottleneck(nn.Module):
    """Bottleneck of 1x1, 3x3 and 1x1 convolutions (He et al. 2016); average pooling replaces strides."""

    planes: int
    stride: int
    dtype: str
    param_dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], *, train: bool) -> Float[Array, "b _ _ _"]:
        """Map [b, h, w, c] to [b, h/stride, w/stride, 4 planes]."""
        conv, norm = _conv_and_norm(self.dtype, self.param_dtype)
        out = nn.relu(norm(name="bn1")(conv(self.planes, (1, 1), name="conv1")(x), train=train))
        out = nn.relu(norm(name="bn2")(conv(self.planes, (3, 3), name="conv2")(out), train=train))
        out = conv(_EXPANSION * self.planes, (1, 1), name="conv3")(_average_pool(out, self.stride))
        out = norm(name="bn3", scale_init=nn.initializers.zeros)(out, train=train)
        if self.stride > 1 or x.shape[-1] != out.shape[-1]:
            x = conv(out.shape[-1], (1, 1), name="downsample_conv")(_average_pool(x, self.stride))
            x = norm(name="downsample_bn")(x, train=train)
        return nn.relu(out + x.astype(out.dtype)).astype(self.dtype)


class ResNet(nn.Module):
    """ResNet of CLIP, as OpenCLIP's "RN50".

    Source: Radford et al. 2021, section 2.4.

    Parameters: `conv1` to `conv3` and `bn1` to `bn3` of the stem, `layer1_0` to `layer4_2`, `attnpool`. Running
    statistics are in the collection "batch_stats".

    Examples:
      >>> tower = create_model("RN50").visual
      >>> tower.embed_dim
      1024

    Attributes:
      config: shape of the network.
      embed_dim: size of the features.
      dtype: dtype of activations and convolutions.
      param_dtype: dtype of the parameters.
    """

    config: ResNetConfig
    embed_dim: int
    dtype: str = "float32"
    param_dtype: str = "float32"

    @property
    def image_size(self) -> int:
        """Height and width of the input in pixels."""
        return self.config.image_size

    @nn.compact
    def __call__(self, image: Float[Array, "b h w 3"], *, train: bool = False) -> Float32[Array, "b {self.embed_dim}"]:
        """Encode images.

        Args:
          image: floating [b, image_size, image_size, 3], already normalized by mean and standard deviation.
          train: whether to normalize by batch statistics instead of running statistics.

        Returns:
          float32 [b, embed_dim], not normalized.
        """
        conv, norm = _conv_and_norm(self.dtype, self.param_dtype)
        width, x = self.config.width, image.astype(self.dtype)
        for number, (channels, stride) in enumerate(((width // 2, 2), (width // 2, 1), (width, 1)), start=1):
            x = conv(channels, (3, 3), strides=stride, padding=1, name=f"conv{number}")(x)
            x = nn.relu(norm(name=f"bn{number}")(x, train=train)).astype(self.dtype)
        x = _average_pool(x, 2)
        for stage, blocks in enumerate(self.config.layers):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"layer{stage + 1}_{block}"
                x = Bottleneck(width << stage, stride, self.dtype, self.param_dtype, name=name)(x, train=train)
        pool = AttentionPool(self.config.heads, self.embed_dim, self.dtype, self.param_dtype, name="attnpool")
        return pool(x)


def _conv_and_norm(dtype: str, param_dtype: str) -> tuple[Any, Any]:
    """Return constructors of convolutions without bias and of batch norms."""
    options: dict[str, Any] = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "kernel_init": _CONV_INIT}
    return functools.partial(nn.Conv, **options), functools.partial(BatchNorm, param_dtype)


def _average_pool(x: Float[Array, "b h w c"], size: int) -> Float[Array, "b _ _ c"]:
    """Average [b, h, w, c] over non-overlapping squares of `size` positions."""
    b, h, w, c = x.shape
    return x if size == 1 else x.reshape(b, h // size, size, w // size, size, c).mean((2, 4))
