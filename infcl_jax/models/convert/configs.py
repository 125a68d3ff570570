"""Configurations of modules, and changes to them."""

import dataclasses
from typing import Any

from infcl_jax.models.clip import CLIP
from infcl_jax.models.registry import CLIPConfig, TextConfig, VisionConfig, build_model
from infcl_jax.models.resnet import ResNet


def config_of(model: CLIP) -> CLIPConfig:
    """Return the configuration that builds a module, the inverse of `build_model`.

    Raises:
      ValueError: no configuration builds the module.
    """
    try:
        visual, text = model.visual, model.text
        vision = visual.config if isinstance(visual, ResNet) else VisionConfig(**_fields(VisionConfig, visual))
        config = CLIPConfig(
            vision=vision,
            text=TextConfig(**_fields(TextConfig, text)),
            embed_dim=visual.embed_dim,
            activation=text.config.activation,
            dtype=text.config.dtype,
            param_dtype=text.config.param_dtype,
            **{
                name: getattr(model, name)
                for name in ("feature_dtype", "image_mean", "image_std", "init_logit_scale", "init_logit_bias")
            },
        )
        if build_model(config) == model:
            return config
    except AttributeError:
        pass
    raise ValueError(f"expected a model that build_model builds, got {type(model).__name__} of other modules")


def _fields(kind: type, tower: Any) -> dict[str, Any]:
    """Read the fields of a tower's configuration from the module, or from its transformer's configuration."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: getattr(tower if hasattr(tower, name) else tower.config, name) for name in names}


def change_config(config: CLIPConfig, **overrides: Any) -> CLIPConfig:
    """Return a configuration with changes, see `infcl_jax.models.model_config`."""
    changes: dict[str, Any] = {name: value for name, value in overrides.items() if "." not in name}
    for tower in ("vision", "text"):
        fields = {name.removeprefix(f"{tower}."): v for name, v in overrides.items() if name.startswith(f"{tower}.")}
        changes[tower] = dataclasses.replace(getattr(config, tower), **fields)
    return dataclasses.replace(config, **changes)
