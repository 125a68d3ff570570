"""CLIP models: image and text towers, dual encoder and named configurations."""

from infcl_jax.models.clip import (
    CLIP,
    MAX_LOGIT_SCALE,
    OPENAI_IMAGE_MEAN,
    OPENAI_IMAGE_STD,
    TOWERS,
    CLIPOutput,
    clamp_logit_scale,
    l2_normalize,
    normalize_image,
)
from infcl_jax.models.convert import Certificate, config_of, load_pretrained, save_pretrained
from infcl_jax.models.registry import (
    CLIPConfig,
    TextConfig,
    VisionConfig,
    build_model,
    create_model,
    model_config,
    model_names,
)
from infcl_jax.models.resnet import ResNet, ResNetConfig
from infcl_jax.models.text import TextTransformer
from infcl_jax.models.transformer import RESIDUAL
from infcl_jax.models.vit import VisionTransformer

__all__ = [
    "CLIP",
    "MAX_LOGIT_SCALE",
    "OPENAI_IMAGE_MEAN",
    "OPENAI_IMAGE_STD",
    "RESIDUAL",
    "TOWERS",
    "CLIPConfig",
    "CLIPOutput",
    "Certificate",
    "ResNet",
    "ResNetConfig",
    "TextConfig",
    "TextTransformer",
    "VisionConfig",
    "VisionTransformer",
    "build_model",
    "clamp_logit_scale",
    "config_of",
    "create_model",
    "l2_normalize",
    "load_pretrained",
    "model_config",
    "model_names",
    "normalize_image",
    "save_pretrained",
]
