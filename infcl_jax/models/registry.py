"""Models by name or OpenCLIP configuration.

    model = create_model("ViT-B-16", **{"dtype": "bfloat16", "vision.remat": "dots"})
    model = create_model("model_configs/ViT-B-16.json")

Shapes match OpenCLIP's configurations of the same names, so its weights can be converted.
"""

import dataclasses
import difflib
from pathlib import Path
from typing import Any, overload

import flax.linen as nn
import jax

from infcl_jax.models.bert import Bert
from infcl_jax.models.clip import CLIP, variable_shapes
from infcl_jax.models.config import (
    BertConfig,
    CLIPConfig,
    TextConfig,
    VisionConfig,
    config_from_json,
    transformer_config,
)
from infcl_jax.models.json_section import LARGEST_DEPTH, LARGEST_SIDE, LARGEST_SIZE, Section, check_grid
from infcl_jax.models.names import CONFIGS
from infcl_jax.models.open_clip_config import read_open_clip_config
from infcl_jax.models.resnet import ResNet, ResNetConfig
from infcl_jax.models.text import TextTransformer
from infcl_jax.models.text_pair import TextPair, TextPairConfig, text_pair_config
from infcl_jax.models.vit import VisionTransformer
from infcl_jax.runtime.file_io import CONFIG_BYTES, read_json

MODEL_FILE = "init_model.json"  # of a run whose model is `init.model`'s
# Fields of a tower that do not change what it computes in inference.
_TRAINING: dict[str, Any] = {"dropout": 0.0, "patch_dropout": 0.0, "remat": None, "attention": None}
_LARGEST = {"layers": LARGEST_DEPTH, "image_size": LARGEST_SIDE, "patch_size": LARGEST_SIDE}  # others: LARGEST_SIZE


def model_names() -> tuple[str, ...]:
    """Return the names accepted by `model_config` and `create_model`: OpenCLIP's, and "tiny" and "tiny-shapes".

    The papers' spelling with a slash, such as "ViT-B/16", is accepted too.

    Examples:
      >>> [name for name in model_names() if name.startswith("ViT-B-32")][:2]
      ['ViT-B-32', 'ViT-B-32-quickgelu']
    """
    return tuple(CONFIGS)


def model_config(name: str, **overrides: Any) -> CLIPConfig:
    """Return the configuration of a model.

    Examples:
      >>> config = model_config("ViT-B/32", dtype="bfloat16", **{"vision.image_size": 256})
      >>> config.embed_dim, config.vision.image_size
      (512, 256)

    Args:
      name: one of `model_names()`, or the path of an OpenCLIP configuration, see `read_open_clip_config`.
      **overrides: new values by field; a tower's fields have a prefix: `{"dtype": "bfloat16", "vision.remat": "full"}`.

    Returns:
      The configuration with all overrides applied at once, so only their combination must be valid.

    Raises:
      ValueError: an unknown name or key (the message lists the known ones), a configuration that is not supported, or
        an invalid value of a field.
    """
    return change_config(_base_config(name), **overrides)


def change_config[Config: (CLIPConfig, TextPairConfig)](config: Config, **overrides: Any) -> Config:
    """Return a configuration with overrides, see `model_config`.

    Raises:
      ValueError: an unknown key (the message lists the known ones), or an invalid value of a field.
    """
    known = _override_keys(config)
    if unknown := [key for key in overrides if key not in known]:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"expected model overrides among {', '.join(known)}, got {unknown[0]!r}{hint}")
    for key, value in overrides.items():
        largest = _LARGEST.get(key.rpartition(".")[2], LARGEST_SIZE)
        values = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, int | float) and abs(number) > largest for number in values):
            Section("", overrides).refuse(key, f"at most {largest}", value)
    changes: dict[str, Any] = {key: value for key, value in overrides.items() if "." not in key}
    for tower in ("vision", "text") if isinstance(config, CLIPConfig) else ("text",):
        prefix = f"{tower}."
        fields = {key.removeprefix(prefix): value for key, value in overrides.items() if key.startswith(prefix)}
        changes[tower] = dataclasses.replace(getattr(config, tower), **fields)
    config = dataclasses.replace(config, **changes)
    if isinstance(config, CLIPConfig):
        vision = config.vision
        channels = vision.width * (32 if isinstance(vision, ResNetConfig) else 1)
        check_grid(vision.image_size, vision.patch_size, channels)
    return config


def _base_config(name: str) -> CLIPConfig:
    if (key := name.replace("/", "-")) in CONFIGS:
        return CONFIGS[key]
    if name.endswith(MODEL_FILE):
        return config_from_json(read_json(name, limit=CONFIG_BYTES))
    if name.endswith(".json") or Path(name).is_dir():
        return read_open_clip_config(name)
    if text_pair_config(name) is not None:
        raise ValueError(
            f"expected a model of images and texts, got model={name!r} of queries and passages; see "
            "docs/dense_retrieval.md"
        )
    close = difflib.get_close_matches(key, CONFIGS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"expected model to be one of {model_names()} or the path of an OpenCLIP JSON config, got {name!r}{hint}"
    )


