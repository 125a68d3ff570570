"""Configurations of towers and dual encoders, and their checks."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from infcl_jax.models.bert import BertPool, BertProjection
from infcl_jax.models.clip import OPENAI_IMAGE_MEAN, OPENAI_IMAGE_STD, Interpolation, ResizeMode
from infcl_jax.models.resnet import ResNetConfig
from infcl_jax.models.text import TextPool
from infcl_jax.models.transformer_config import Projection, TowerConfig, TransformerConfig, canonicalize_dtypes
from infcl_jax.models.vit import Pool, PosEmbed
from infcl_jax.ops.bias_activation.api import Activation
from infcl_jax.ops.common.checks import check_choice, check_positive_int, check_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(TowerConfig):
    """Configuration of the Vision Transformer image tower.

    `VisionTransformer` describes the fields.

    Examples:
      >>> VisionConfig(width=768, layers=12, heads=12, patch_size=32).image_size
      224

    Raises:
      ValueError: a field has an invalid value.
    """

    image_size: int = 224
    patch_size: int = 16
    pool: Pool = "tok"
    patch_dropout: float = 0.0
    class_token: bool = True
    pos_embed: PosEmbed = "learnable"
    patch_bias: bool = False
    ln_pre: bool = True
    final_ln_after_pool: bool = False
    projection: Projection = "linear"
    projection_bias: bool = False

    def __post_init__(self) -> None:
        check_positive_int("vision.image_size", self.image_size)
        check_positive_int("vision.patch_size", self.patch_size)
        if self.image_size < self.patch_size:
            raise ValueError(
                "expected vision.image_size to be at least vision.patch_size, "
                f"got {self.image_size} and {self.patch_size}"
            )
        check_choice("vision.pool", self.pool, get_args(Pool))
        if self.pool == "tok" and not self.class_token:
            raise ValueError("expected vision.pool 'avg' or 'map' without class token, got 'tok'; choose one of them")
        check_choice("vision.pos_embed", self.pos_embed, get_args(PosEmbed))
        if self.pos_embed == "sin_cos_2d" and self.width % 4:
            raise ValueError(
                f"expected vision.width to be a multiple of 4 with vision.pos_embed 'sin_cos_2d', got {self.width}"
            )
        check_choice("vision.projection", self.projection, get_args(Projection))
        check_rate("vision.patch_dropout", self.patch_dropout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(TowerConfig):
    """Configuration of the text tower of CLIP and SigLIP.

    `TextTransformer` describes the fields.

    Examples:
      >>> TextConfig(width=512, layers=12, heads=8).context_length
      77

    Attributes:
      causal: whether a token attends only to itself and the tokens before it.

    Raises:
      ValueError: a field has an invalid value.
    """

    vocab_size: int = 49408
    context_length: int = 77
    causal: bool = True
    pool: TextPool = "end"
    end_token: int | None = None
    projection: Projection = "linear"
    projection_bias: bool = False

    def __post_init__(self) -> None:
        check_positive_int("text.vocab_size", self.vocab_size)
        check_positive_int("text.context_length", self.context_length)
        check_choice("text.pool", self.pool, get_args(TextPool))
        check_choice("text.projection", self.projection, get_args(Projection))
        if self.end_token is not None and not 0 <= self.end_token < self.vocab_size:
            raise ValueError(
                f"expected text.end_token in [0, {self.vocab_size}) (text.vocab_size) or None, got {self.end_token}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(TowerConfig):
    """Configuration of a BERT or RoBERTa text tower; the defaults are BERT's.

    `Bert` describes the fields. Attention runs in XLA, since the kernels have no mask of padding.

    Examples:
      >>> BertConfig(width=768, layers=12, heads=12, pool="cls").vocab_size
      30522

    Raises:
      ValueError: a field has an invalid value.
    """

    norm_epsilon: float = 1e-12
    vocab_size: int = 30522
    context_length: int = 77
    max_positions: int = 512
    position_offset: int = 0
    token_types: int = 2
    pad_id: int = 0
    pool: BertPool = "mean"
    projection: BertProjection = "mlp"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "max_positions", "token_types"):
            check_positive_int(f"text.{name}", getattr(self, name))
        if self.context_length > self.max_positions - self.position_offset:
            raise ValueError(
                f"expected text.context_length of at most {self.max_positions - self.position_offset} positions, "
                f"got {self.context_length}"
            )
        if not 0 <= self.pad_id < self.vocab_size:
            raise ValueError(f"expected text.pad_id in [0, {self.vocab_size}) (text.vocab_size), got {self.pad_id}")
        check_choice("text.pool", self.pool, get_args(BertPool))
        check_choice("text.projection", self.projection, get_args(BertProjection))
        check_choice("text.attention", self.attention, (None, "xla"))
        if self.layer_scale is not None:
            raise ValueError(f"expected no text.layer_scale in a BERT text tower, got {self.layer_scale}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig:
    """Configuration of a dual encoder.

    Examples:
      >>> tower = {"width": 64, "layers": 2, "heads": 2}
      >>> vision = VisionConfig(image_size=32, patch_size=8, **tower)
      >>> config = CLIPConfig(embed_dim=32, vision=vision, text=TextConfig(vocab_size=259, **tower))
      >>> build_model(config).visual.image_size
      32

    Attributes:
      embed_dim: size of the shared features.
      vision: image tower, a Vision Transformer or a ResNet.
      text: text tower, a CLIP or BERT transformer.
      activation: activation of the MLPs of towers without their own: "gelu", "gelu_tanh" or "quick_gelu" (for OpenAI's
        weights).
      dtype: dtype of activations and GEMMs.
      param_dtype: dtype of the towers' parameters; the logit scale and bias are always float32.
      feature_dtype: dtype of the normalized features; None for `dtype`.
      image_mean: mean of each channel, for images in [0, 1].
      image_std: standard deviation of each channel, for images in [0, 1], positive.
      interpolation: interpolation that resizes evaluated images, "bicubic" or "bilinear".
      resize_mode: how evaluated images become squares: "shortest" (resize the shorter side, crop the center), "longest"
        (resize the longer side, pad) or "squash" (ignore the aspect ratio).
      init_logit_scale: initial logarithm of the logit scale (log 10 in SigLIP).
      init_logit_bias: initial logit bias (-10 in SigLIP); None for no bias.

    Raises:
      ValueError: a field has an invalid value.
    """

    embed_dim: int
    vision: VisionConfig | ResNetConfig
    text: TextConfig | BertConfig
    activation: Activation = "gelu"
    dtype: str = "float32"
    param_dtype: str = "float32"
    feature_dtype: str | None = None
    image_mean: tuple[float, float, float] = OPENAI_IMAGE_MEAN
    image_std: tuple[float, float, float] = OPENAI_IMAGE_STD
    interpolation: Interpolation = "bicubic"
    resize_mode: ResizeMode = "shortest"
    init_logit_scale: float = math.log(1 / 0.07)
    init_logit_bias: float | None = None

    def __post_init__(self) -> None:
        check_positive_int("embed_dim", self.embed_dim)
        canonicalize_dtypes(self, "dtype", "param_dtype", "feature_dtype")
        for name in ("image_mean", "image_std"):
            values = tuple(getattr(self, name))
            if len(values) != 3 or (name == "image_std" and min(values) <= 0):
                positive = ", all positive" if name == "image_std" else ""
                raise ValueError(f"expected {name} to be three numbers{positive}, got {values}")
            object.__setattr__(self, name, values)  # a list from a config file would not hash
        check_choice("interpolation", self.interpolation, get_args(Interpolation))
        check_choice("resize_mode", self.resize_mode, get_args(ResizeMode))
        for name in ("vision", "text"):
            tower = getattr(self, name)
            if not isinstance(tower, TowerConfig):
                continue
            transformer_config(self, name)  # raises for invalid fields
            if getattr(tower, "projection", "linear") == "none" and tower.width != self.embed_dim:
                raise ValueError(
                    f"expected {name}.width to be embed_dim with {name}.projection 'none', "
                    f"got {tower.width} and {self.embed_dim}"
                )


_TOWERS = {kind.__name__: kind for kind in (VisionConfig, ResNetConfig, TextConfig, BertConfig)}


def config_to_json(config: CLIPConfig) -> dict[str, Any]:
    """Return the fields of a configuration for JSON, with the class of each tower as "type"."""
    towers = {name: {"type": type(getattr(config, name)).__name__} for name in ("vision", "text")}
    return {**(fields := dataclasses.asdict(config)), **{name: towers[name] | fields[name] for name in towers}}


def config_from_json(content: Mapping[str, Any]) -> CLIPConfig:
    """Return the configuration of `config_to_json`.

    Raises:
      ValueError: a field is unknown or has an invalid value.
    """
    try:
        towers = {name: dict(content[name]) for name in ("vision", "text")}
        built = {name: _TOWERS[fields.pop("type")](**fields) for name, fields in towers.items()}
        return CLIPConfig(**{**content, **built})
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the fields of a model of this version, got {error!r}") from error


def transformer_config(config: Any, tower: str) -> TransformerConfig:
    """Return the transformer configuration of the tower "vision" or "text" of a `CLIPConfig` or `TextPairConfig`.

    Raises:
      ValueError: the tower's fields are inconsistent with each other or with the model's dtype; the message starts with
        the tower.
    """
    tower_config = getattr(config, tower)
    fields = {field.name: getattr(tower_config, field.name) for field in dataclasses.fields(TowerConfig)}
    try:
        return TransformerConfig(
            **fields | {"activation": tower_config.activation or config.activation},
            causal=getattr(tower_config, "causal", False),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
        )
    except ValueError as error:
        raise ValueError(f"{tower}: {error}") from None
