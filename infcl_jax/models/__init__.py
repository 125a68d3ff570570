"""CLIP models: image and text towers, dual encoder and configurations."""

from infcl_jax.models.bert import Bert
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
    variable_shapes,
)
from infcl_jax.models.config import BertConfig, CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.convert import config_of, load_pretrained, save_pretrained
from infcl_jax.models.open_clip_config import read_open_clip_config
from infcl_jax.models.registry import build_model, create_model, model_config, model_names
from infcl_jax.models.resnet import ResNet, ResNetConfig
from infcl_jax.models.text import TextTransformer
from infcl_jax.models.text_pair import (
    TEXT_TOWERS,
    TextPair,
    TextPairConfig,
    TextPairOutput,
    text_pair_config,
    towers_of,
)
from infcl_jax.models.transformer import RESIDUAL
from infcl_jax.models.vit import VisionTransformer

__all__ = [
    "CLIP",
    "MAX_LOGIT_SCALE",
    "OPENAI_IMAGE_MEAN",
    "OPENAI_IMAGE_STD",
    "RESIDUAL",
    "TEXT_TOWERS",
    "TOWERS",
    "Bert",
    "BertConfig",
    "CLIPConfig",
    "CLIPOutput",
    "ResNet",
    "ResNetConfig",
    "TextConfig",
    "TextPair",
    "TextPairConfig",
    "TextPairOutput",
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
    "read_open_clip_config",
    "save_pretrained",
    "text_pair_config",
    "towers_of",
    "variable_shapes",
]
