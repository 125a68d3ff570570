"""OpenCLIP's JSON model configurations.

Fields have the names, meanings and defaults of OpenCLIP 3.3's `CLIPVisionCfg`, `CLIPTextCfg`, `CLIP` and
`PreprocessCfg`.
"""

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from infcl_jax.checks import check_positive_int
from infcl_jax.models.bert_names import bert_config
from infcl_jax.models.clip import OPENAI_IMAGE_MEAN, OPENAI_IMAGE_STD
from infcl_jax.models.config import BertConfig, CLIPConfig, Interpolation, TextConfig, VisionConfig
from infcl_jax.models.resnet import ResNetConfig
from infcl_jax.models.timm_names import timm_vision_config
from infcl_jax.ops.bias_activation.api import Activation
from infcl_jax.ops.layer_norm.api import LAYER_NORM_EPSILON

CONFIG_FILE = "open_clip_config.json"  # of OpenCLIP's model folders

# OpenCLIP's "random" is for training; its evaluation is bicubic then.
_INTERPOLATIONS: dict[str | None, Interpolation] = {
    "bicubic": "bicubic",
    "bilinear": "bilinear",
    "random": "bicubic",
    None: "bicubic",
}
_POOLS = {"tok": "tok", "avg": "avg"}
_TEXT_POOLS = {"argmax": "end", "eos": "end", "first": "first", "last": "last"}
_HF_POOLS = {"mean_pooler": "mean", "cls_pooler": "pooler", "cls_last_hidden_state_pooler": "cls"}
_HF_PROJECTIONS = {"linear": "linear", "mlp": "mlp", None: "none"}

# Fields that are supported at their defaults only.
_PLAIN_BLOCK: dict[str, Any] = dict.fromkeys(
    ["qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc", "output_tokens"],
    False,
)
_PLAIN_VISION = _PLAIN_BLOCK | {"attentional_pool": False}
_PLAIN_TIMM: dict[str, Any] = {"timm_drop": 0.0, "timm_drop_path": 0.0}
_PLAIN_TEXT = _PLAIN_BLOCK | {"embed_cls": False}

# All fields. Those of tokenizers, pretrained weights and absent parts do not change the model.
_MODEL_FIELDS = frozenset(
    [
        "embed_dim",
        "vision_cfg",
        "text_cfg",
        "quick_gelu",
        "init_logit_scale",
        "init_logit_bias",
        "nonscalar_logit_scale",
        "custom_text",
        "multimodal_cfg",
    ]
)
_TOWER_FIELDS = frozenset(
    [
        "layers",
        "width",
        "mlp_ratio",
        "ls_init_value",
        "pool_type",
        "final_ln_after_pool",
        "block_type",
        "act_kwargs",
        "norm_kwargs",
    ]
)
_VISION_FIELDS = _TOWER_FIELDS.union(
    _PLAIN_VISION,
    _PLAIN_TIMM,
    [
        "head_width",
        "patch_size",
        "image_size",
        "patch_dropout",
        "no_ln_pre",
        "pos_embed_type",
        "attn_pooler_queries",
        "attn_pooler_heads",
        "timm_model_name",
        "timm_model_pretrained",
        "timm_pool",
        "timm_proj",
        "timm_proj_bias",
    ],
)
_TEXT_FIELDS = _TOWER_FIELDS.union(
    _PLAIN_TEXT,
    [
        "context_length",
        "vocab_size",
        "heads",
        "pad_id",
        "eos_id",
        "no_causal_mask",
        "proj_bias",
        "proj_type",
        "hf_tokenizer_name",
        "tokenizer_mode",
        "tokenizer_kwargs",
        "hf_model_name",
        "hf_model_pretrained",
        "hf_proj_type",
        "hf_pooler_type",
    ],
)
_IMAGE_FIELDS = frozenset(["size", "mode", "mean", "std", "interpolation", "resize_mode", "fill_color"])


