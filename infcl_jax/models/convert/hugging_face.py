"""Names of tensors and JSON configurations of Hugging Face's CLIP."""

import math
from collections.abc import Mapping
from typing import Any

from infcl_jax.models.convert.weight_map import Rule, WeightMap, match_rules
from infcl_jax.models.registry import CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.resnet import ResNetConfig

CONFIG_FILE, PREPROCESSOR_FILE = "config.json", "preprocessor_config.json"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")

_LEGACY_END = 2  # eos_token_id of configurations that pool the largest id, in transformers' `CLIPTextModel`
_NORM_EPSILON = 1e-5


def read_config(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> CLIPConfig:
    """Read the configuration of a CLIP model.

    Args:
      config: content of `config.json`.
      preprocessor: content of `preprocessor_config.json`; empty without one.

    Raises:
      ValueError: the model is of another type, or has a field that is not supported.
    """
    kind = config.get("model_type")
    if kind != "clip":
        raise ValueError(f"expected model_type 'clip' in {CONFIG_FILE}, got {kind!r}")
    vision, text = (_with_defaults(config, tower) for tower in ("vision", "text"))
    for name, tower in (("vision", vision), ("text", text)):
        if tower["layer_norm_eps"] != _NORM_EPSILON:
            raise ValueError(f"expected {name}_config.layer_norm_eps={_NORM_EPSILON}, got {tower['layer_norm_eps']}")
    if vision["hidden_act"] != text["hidden_act"]:
        raise ValueError(f"expected one hidden_act, got {vision['hidden_act']!r} and {text['hidden_act']!r}")
    end = text["eos_token_id"]
    statistics: Any = {
        f"image_{name}": tuple(preprocessor[f"image_{name}"])
        for name in ("mean", "std")
        if f"image_{name}" in preprocessor
    }
    return CLIPConfig(
        embed_dim=config.get("projection_dim", 512),
        vision=VisionConfig(**_shape(vision), image_size=vision["image_size"], patch_size=vision["patch_size"]),
        text=TextConfig(
            **_shape(text),
            vocab_size=text["vocab_size"],
            context_length=text["max_position_embeddings"],
            end_token=None if end in (_LEGACY_END, text["vocab_size"] - 1) else end,
        ),
        activation=text["hidden_act"],
        init_logit_scale=config.get("logit_scale_init_value", math.log(1 / 0.07)),
        **statistics,
    )


def export_files(config: CLIPConfig) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a model by name.

    Raises:
      ValueError: transformers' CLIP has no such model.
    """
    return {CONFIG_FILE: write_config(config), PREPROCESSOR_FILE: write_preprocessor(config)}


def write_config(config: CLIPConfig) -> dict[str, Any]:
    """Write the configuration of a model as `config.json`.

    Raises:
      ValueError: transformers' CLIP has no such model.
    """
    vision, text = config.vision, config.text
    if isinstance(vision, ResNetConfig) or vision.pool != "tok" or config.init_logit_bias is not None:
        raise ValueError(
            "expected a Vision Transformer that pools the class token, without a logit bias, for format 'hf'; "
            "use format 'open_clip'"
        )
    end = text.vocab_size - 1 if text.end_token is None else text.end_token
    common = {"hidden_act": config.activation, "layer_norm_eps": _NORM_EPSILON, "projection_dim": config.embed_dim}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.embed_dim,
        "logit_scale_init_value": config.init_logit_scale,
        "dtype": config.param_dtype,
        "vision_config": {
            "model_type": "clip_vision_model",
            **_hugging_face_shape(vision),
            **common,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
        },
        "text_config": {
            "model_type": "clip_text_model",
            **_hugging_face_shape(text),
            **common,
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context_length,
            "bos_token_id": max(0, end - 1),
            "eos_token_id": end,
        },
    }


def write_preprocessor(config: CLIPConfig) -> dict[str, Any]:
    """Write the image preprocessing of a model as `preprocessor_config.json`."""
    size = config.vision.image_size
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(config.image_mean),
        "image_std": list(config.image_std),
    }


def weight_map(shapes: Mapping[str, Any]) -> WeightMap:
    """Map the parameters of a model to the tensors of transformers' `CLIPModel`.

    Raises:
      ValueError: transformers' CLIP has no such parameter.
    """
    vision, text = "vision_model", "text_model"
    rules = (
        Rule(r"params/logit_scale", ("logit_scale",)),
        Rule(r"params/visual/conv1/kernel", (f"{vision}.embeddings.patch_embedding.weight",)),
        Rule(r"params/visual/class_embedding", (f"{vision}.embeddings.class_embedding",)),
        Rule(r"params/visual/positional_embedding", (f"{vision}.embeddings.position_embedding.weight",)),
        *_module("visual/ln_pre", f"{vision}.pre_layrnorm"),
        *_module("visual/ln_post", f"{vision}.post_layernorm"),
        Rule(r"params/visual/proj/kernel", ("visual_projection.weight",)),
        Rule(r"params/text/token_embedding", (f"{text}.embeddings.token_embedding.weight",)),
        Rule(r"params/text/positional_embedding", (f"{text}.embeddings.position_embedding.weight",)),
        *_module("text/ln_final", f"{text}.final_layer_norm"),
        Rule(r"params/text/text_projection/kernel", ("text_projection.weight",)),
        *_block_rules("visual", vision),
        *_block_rules("text", text),
    )
    return WeightMap(match_rules(rules, shapes), r".*\.position_ids", {})


def _block_rules(path: str, prefix: str) -> tuple[Rule, ...]:
    """Return the rules of the transformer blocks of a tower."""
    block, target = rf"{path}/transformer/block_0*(\d+)", f"{prefix}.encoder.layers.{{0}}"
    projections = [f"{target}.self_attn.{name}_proj" for name in "qkv"]
    return (
        Rule(rf"params/{block}/attn/in_proj/kernel", tuple(f"{name}.weight" for name in projections)),
        Rule(rf"params/{block}/attn/in_proj/bias", tuple(f"{name}.bias" for name in projections)),
        *_module(f"{block}/attn/out_proj", f"{target}.self_attn.out_proj"),
        *_module(f"{block}/ln_1", f"{target}.layer_norm1"),
        *_module(f"{block}/ln_2", f"{target}.layer_norm2"),
        *_module(f"{block}/mlp/c_fc", f"{target}.mlp.fc1"),
        *_module(f"{block}/mlp/c_proj", f"{target}.mlp.fc2"),
    )


def _module(path: str, name: str) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a dense layer or LayerNorm."""
    return Rule(rf"params/{path}/(?:.*/)?(?:kernel|scale)", (f"{name}.weight",)), Rule(
        rf"params/{path}/bias", (f"{name}.bias",)
    )


def _with_defaults(config: Mapping[str, Any], tower: str) -> dict[str, Any]:
    """Return the configuration of a tower with transformers' defaults, which `config.json` leaves out."""
    defaults: dict[str, Any] = {"layer_norm_eps": _NORM_EPSILON, "hidden_act": "quick_gelu"}
    if tower == "vision":
        defaults |= {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        defaults |= {"image_size": 224, "patch_size": 32}
    else:
        defaults |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
        defaults |= {"vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407}
    return defaults | config.get(f"{tower}_config", {})


def _shape(tower: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TowerConfig` of a tower of transformers."""
    return {
        "width": tower["hidden_size"],
        "layers": tower["num_hidden_layers"],
        "heads": tower["num_attention_heads"],
        "mlp_ratio": tower["intermediate_size"] / tower["hidden_size"],
    }


def _hugging_face_shape(tower: VisionConfig | TextConfig) -> dict[str, Any]:
    """Return the inverse of `_shape`."""
    return {
        "hidden_size": tower.width,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "intermediate_size": int(tower.width * tower.mlp_ratio),
    }
