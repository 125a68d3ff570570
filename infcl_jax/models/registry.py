"""Named model configurations and their models.

    model = create_model("ViT-B/16", **{"dtype": "bfloat16", "vision.remat": "dots"})

Shapes match OpenCLIP's configurations of the same names, so its weights can be converted.
"""

import dataclasses
import difflib
import math
from typing import Any, get_args

from infcl_jax.checks import check_choice, check_positive_int, check_rate
from infcl_jax.models.clip import CLIP, OPENAI_IMAGE_MEAN, OPENAI_IMAGE_STD
from infcl_jax.models.resnet import ResNet, ResNetConfig
from infcl_jax.models.text import TextTransformer
from infcl_jax.models.transformer import Remat, TransformerConfig, float_dtype_name
from infcl_jax.models.vit import Pool, VisionTransformer
from infcl_jax.ops.attention.api import AttentionImplementation
from infcl_jax.ops.bias_activation.api import Activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Configuration of one tower's transformer.

    `TransformerConfig` describes the fields and their valid values.
    """

    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    remat: Remat | None = None
    attention: AttentionImplementation | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(TowerConfig):
    """Configuration of the Vision Transformer image tower.

    Attributes:
      image_size: height and width of the input in pixels; a multiple of `patch_size`.
      patch_size: height and width of a patch in pixels.
      pool: "tok" (class token) or "avg" (mean over patches).
      patch_dropout: fraction of patches dropped when training (FLIP, Li et al. 2023).

    Raises:
      ValueError: a field has an invalid value.
    """

    image_size: int = 224
    patch_size: int = 16
    pool: Pool = "tok"
    patch_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive_int("vision.image_size", self.image_size)
        check_positive_int("vision.patch_size", self.patch_size)
        if self.image_size % self.patch_size:
            raise ValueError(
                "expected vision.image_size to be a multiple of vision.patch_size, "
                f"got {self.image_size} and {self.patch_size}"
            )
        check_choice("vision.pool", self.pool, get_args(Pool))
        check_rate("vision.patch_dropout", self.patch_dropout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(TowerConfig):
    """Configuration of the text tower.

    Attributes:
      vocab_size: number of token ids: 49408 for CLIP's byte-pair encoding, 259 for bytes.
      context_length: largest number of tokens, including the start and end tokens.
      end_token: id of the end token, whose features are pooled; None: the largest id of each text, as in CLIP.

    Raises:
      ValueError: a field has an invalid value.
    """

    vocab_size: int = 49408
    context_length: int = 77
    end_token: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("text.vocab_size", self.vocab_size)
        check_positive_int("text.context_length", self.context_length)
        if self.end_token is not None and not 0 <= self.end_token < self.vocab_size:
            raise ValueError(
                f"expected text.end_token in [0, {self.vocab_size}) (text.vocab_size) or None, got {self.end_token}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig:
    """Configuration of a dual encoder.

    Attributes:
      embed_dim: size of the shared features.
      vision: image tower, a Vision Transformer or a ResNet.
      text: text tower.
      activation: activation of both towers' MLPs, "gelu" or "quick_gelu" (for OpenAI's weights).
      dtype: dtype of activations and GEMMs.
      param_dtype: dtype of the towers' parameters; the logit scale and bias are always float32.
      feature_dtype: dtype of the normalized features; None for `dtype`.
      image_mean: mean of each channel, for images in [0, 1].
      image_std: standard deviation of each channel, for images in [0, 1], positive.
      init_logit_scale: initial logarithm of the logit scale (log 10 in SigLIP).
      init_logit_bias: initial logit bias (-10 in SigLIP); None for no bias.

    Raises:
      ValueError: a field has an invalid value.
    """

    embed_dim: int
    vision: VisionConfig | ResNetConfig
    text: TextConfig
    activation: Activation = "gelu"
    dtype: str = "float32"
    param_dtype: str = "float32"
    feature_dtype: str | None = None
    image_mean: tuple[float, float, float] = OPENAI_IMAGE_MEAN
    image_std: tuple[float, float, float] = OPENAI_IMAGE_STD
    init_logit_scale: float = math.log(1 / 0.07)
    init_logit_bias: float | None = None

    def __post_init__(self) -> None:
        check_positive_int("embed_dim", self.embed_dim)
        for name in ("dtype", "param_dtype", "feature_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float_dtype_name(name, getattr(self, name)))
        for name in ("image_mean", "image_std"):
            values = tuple(getattr(self, name))
            if len(values) != 3 or (name == "image_std" and min(values) <= 0):
                positive = ", all positive" if name == "image_std" else ""
                raise ValueError(f"expected {name} to be three numbers{positive}, got {values}")
            object.__setattr__(self, name, values)  # a list from a config file would not hash
        for tower in ("vision", "text"):
            if isinstance(getattr(self, tower), TowerConfig):
                transformer_config(self, tower)  # raises for invalid fields


def transformer_config(config: CLIPConfig, tower: str) -> TransformerConfig:
    """Return the transformer configuration of one tower.

    Args:
      config: model configuration.
      tower: "vision" or "text".

    Raises:
      ValueError: the tower's fields are inconsistent with each other or with the model's dtype; the message starts with
        the tower.
    """
    tower_config = getattr(config, tower)
    fields = {field.name: getattr(tower_config, field.name) for field in dataclasses.fields(TowerConfig)}
    try:
        return TransformerConfig(
            **fields,
            causal=tower == "text",
            activation=config.activation,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
        )
    except ValueError as error:
        raise ValueError(f"{tower}: {error}") from None


def _tiny(width: int, layers: int, text_width: int, context_length: int) -> CLIPConfig:
    """Build a tiny configuration that a CPU trains in minutes.

    It takes byte-level text and 32-pixel images.
    """
    return CLIPConfig(
        embed_dim=width,
        vision=VisionConfig(width=width, layers=layers, heads=width // 32, image_size=32, patch_size=8),
        text=TextConfig(
            width=text_width, layers=2, heads=text_width // 32, vocab_size=259, context_length=context_length
        ),
        activation="quick_gelu",
    )


def _vit(embed_dim: int, width: int, layers: int, patch_size: int, text_width: int) -> CLIPConfig:
    """Build an OpenCLIP ViT configuration with heads of 64 channels and 12 text layers."""
    return CLIPConfig(
        embed_dim=embed_dim,
        vision=VisionConfig(width=width, layers=layers, heads=width // 64, patch_size=patch_size),
        text=TextConfig(width=text_width, layers=12, heads=text_width // 64),
    )


def _resnet(embed_dim: int, layers: tuple[int, int, int, int], text_width: int) -> CLIPConfig:
    """Build an OpenCLIP ResNet configuration with 12 text layers."""
    return CLIPConfig(
        embed_dim=embed_dim,
        vision=ResNetConfig(layers=layers),
        text=TextConfig(width=text_width, layers=12, heads=text_width // 64),
    )


_CONFIGS: dict[str, CLIPConfig] = {
    "tiny": _tiny(width=64, layers=2, text_width=64, context_length=77),
    "tiny-shapes": _tiny(width=96, layers=3, text_width=64, context_length=60),
    "ViT-S/16": _vit(embed_dim=384, width=384, layers=12, patch_size=16, text_width=384),
    "ViT-B/32": _vit(embed_dim=512, width=768, layers=12, patch_size=32, text_width=512),
    "ViT-B/16": _vit(embed_dim=512, width=768, layers=12, patch_size=16, text_width=512),
    "ViT-L/14": _vit(embed_dim=768, width=1024, layers=24, patch_size=14, text_width=768),
    "RN50": _resnet(embed_dim=1024, layers=(3, 4, 6, 3), text_width=512),
}


def model_names() -> tuple[str, ...]:
    """Return the names accepted by `model_config` and `create_model`."""
    return tuple(_CONFIGS)


def model_config(name: str, **overrides: Any) -> CLIPConfig:
    """Return the configuration of a named model.

    Args:
      name: one of `model_names()`.
      **overrides: new values by field; a tower's fields have a prefix: `{"dtype": "bfloat16", "vision.remat": "full"}`.

    Returns:
      The configuration with all overrides applied at once, so only their combination must be valid.

    Raises:
      ValueError: an unknown name or key (the message lists the known ones), or an invalid value of a field.
    """
    check_choice("model", name, model_names())
    config = _CONFIGS[name]
    known = _override_keys(config)
    if unknown := [key for key in overrides if key not in known]:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"expected model overrides among {', '.join(known)}, got {unknown[0]!r}{hint}")
    changes: dict[str, Any] = {key: value for key, value in overrides.items() if "." not in key}
    for tower in ("vision", "text"):
        prefix = f"{tower}."
        fields = {key.removeprefix(prefix): value for key, value in overrides.items() if key.startswith(prefix)}
        changes[tower] = dataclasses.replace(getattr(config, tower), **fields)
    return dataclasses.replace(config, **changes)


def _override_keys(config: CLIPConfig) -> list[str]:
    """Return the keys of `model_config`'s overrides: fields, and prefixed fields of the towers."""
    keys: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        keys += [f"{field.name}.{sub.name}" for sub in nested] or [field.name]
    return keys


