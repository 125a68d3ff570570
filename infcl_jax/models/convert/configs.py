"""Configurations of modules, and their comparison."""

import dataclasses
from typing import Any

from infcl_jax.models.bert import Bert
from infcl_jax.models.clip import CLIP
from infcl_jax.models.config import BertConfig, CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.registry import build_model
from infcl_jax.models.resnet import ResNet, ResNetConfig

# Fields of a tower that do not change what it computes in inference.
_TRAINING: dict[str, Any] = {"dropout": 0.0, "patch_dropout": 0.0, "remat": None, "attention": None}


def config_of(model: CLIP) -> CLIPConfig:
    """Return the configuration that builds a module, the inverse of `build_model`.

    Examples:
      >>> config_of(create_model("ViT-B/32")).vision.patch_size
      32

    Raises:
      ValueError: no configuration builds the module.
    """
    try:
        visual, text = model.visual, model.text
        vision = visual.config if isinstance(visual, ResNet) else VisionConfig(**_fields(VisionConfig, visual))
        kind = BertConfig if isinstance(text, Bert) else TextConfig
        config = CLIPConfig(
            vision=vision,
            text=kind(**_fields(kind, text)),
            embed_dim=visual.embed_dim,
            dtype=text.config.dtype,
            param_dtype=text.config.param_dtype,
            **{
                name: getattr(model, name)
                for name in ("feature_dtype", "image_mean", "image_std", "interpolation", "resize_mode")
            },
            init_logit_scale=model.init_logit_scale,
            init_logit_bias=model.init_logit_bias,
        )
        if build_model(config) == model:
            return config
    except AttributeError:
        pass
    raise ValueError(f"expected a model that build_model builds, got {type(model).__name__} of other modules")


def inference_config(config: CLIPConfig) -> CLIPConfig:
    """Normalize a configuration to what determines the features of given parameters.

    Dtypes, initial values and the settings of training are those of the defaults, and values that defaults replace are
    written out.
    """
    return dataclasses.replace(
        config,
        vision=inference_tower(config.vision, config.activation),
        text=inference_tower(config.text, config.activation),
        activation="gelu",
        dtype="float32",
        param_dtype="float32",
        feature_dtype=None,
        init_logit_scale=0.0,
        init_logit_bias=None if config.init_logit_bias is None else 0.0,
    )


def inference_tower(tower: Any, activation: str) -> Any:
    """Return the configuration of a tower in `inference_config`.

    Args:
      tower: configuration of the tower.
      activation: activation of a tower without its own.
    """
    if isinstance(tower, ResNetConfig):
        return tower
    fields = {field.name for field in dataclasses.fields(tower)}
    changes = {name: value for name, value in _TRAINING.items() if name in fields}
    changes["activation"] = tower.activation or activation
    changes["mlp_ratio"] = int(tower.width * tower.mlp_ratio) / tower.width
    changes["layer_scale"] = None if tower.layer_scale is None else 1.0
    if isinstance(tower, TextConfig) and tower.end_token == tower.vocab_size - 1:
        changes["end_token"] = None
    return dataclasses.replace(tower, **changes)


def bert_config_of(bert: Bert) -> BertConfig:
    """Return the configuration of a module that encodes queries or passages."""
    return BertConfig(**_fields(BertConfig, bert))


def _fields(kind: type, tower: Any) -> dict[str, Any]:
    """Read the fields of a tower's configuration from its module."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: getattr(tower if hasattr(tower, name) else tower.config, name) for name in names}