class _Section:
    """Fields of one JSON object; errors name the field."""

    def __init__(self, name: str, values: Any, known: Collection[str]) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(
                f"expected {name or 'the config'} to be a JSON object, got {values!r}; see OpenCLIP's model configs"
            )
        self._prefix, self._values = f"{name}." if name else "", values
        for field in values:
            if field not in known:
                raise ValueError(f"expected a known field, got {self._prefix}{field}={values[field]!r}; remove it")

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value of a field; `default` for an absent one."""
        return self._values.get(field, default)

    def choice(self, field: str, choices: Mapping[Any, Any], default: Any) -> Any:
        """Return what `choices` has for the value of a field."""
        value = self.get(field, default)
        if value not in tuple(choices):  # a list has no hash
            self.refuse(field, f"one of {tuple(choices)}", value)
        return choices[value]

    def only(self, supported: Mapping[str, Any]) -> None:
        """Refuse other values of fields than the supported ones; null is none."""
        for field, value in supported.items():
            if self.get(field) not in (None, value):
                self.refuse(field, repr(value), self.get(field))

    def refuse(self, field: str, expected: str, value: Any) -> None:
        """Raise the error of a value that is not supported."""
        raise ValueError(
            f"expected {self._prefix}{field} to be {expected}, got {self._prefix}{field}={value!r}; "
            "other values are not supported"
        )

    def count(self, field: str, default: int) -> int:
        """Return the value of a field that must be a positive integer."""
        value = self.get(field, default)
        check_positive_int(f"{self._prefix}{field}", value)
        return value

    def keyword(self, field: str, name: str, default: Any) -> Any:
        """Return the only supported keyword argument of a field with keyword arguments."""
        arguments = _Section(f"{self._prefix}{field}", self.get(field) or {}, {name})
        return arguments.get(name, default)


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
        _Section("", config, {"model_cfg", "preprocess_cfg"})
        return _clip_config(config["model_cfg"], config.get("preprocess_cfg") or {})
    return _clip_config(config, {})


def _read_json(path: Path) -> Any:
    path = path / CONFIG_FILE if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected the JSON config of an OpenCLIP model, got {str(path)!r}: {error}") from None


def _clip_config(config: Any, preprocess: Any) -> CLIPConfig:
    model = _Section("", config, _MODEL_FIELDS)
    model.only({"multimodal_cfg": None, "nonscalar_logit_scale": False})
    for field in ("embed_dim", "vision_cfg", "text_cfg"):
        if model.get(field) is None:
            model.refuse(field, "given", None)
    images = _Section("preprocess_cfg", preprocess, _IMAGE_FIELDS)
    images.only({"mode": "RGB", "fill_color": 0})
    quick_gelu = bool(model.get("quick_gelu"))
    scale, bias = model.get("init_logit_scale"), model.get("init_logit_bias")
    return CLIPConfig(
        embed_dim=model.count("embed_dim", 0),
        vision=_vision_config(_Section("vision_cfg", model.get("vision_cfg"), _VISION_FIELDS), quick_gelu),
        text=_text_config(_Section("text_cfg", model.get("text_cfg"), _TEXT_FIELDS), quick_gelu),
        activation="quick_gelu" if quick_gelu else "gelu",
        image_mean=images.get("mean") or OPENAI_IMAGE_MEAN,
        image_std=images.get("std") or OPENAI_IMAGE_STD,
        interpolation=images.choice("interpolation", _INTERPOLATIONS, "bicubic"),
        resize_mode=images.get("resize_mode") or "shortest",
        init_logit_scale=math.log(1 / 0.07) if scale is None else float(scale),
        init_logit_bias=None if bias is None else float(bias),
    )


def _vision_config(vision: _Section, quick_gelu: bool) -> VisionConfig | ResNetConfig:
    vision.only(_PLAIN_VISION)
    image_size = _side(vision, "image_size", 224)
    if vision.get("timm_model_name"):
        return _timm_config(vision, image_size)
    layers, width, head_width = vision.get("layers", 12), vision.count("width", 768), vision.count("head_width", 64)
    if isinstance(layers, list | tuple):
        return ResNetConfig(width=width, layers=tuple(layers), heads=width * 32 // head_width, image_size=image_size)  # type: ignore[arg-type]
    return VisionConfig(
        width=width,
        layers=layers,
        heads=width // head_width,
        image_size=image_size,
        patch_size=_side(vision, "patch_size", 16),
        pool=vision.choice("pool_type", _POOLS, "tok"),
        patch_dropout=vision.get("patch_dropout", 0.0),
        pos_embed=vision.choice("pos_embed_type", {name: name for name in ("learnable", "sin_cos_2d")}, "learnable"),
        ln_pre=not vision.get("no_ln_pre", False),
        final_ln_after_pool=bool(vision.get("final_ln_after_pool", False)),
        **_block_fields(vision, quick_gelu),
    )


def _timm_config(vision: _Section, image_size: int) -> VisionConfig:
    """Return the configuration of a timm tower; its name determines the shape."""
    try:
        config = timm_vision_config(vision.get("timm_model_name"))
    except ValueError as error:
        raise ValueError(f"vision_cfg.timm_model_name: {error}") from None
    vision.only(_PLAIN_TIMM)
    if config.image_size != image_size:
        vision.refuse("image_size", f"{config.image_size}, as in the timm name", image_size)
    # "none" has no projection; "" and null select timm's own classifier, which has a bias.
    projection = vision.choice("timm_proj", {"none": "none", "linear": "linear", "": "bias", None: "bias"}, "linear")
    # "" leaves timm's own pool, but without projection it pools nothing.
    vision.choice("timm_pool", {"map": "map"} | ({"": "map"} if projection == "linear" else {}), "avg")
    has_bias = projection == "bias" or (projection == "linear" and bool(vision.get("timm_proj_bias", False)))
    return dataclasses.replace(
        config,
        patch_dropout=vision.get("patch_dropout", 0.0),
        projection="none" if projection == "none" else "linear",
        projection_bias=has_bias,
    )


def _text_config(text: _Section, quick_gelu: bool) -> TextConfig | BertConfig:
    text.only(_PLAIN_TEXT)
    context_length = text.get("context_length", 77)
    if text.get("hf_model_name"):
        pool = text.choice("hf_pooler_type", _HF_POOLS, "mean_pooler")
        head = text.choice("hf_proj_type", _HF_PROJECTIONS, "mlp")
        try:
            return bert_config(text.get("hf_model_name"), context_length=context_length, pool=pool, projection=head)
        except ValueError as error:
            raise ValueError(f"text_cfg.hf_model_name: {error}") from None
    projection = text.choice("proj_type", {"linear": "linear", "none": "none"}, "linear")
    return TextConfig(
        width=text.get("width", 512),
        layers=text.get("layers", 12),
        heads=text.get("heads", 8),
        vocab_size=text.get("vocab_size", 49408),
        context_length=context_length,
        causal=not text.get("no_causal_mask", False),
        pool=text.choice("pool_type", _TEXT_POOLS, "argmax"),
        end_token=text.get("eos_id", 2) if text.get("pool_type") == "eos" else None,
        projection=projection,
        projection_bias=bool(text.get("proj_bias", False)) and projection == "linear",
        **_block_fields(text, quick_gelu),
    )


def _block_fields(tower: _Section, quick_gelu: bool) -> dict[str, Any]:
    """Return the fields of the blocks that the configurations of both towers share."""
    tower.choice("block_type", dict.fromkeys((None, "default", "custom")), None)
    gelus: dict[str, Activation | None] = {"none": None, "tanh": "gelu_tanh"}
    approximate, arguments = tower.keyword("act_kwargs", "approximate", "none"), tower.get("act_kwargs")
    if approximate not in gelus or (quick_gelu and arguments):
        tower.refuse("act_kwargs", f"'approximate' among {tuple(gelus)}, or null with quick_gelu", arguments)
    return {
        "mlp_ratio": tower.get("mlp_ratio", 4.0),
        "activation": gelus[approximate],
        "norm_epsilon": tower.keyword("norm_kwargs", "eps", LAYER_NORM_EPSILON),
        "layer_scale": tower.get("ls_init_value"),
    }


def _side(section: _Section, field: str, default: int) -> int:
    """Return the side of a square, given as number or pair."""
    value = section.get(field)
    sides = value if isinstance(value, list | tuple) else (default if value is None else value,)
    if len(set(sides)) != 1:
        section.refuse(field, "a number or a pair of equal numbers", value)
    return sides[0]
