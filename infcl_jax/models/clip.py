"""CLIP dual encoder with learned logit scale and optional logit bias."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Integer, UInt8

from infcl_jax.ops.packing import PackedTokens

MAX_LOGIT_SCALE = 100.0  # Radford et al. 2021, section 2.5

# Parameter subtree of each encoder, see `CLIP`.
TOWERS = {"image": "visual", "text": "text"}

# Mean and standard deviation of OpenAI's CLIP training images, RGB in [0, 1].
OPENAI_IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)

Interpolation = Literal["bicubic", "bilinear"]
ResizeMode = Literal["shortest", "longest", "squash"]


class CLIPOutput(NamedTuple):
    """Model output: features, logit scale and logit bias.

    Examples:
      >>> output = jax.jit(model.apply)(variables, pixels, tokens)
      >>> loss = clip_loss(output.image, output.text, output.logit_scale)

    Attributes:
      image: [b, embed_dim], L2-normalized image features in the model's feature dtype.
      text: [b, embed_dim], L2-normalized text features in the model's feature dtype.
      logit_scale: float32 scalar that multiplies the similarities.
      logit_bias: float32 scalar added to the scaled similarities; None for a model without one.
    """

    image: Float[Array, "b embed_dim"]
    text: Float[Array, "b embed_dim"]
    logit_scale: Float32[Array, ""]
    logit_bias: Float32[Array, ""] | None


def l2_normalize(x: Float[Array, "*batch d"], dtype: Any) -> Float[Array, "*batch d"]:
    """Scale the last axis to unit length.

    Examples:
      >>> l2_normalize(jnp.array([3.0, 4.0]), "float32")
      Array([0.6, 0.8], dtype=float32)

    Args:
      x: [..., d], any floating dtype; the norm is computed in float32.
      dtype: dtype of the result.

    Returns:
      [..., d] in `dtype`. Vectors shorter than 1e-6 are divided by 1e-6 instead of their length, so that zero maps to
      zero with a finite gradient.
    """
    x = x.astype(jnp.float32)
    squared_norm = jnp.sum(x * x, axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(jnp.maximum(squared_norm, 1e-12))).astype(dtype)


def normalize_image(
    image: UInt8[Array, "*batch 3"],
    mean: Sequence[float] = OPENAI_IMAGE_MEAN,
    std: Sequence[float] = OPENAI_IMAGE_STD,
) -> Float32[Array, "*batch 3"]:
    """Normalize pixels by channel.

    Examples:
      >>> normalize_image(jnp.full((1, 1, 3), 255, jnp.uint8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
      Array([[[1., 1., 1.]]], dtype=float32)

    Args:
      image: uint8 [..., 3], 0 to 255.
      mean: mean of each channel, for images in [0, 1].
      std: standard deviation of each channel, for images in [0, 1].

    Returns:
      float32 [..., 3], `(image / 255 - mean) / std`.
    """
    per_channel = (1,) * (image.ndim - 1) + (3,)
    scaled = image.astype(jnp.float32) / 255.0
    shift, divisor = (jnp.array(values, jnp.float32).reshape(per_channel) for values in (mean, std))
    return (scaled - shift) / divisor


def clamp_logit_scale(params: Mapping[str, Any], max_logit_scale: float = MAX_LOGIT_SCALE) -> dict[str, Any]:
    """Clamp the stored `logit_scale` to [0, log `max_logit_scale`].

    Apply it after every optimizer update. The model itself does not limit the scale.

    Examples:
      >>> clamped = clamp_logit_scale({"logit_scale": jnp.float32(9.0)})
      >>> round(float(jnp.exp(clamped["logit_scale"])), 2)
      100.0

    Args:
      params: parameters of `CLIP`, with `logit_scale` on their first level.
      max_logit_scale: largest scale; CLIP's limit by default. `math.inf`: no limit, as for a sigmoid loss, with which
        published models have scales of 112 to 117.

    Returns:
      A copy of the parameters with `logit_scale` clamped; the argument is not modified.

    Raises:
      ValueError: `params` has no `logit_scale`.

    Source: Radford et al. 2021, section 2.5 (the limit of 100).
    """
    if "logit_scale" not in params:
        raise ValueError(
            f"expected the parameters of a CLIP model, with 'logit_scale', got keys {sorted(params)}; pass its 'params'"
        )
    scale = params["logit_scale"]
    return {**params, "logit_scale": jnp.clip(scale, 0.0, math.log(max_logit_scale))}


class CLIP(nn.Module):
    """Dual encoder of images and texts (Radford et al. 2021).

    Parameters: `visual` and `text`, one subtree per tower; `logit_scale`, the logarithm of the scale; `logit_bias`
    if `init_logit_bias` is given. `encode_image` and `encode_text` need the parameters of their tower only.
    `logit_scale_and_bias` needs the parameters of neither tower.

    Examples:
      >>> encode = jax.jit(lambda variables, pixels: model.apply(variables, pixels, method="encode_image"))
      >>> encode(variables, pixels).shape
      (8, 16)

    Attributes:
      visual: image tower, floating [b, H, W, 3] to [b, d], with an `image_size` attribute.
      text: text tower, integer [b, t] to [b, d], with a `context_length` attribute.
      feature_dtype: dtype of the normalized features.
      image_mean, image_std, interpolation, resize_mode, init_logit_scale, init_logit_bias: see `CLIPConfig`.
    """

    visual: nn.Module
    text: nn.Module
    feature_dtype: str = "float32"
    image_mean: tuple[float, float, float] = OPENAI_IMAGE_MEAN
    image_std: tuple[float, float, float] = OPENAI_IMAGE_STD
    interpolation: Interpolation = "bicubic"
    resize_mode: ResizeMode = "shortest"
    init_logit_scale: float = math.log(1 / 0.07)
    init_logit_bias: float | None = None

    def __call__(
        self,
        image: UInt8[Array, "b h w 3"] | Float[Array, "b h w 3"],
        text: Integer[Array, "b t"] | PackedTokens,
        *,
        train: bool = False,
    ) -> CLIPOutput:
        """Encode a batch of images and texts.

        Args:
          image: [b, image_size, image_size, 3], uint8, or floating and already normalized by mean and std.
          text: integer [b, t] token ids, t <= context_length.
          train: whether dropout and patch dropout are on; they need the "dropout" rng.

        Returns:
          `CLIPOutput`.

        Raises:
          ValueError: an argument has another shape or dtype; raised when the call is traced.
        """
        scale, bias = self.logit_scale_and_bias()
        return CLIPOutput(self.encode_image(image, train=train), self.encode_text(text, train=train), scale, bias)

    def encode_image(
        self, image: UInt8[Array, "b h w 3"] | Float[Array, "b h w 3"], *, train: bool = False
    ) -> Float[Array, "b embed_dim"]:
        """Encode a batch of images.

        Args:
          image: [b, image_size, image_size, 3], uint8, or floating and already normalized by mean and std.
          train: whether dropout and patch dropout are on; they need the "dropout" rng.

        Returns:
          [b, embed_dim], L2-normalized, in `feature_dtype`.

        Raises:
          ValueError: `image` has another shape or dtype; raised when the call is traced.
        """
        _check_image(image, self.visual.image_size)
        if image.dtype == jnp.uint8:
            image = normalize_image(image, self.image_mean, self.image_std)
        return l2_normalize(self.visual(image, train=train), self.feature_dtype)  # type: ignore[operator]

    def encode_text(
        self, text: Integer[Array, "b t"] | PackedTokens, *, train: bool = False
    ) -> Float[Array, "b embed_dim"]:
        """Encode a batch of texts.

        Args:
          text: integer [b, t] token ids, t <= context_length, or the same packed by `infcl_jax.data.Packing`.
          train: whether dropout is on; it needs the "dropout" rng.

        Returns:
          [b, embed_dim], L2-normalized, in `feature_dtype`.

        Raises:
          ValueError: `text` has another shape or dtype; raised when the call is traced.
        """
        _check_text(text.tokens if isinstance(text, PackedTokens) else text, self.text.context_length)
        return l2_normalize(self.text(text, train=train), self.feature_dtype)  # type: ignore[operator]

    @nn.compact
    def logit_scale_and_bias(self) -> tuple[Float32[Array, ""], Float32[Array, ""] | None]:
        """Return logit scale and logit bias, for losses over precomputed features.

        Returns:
          `exp(logit_scale)` and `logit_bias` (None without one), float32 scalars.
        """
        log_scale = self.param("logit_scale", nn.initializers.constant(self.init_logit_scale), (), jnp.float32)
        if self.init_logit_bias is None:
            return jnp.exp(log_scale), None
        bias = self.param("logit_bias", nn.initializers.constant(self.init_logit_bias), (), jnp.float32)
        return jnp.exp(log_scale), bias


@functools.lru_cache(maxsize=32)
def variable_shapes(model: nn.Module) -> Any:
    """Return the shapes and dtypes of a model's variables: parameters and running statistics.

    The result is cached, since tracing takes seconds.

    Examples:
      >>> shapes = variable_shapes(model)
      >>> shapes["params"]["logit_scale"].dtype
      dtype('float32')
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(model.init, key, *row_shapes(model, 1).values())


def row_shapes(model: Any, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch: uint8 images and int32 token ids, or token ids of queries and passages."""
    text = jax.ShapeDtypeStruct(
        (rows, model.text.context_length if isinstance(model, CLIP) else model.context_length), jnp.int32
    )
    if not isinstance(model, CLIP):
        return {"query": text, "passage": text}
    size = model.visual.image_size  # type: ignore[attr-defined]
    return {"image": jax.ShapeDtypeStruct((rows, size, size, 3), jnp.uint8), "text": text}


def _check_image(image: jax.Array, size: int) -> None:
    if image.ndim != 4 or image.shape[1:] != (size, size, 3):
        raise ValueError(f"expected images [b, {size}, {size}, 3], got shape {image.shape}; resize them first")
    if image.dtype != jnp.uint8 and not jnp.issubdtype(image.dtype, jnp.floating):
        raise ValueError(f"expected uint8 images or normalized floating ones, got dtype {image.dtype}; convert them")


def _check_text(text: Any, context_length: int) -> None:
    if text.ndim != 2 or not 1 <= text.shape[1] <= context_length:
        raise ValueError(
            f"expected token ids [b, t] with 1 <= t <= {context_length}, got shape {text.shape}; "
            "tokenize with the model's context length"
        )
    if not jnp.issubdtype(text.dtype, jnp.integer):
        raise ValueError(f"expected integer token ids, got dtype {text.dtype}; cast them to int32")