def _override_keys(config: CLIPConfig | TextPairConfig) -> list[str]:
    """Return the keys of `model_config`'s overrides: fields, and prefixed fields of the towers."""
    keys: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        keys += [f"{field.name}.{sub.name}" for sub in nested] or [field.name]
    return keys


def _tower(kind: type[nn.Module], config: CLIPConfig | TextPairConfig, name: str) -> Any:
    """Build the module of the tower "vision" or "text" with a transformer."""
    tower, transformer = getattr(config, name), transformer_config(config, name)
    own = {field.name for field in dataclasses.fields(tower)} - {
        field.name for field in dataclasses.fields(transformer)
    }
    return kind(config=transformer, embed_dim=config.embed_dim, **{field: getattr(tower, field) for field in own})


def _image_tower(config: CLIPConfig) -> VisionTransformer | ResNet:
    if isinstance(config.vision, ResNetConfig):
        return ResNet(config.vision, config.embed_dim, config.dtype, config.param_dtype)
    return _tower(VisionTransformer, config, "vision")


def _text_tower(config: CLIPConfig | TextPairConfig) -> TextTransformer | Bert:
    return _tower(Bert if isinstance(config.text, BertConfig) else TextTransformer, config, "text")


@overload
def build_model(config: CLIPConfig) -> CLIP: ...
@overload
def build_model(config: TextPairConfig) -> TextPair: ...
def build_model(config: CLIPConfig | TextPairConfig) -> CLIP | TextPair:
    """Build the module of a configuration.

    Equal configurations give equal modules, so they share the functions that `jax.jit` compiled.

    Examples:
      >>> build_model(model_config("tiny")) == create_model("tiny")
      True
    """
    if isinstance(config, TextPairConfig):
        return TextPair(
            text=_text_tower(config) if config.tied else None,
            query=None if config.tied else _text_tower(config),
            passage=None if config.tied else _text_tower(config),
            feature_dtype=config.feature_dtype or config.dtype,
            normalize=config.normalize,
            scale=config.logit_scale,
        )
    return CLIP(
        visual=_image_tower(config),
        text=_text_tower(config),
        feature_dtype=config.feature_dtype or config.dtype,
        image_mean=config.image_mean,
        image_std=config.image_std,
        interpolation=config.interpolation,
        resize_mode=config.resize_mode,
        init_logit_scale=config.init_logit_scale,
        init_logit_bias=config.init_logit_bias,
    )


def create_model(name: str, **overrides: Any) -> CLIP:
    """Build a model.

    Args:
      name: one of `model_names()`, or the path of an OpenCLIP configuration.
      **overrides: new values by field, see `model_config`.

    Returns:
      A `CLIP` module; `init` creates its variables.

    Raises:
      ValueError: see `model_config`.

    Examples:
      >>> small = create_model("tiny", **{"vision.layers": 1, "text.layers": 1, "init_logit_bias": -10.0})
      >>> pixels, tokens = jnp.zeros((1, 32, 32, 3), jnp.uint8), jnp.zeros((1, 77), jnp.int32)
      >>> output = jax.eval_shape(lambda: small.init_with_output(jax.random.key(0), pixels, tokens))[0]
      >>> output.image.shape
      (1, 64)
    """
    return build_model(model_config(name, **overrides))


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

    Dtypes, initial values and the settings of training are the defaults, and values that defaults replace are
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
    """Return the configuration of a tower in `inference_config`; `activation` is for a tower without its own."""
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


def prefix_model(config: CLIPConfig, variables: Any, dim: int) -> tuple[CLIPConfig, Any]:
    """Cut the projections of a model to the first `dim` features.

    The features of the new model are the normalized prefixes of the given one's.

    Returns:
      The configuration with `embed_dim=dim` and its variables.

    Raises:
      ValueError: `dim` is not in [1, embed_dim], or the model's projections are not linear.
    """
    if not 1 <= dim <= config.embed_dim:
        raise ValueError(f"expected dim between 1 and {config.embed_dim}, the size of the features, got {dim}")
    small = dataclasses.replace(config, embed_dim=dim)

    def cut(leaf: Any, target: jax.ShapeDtypeStruct) -> Any:
        if leaf.shape[:-1] != target.shape[:-1]:
            raise ValueError(f"expected a model with linear projections with dim={dim}, got another")
        return leaf[..., : target.shape[-1]] if target.shape else leaf

    shapes = variable_shapes(build_model(small))
    return small, {**variables, **jax.tree.map(cut, {name: variables[name] for name in shapes}, shapes)}
