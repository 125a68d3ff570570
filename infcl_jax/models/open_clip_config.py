"""OpenCLIP's JSON model configurations.

Fields have the names, meanings and defaults of OpenCLIP 3.3's `CLIPVisionCfg`, `CLIPTextCfg`, `CLIP` and
`PreprocessCfg`.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_jax.models.clip import OPENAI_IMAGE_MEAN, OPENAI_IMAGE_STD
from infcl_jax.models.config import BertConfig, CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.json_section import LARGEST_DEPTH, LARGEST_SIZE, Section, check_grid
from infcl_jax.models.names import bert_config, timm_vision_config
from infcl_jax.models.resnet import ResNetConfig
from infcl_jax.ops.bias_activation.api import Activation
from infcl_jax.ops.layer_norm.api import LAYER_NORM_EPSILON
from infcl_jax.runtime.file_io import CONFIG_BYTES, read_json

CONFIG_FILE = "open_clip_config.json"  # of OpenCLIP's model folders

# OpenCLIP's "random" is for training; its evaluation is bicubic then.
_INTERPOLATIONS = {"bicubic": "bicubic", "bilinear": "bilinear", "random": "bicubic", None: "bicubic"}
_RESIZE_MODES = {"shortest": "shortest", "longest": "longest", "squash": "squash", None: "shortest"}
_POOLS = {"tok": "tok", "avg": "avg"}
_TEXT_POOLS = {"argmax": "end", "eos": "end", "first": "first", "last": "last"}
_HF_POOLS = {"mean_pooler": "mean", "cls_pooler": "pooler", "cls_last_hidden_state_pooler": "cls"}
_HF_PROJECTIONS = {"linear": "linear", "mlp": "mlp", None: "none"}

# Fields that are supported at their defaults only.
_PLAIN_BLOCK = "qk_norm scaled_cosine_attn scale_heads scale_attn_inner scale_attn scale_fc output_tokens"
_PLAIN_VISION: dict[str, Any] = dict.fromkeys(_PLAIN_BLOCK.split(), False) | {"attentional_pool": False}
_PLAIN_TIMM: dict[str, Any] = {"timm_drop": 0.0, "timm_drop_path": 0.0}
_PLAIN_TEXT: dict[str, Any] = dict.fromkeys(_PLAIN_BLOCK.split(), False) | {"embed_cls": False}

# Names of all fields. Those of tokenizers, pretrained weights and absent parts do not change the model.
_MODEL_FIELDS = """
embed_dim vision_cfg text_cfg quick_gelu init_logit_scale init_logit_bias nonscalar_logit_scale custom_text
multimodal_cfg
"""
_TOWER_FIELDS = f"""
layers width mlp_ratio ls_init_value pool_type final_ln_after_pool block_type act_kwargs norm_kwargs {_PLAIN_BLOCK}
"""
_VISION_FIELDS = f"""{_TOWER_FIELDS}
head_width patch_size image_size patch_dropout no_ln_pre pos_embed_type attentional_pool attn_pooler_queries
attn_pooler_heads timm_model_name timm_model_pretrained timm_pool timm_proj timm_proj_bias timm_drop timm_drop_path
"""
_TEXT_FIELDS = f"""{_TOWER_FIELDS}
context_length vocab_size heads pad_id eos_id no_causal_mask proj_bias proj_type embed_cls hf_tokenizer_name
tokenizer_mode tokenizer_kwargs hf_model_name hf_model_pretrained hf_proj_type hf_pooler_type
"""
_IMAGE_FIELDS = "size mode mean std interpolation resize_mode fill_color"


def read_open_clip_config(source: str | os.PathLike | Mapping[str, Any]) -> CLIPConfig:
    """Read a model configuration of OpenCLIP.

    Examples:
      >>> tower = {"width": 64, "layers": 2, "heads": 1}
      >>> vision = {"width": 64, "layers": 2, "image_size": 32, "patch_size": 8}
      >>> config = read_open_clip_config({"embed_dim": 32, "text_cfg": tower, "vision_cfg": vision})
      >>> config.vision.patch_size
      8

    Args:
      source: path of a JSON file, path of a folder with `open_clip_config.json`, or the JSON object. The object is a
        model configuration, or has the keys "model_cfg" and "preprocess_cfg".

    Returns:
      The configuration. Without "preprocess_cfg", images are preprocessed as OpenAI's. The tokenizer is not part of it.

    Raises:
      ValueError: the file is missing or no JSON, or a field is unknown or has a value that is not supported; the
        message names the field.
    """
    config = source if isinstance(source, Mapping) else _read_json(Path(source))
    if isinstance(config, Mapping) and "model_cfg" in config:
        Section("", config, {"model_cfg", "preprocess_cfg"})
        return _clip_config(config["model_cfg"], config.get("preprocess_cfg"))
    return _clip_config(config, None)


def _read_json(path: Path) -> Any:
    path = path / CONFIG_FILE if path.is_dir() else path
    try:
        return read_json(path, limit=CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"expected the JSON config of an OpenCLIP model, got {str(path)!r}: {error}") from None


def _clip_config(config: Any, preprocess: Any) -> CLIPConfig:
    model = Section("", config, _MODEL_FIELDS.split())
    model.only({"multimodal_cfg": None, "nonscalar_logit_scale": False})
    for field in ("embed_dim", "vision_cfg", "text_cfg"):
        if model.get(field) is None:
            model.refuse(field, "given", None)
    images = Section("preprocess_cfg", {} if preprocess is None else preprocess, _IMAGE_FIELDS.split())
    images.only({"mode": "RGB", "fill_color": 0})
    quick_gelu = model.flag("quick_gelu")
    has_scale, has_bias = (model.get(f"init_logit_{name}") is not None for name in ("scale", "bias"))
    return CLIPConfig(
        embed_dim=model.count("embed_dim"),
        vision=_vision_config(Section("vision_cfg", model.get("vision_cfg"), _VISION_FIELDS.split()), quick_gelu),
        text=_text_config(Section("text_cfg", model.get("text_cfg"), _TEXT_FIELDS.split()), quick_gelu),
        activation="quick_gelu" if quick_gelu else "gelu",
        image_mean=images.numbers("mean", OPENAI_IMAGE_MEAN),  # type: ignore[arg-type]
        image_std=images.numbers("std", OPENAI_IMAGE_STD),  # type: ignore[arg-type]
        interpolation=images.choice("interpolation", _INTERPOLATIONS, "bicubic"),
        resize_mode=images.choice("resize_mode", _RESIZE_MODES, None),
        init_logit_scale=float(model.number("init_logit_scale", 0.0)) if has_scale else math.log(1 / 0.07),
        init_logit_bias=float(model.number("init_logit_bias", 0.0)) if has_bias else None,
    )


def _vision_config(vision: Section, quick_gelu: bool) -> VisionConfig | ResNetConfig:
    vision.only(_PLAIN_VISION)
    image_size = vision.side("image_size", 224)
    if vision.text("timm_model_name"):
        return _timm_config(vision, image_size)
    layers, width, head_width = vision.get("layers"), vision.count("width", 768), vision.count("head_width", 64)
    if isinstance(layers, list | tuple):
        stages = tuple(vision.with_value("layers", n).count("layers", largest=LARGEST_DEPTH) for n in layers)
        check_grid(image_size, 32, width * 32)
        return ResNetConfig(width=width, layers=stages, heads=width * 32 // head_width, image_size=image_size)  # type: ignore[arg-type]
    patch_size = vision.side("patch_size", 16)
    check_grid(image_size, patch_size, width)
    return VisionConfig(
        width=width,
        layers=vision.count("layers", 12, LARGEST_DEPTH),
        heads=width // head_width,
        image_size=image_size,
        patch_size=patch_size,
        pool=vision.choice("pool_type", _POOLS, "tok"),
        patch_dropout=vision.number("patch_dropout", 0.0),
        pos_embed=vision.choice("pos_embed_type", {name: name for name in ("learnable", "sin_cos_2d")}, "learnable"),
        ln_pre=not vision.flag("no_ln_pre"),
        final_ln_after_pool=vision.flag("final_ln_after_pool"),
        **_block_fields(vision, quick_gelu),
    )


def _timm_config(vision: Section, image_size: int) -> VisionConfig:
    """Return the configuration of a timm tower; its name determines the shape."""
    try:
        config = timm_vision_config(vision.text("timm_model_name"))
    except ValueError as error:
        raise ValueError(f"vision_cfg.timm_model_name: {error}") from None
    vision.only(_PLAIN_TIMM)
    if config.image_size != image_size:
        vision.refuse("image_size", f"{config.image_size}, as in the timm name", image_size)
    # "none" has no projection; "" and null select timm's own classifier, which has a bias.
    projection = vision.choice("timm_proj", {"none": "none", "linear": "linear", "": "bias", None: "bias"}, "linear")
    # "" leaves timm's own pool, but without projection it pools nothing.
    vision.choice("timm_pool", {"map": "map"} | ({"": "map"} if projection == "linear" else {}), "avg")
    has_bias = projection == "bias" or (projection == "linear" and vision.flag("timm_proj_bias"))
    return dataclasses.replace(
        config,
        patch_dropout=vision.number("patch_dropout", 0.0),
        projection="none" if projection == "none" else "linear",
        projection_bias=has_bias,
    )


def _text_config(text: Section, quick_gelu: bool) -> TextConfig | BertConfig:
    text.only(_PLAIN_TEXT)
    context_length = text.count("context_length", 77)
    if text.text("hf_model_name"):
        pool = text.choice("hf_pooler_type", _HF_POOLS, "mean_pooler")
        head = text.choice("hf_proj_type", _HF_PROJECTIONS, "mlp")
        try:
            return bert_config(text.text("hf_model_name"), context_length=context_length, pool=pool, projection=head)
        except ValueError as error:
            raise ValueError(f"text_cfg.hf_model_name: {error}") from None
    vocab_size = text.count("vocab_size", 49408)
    projection = text.choice("proj_type", {"linear": "linear", "none": "none"}, "linear")
    return TextConfig(
        width=text.count("width", 512),
        layers=text.count("layers", 12, LARGEST_DEPTH),
        heads=text.count("heads", 8),
        vocab_size=vocab_size,
        context_length=context_length,
        causal=not text.flag("no_causal_mask"),
        pool=text.choice("pool_type", _TEXT_POOLS, "argmax"),
        end_token=text.index("eos_id", 2, vocab_size) if text.get("pool_type") == "eos" else None,
        projection=projection,
        projection_bias=text.flag("proj_bias") and projection == "linear",
        **_block_fields(text, quick_gelu),
    )


def _block_fields(tower: Section, quick_gelu: bool) -> dict[str, Any]:
    """Return the fields of the blocks that the configurations of both towers share."""
    tower.choice("block_type", dict.fromkeys((None, "default", "custom")), None)
    gelus: dict[str, Activation | None] = {"none": None, "tanh": "gelu_tanh"}
    arguments = tower.section("act_kwargs", {"approximate"})
    if quick_gelu and arguments.get("approximate") is not None:
        tower.refuse("act_kwargs", "null with quick_gelu", tower.get("act_kwargs"))
    return {
        "mlp_ratio": tower.number("mlp_ratio", 4.0, 1 / LARGEST_SIZE, LARGEST_SIZE),
        "activation": arguments.choice("approximate", gelus, "none"),
        "norm_epsilon": tower.section("norm_kwargs", {"eps"}).number("eps", LAYER_NORM_EPSILON, 0, 1),
        "layer_scale": None if tower.get("ls_init_value") is None else tower.number("ls_init_value", 0.0),
    }