def _image_tower(config: CLIPConfig) -> VisionTransformer | ResNet:
    vision = config.vision
    if isinstance(vision, ResNetConfig):
        return ResNet(vision, config.embed_dim, config.dtype, config.param_dtype)
    return VisionTransformer(
        config=transformer_config(config, "vision"),
        embed_dim=config.embed_dim,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        pool=vision.pool,
        patch_dropout=vision.patch_dropout,
    )


def build_model(config: CLIPConfig) -> CLIP:
    """Build the module of a configuration.

    Equal configurations give equal modules, so they share the functions that `jax.jit` compiled.
    """
    text = config.text
    return CLIP(
        visual=_image_tower(config),
        text=TextTransformer(
            config=transformer_config(config, "text"),
            embed_dim=config.embed_dim,
            vocab_size=text.vocab_size,
            context_length=text.context_length,
            end_token=text.end_token,
        ),
        feature_dtype=config.feature_dtype or config.dtype,
        image_mean=config.image_mean,
        image_std=config.image_std,
        init_logit_scale=config.init_logit_scale,
        init_logit_bias=config.init_logit_bias,
    )


def create_model(name: str, **overrides: Any) -> CLIP:
    """Build a named model.

    Args:
      name: one of `model_names()`.
      **overrides: new values by field, see `model_config`.

    Returns:
      A `CLIP` module; `init` creates its variables.

    Raises:
      ValueError: an unknown name or key, or an invalid value of a field.

    Example:
      model = create_model("tiny", **{"vision.layers": 4, "init_logit_bias": -10.0})
      image, text = jnp.zeros((1, 32, 32, 3), jnp.uint8), jnp.zeros((1, 77), jnp.int32)
      variables = model.init(jax.random.key(0), image, text)
      output = model.apply(variables, image, text)
    """
    return build_model(model_config(name, **overrides))
