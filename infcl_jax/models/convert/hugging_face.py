"""Names of tensors and JSON configurations of transformers' CLIP, SigLIP and BERT."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from infcl_jax.models.config import BertConfig, CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.convert import bert
from infcl_jax.models.convert.weight_map import Rule, WeightMap, match_rules, module_rules
from infcl_jax.models.json_section import LARGEST_DEPTH, LARGEST_SIDE, Section, check_grid
from infcl_jax.models.registry import inference_config
from infcl_jax.models.transformer_config import TowerConfig

CONFIG_FILE, PREPROCESSOR_FILE, PROCESSOR_FILE = "config.json", "preprocessor_config.json", "processor_config.json"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")

_LEGACY_END = 2  # eos_token_id of configurations that pool the largest id, in transformers' `CLIPTextModel`
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # of Pillow
_SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_SMALL = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
# Defaults of transformers, which `config.json` leaves out.
_DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("clip", "vision"): _SHAPE
    | {"image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    ("clip", "text"): _SMALL
    | {"vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407}
    | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    ("siglip", "vision"): _SHAPE
    | {"image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    ("siglip", "text"): _SHAPE
    | {"vocab_size": 32000, "max_position_embeddings": 64}
    | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}


def read_config(config: Mapping[str, Any], preprocessor: Mapping[str, Any], default: CLIPConfig | None) -> CLIPConfig:
    """Read `config.json` of a CLIP, SigLIP or BERT model, and `preprocessor_config.json`, empty without one.

    A BERT becomes the text tower of `default`.

    Raises:
      ValueError: the model is of another type, or has a field that is not supported.
    """
    kind = config.get("model_type")
    if kind in bert.KINDS:
        if default is None or not isinstance(default.text, BertConfig):
            raise ValueError(
                f"expected a model with two towers, got a {kind} alone; load it as init.text of a model with a BERT"
            )
        return dataclasses.replace(default, text=bert.read_config(config, default.text))
    if kind not in ("clip", "siglip"):
        raise ValueError(f"expected model_type clip, siglip, {', '.join(bert.KINDS)} in {CONFIG_FILE}, got {kind!r}")
    fields = Section("", config).defaults({"projection_dim": 512, "logit_scale_init_value": math.log(1 / 0.07)})
    vision, text = (fields.section(f"{tower}_config").defaults(_DEFAULTS[kind, tower]) for tower in ("vision", "text"))
    shape: dict[str, Any] = {
        "image_size": vision.count("image_size", largest=LARGEST_SIDE),
        "patch_size": vision.count("patch_size"),
    }
    check_grid(shape["image_size"], shape["patch_size"], vision.count("hidden_size"))
    words: dict[str, Any] = {
        "vocab_size": text.count("vocab_size"),
        "context_length": text.count("max_position_embeddings"),
    }
    if kind == "clip":
        end = text.index("eos_token_id", 0, words["vocab_size"])
        return CLIPConfig(
            embed_dim=fields.count("projection_dim"),
            vision=VisionConfig(**_tower(vision), **shape),
            text=TextConfig(
                **_tower(text), **words, end_token=None if end in (_LEGACY_END, words["vocab_size"] - 1) else end
            ),
            init_logit_scale=fields.number("logit_scale_init_value", 0.0),
            **_images(preprocessor, {}),
        )
    if not vision.flag("vision_use_head", True):
        vision.refuse("vision_use_head", "true", False)
    return CLIPConfig(
        embed_dim=vision.count("hidden_size"),
        vision=VisionConfig(
            **_tower(vision), **shape, pool="map", class_token=False, ln_pre=False, patch_bias=True, projection="none"
        ),
        text=TextConfig(**_tower(text), **words, causal=False, pool="last", projection_bias=True),
        init_logit_scale=math.log(10),  # Zhai et al. 2023, section 3.2
        init_logit_bias=-10.0,
        **_images(preprocessor, {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "resize_mode": "squash"}),
    )


def weight_map(config: CLIPConfig, shapes: Mapping[str, Any], names: Collection[str]) -> WeightMap:
    """Map the parameters of a model to transformers' tensors, of a source that has `names`.

    Raises:
      ValueError: transformers has no such parameter.
    """
    if isinstance(config.text, BertConfig):
        projection = "params/text/text_projection/"  # not in transformers' BERT
        tower = {p: x for p, x in shapes.items() if p.startswith("params/text/") and not p.startswith(projection)}
        return bert.weight_map(config.text, tower, names)
    vision, text = "vision_model", "text_model"
    siglip = config.vision.pool == "map"  # type: ignore[union-attr]
    rules = (
        Rule(r"params/(logit_scale|logit_bias)", ("{0}",), "unit_axis" if siglip else None),
        Rule(r"params/visual/class_embedding", (f"{vision}.embeddings.class_embedding",)),
        Rule(r"params/visual/positional_embedding", (f"{vision}.embeddings.position_embedding.weight",)),
        *module_rules("visual/conv1", f"{vision}.embeddings.patch_embedding"),
        *module_rules("visual/ln_pre", f"{vision}.pre_layrnorm"),
        *module_rules("visual/ln_post", f"{vision}.post_layernorm"),
        *module_rules("visual/proj", "visual_projection"),
        Rule(r"params/visual/attn_pool/probe", (f"{vision}.head.probe",), "unit_axes"),
        Rule(r"params/visual/attn_pool/attn/in_proj/kernel", (f"{vision}.head.attention.in_proj_weight",)),
        Rule(r"params/visual/attn_pool/attn/in_proj/bias", (f"{vision}.head.attention.in_proj_bias",)),
        *module_rules("visual/attn_pool/attn/out_proj", f"{vision}.head.attention.out_proj"),
        *module_rules("visual/attn_pool/ln", f"{vision}.head.layernorm"),
        *module_rules("visual/attn_pool/mlp/c_fc", f"{vision}.head.mlp.fc1"),
        *module_rules("visual/attn_pool/mlp/c_proj", f"{vision}.head.mlp.fc2"),
        Rule(r"params/text/token_embedding", (f"{text}.embeddings.token_embedding.weight",)),
        Rule(r"params/text/positional_embedding", (f"{text}.embeddings.position_embedding.weight",)),
        *module_rules("text/ln_final", f"{text}.final_layer_norm"),
        *module_rules("text/text_projection", f"{text}.head" if siglip else "text_projection"),
        *_block_rules("visual", vision),
        *_block_rules("text", text),
    )
    return WeightMap(match_rules(rules, shapes), r".*\.position_ids", {})


def _block_rules(path: str, prefix: str) -> tuple[Rule, ...]:
    """Return the rules of the transformer blocks of a tower."""
    block, target = rf"{path}/transformer/block_0*(\d+)", f"{prefix}.encoder.layers.{{0}}"
    return (
        *module_rules(f"{block}/attn/in_proj", *(f"{target}.self_attn.{name}_proj" for name in "qkv")),
        *module_rules(f"{block}/attn/out_proj", f"{target}.self_attn.out_proj"),
        *module_rules(f"{block}/ln_1", f"{target}.layer_norm1"),
        *module_rules(f"{block}/ln_2", f"{target}.layer_norm2"),
        *module_rules(f"{block}/mlp/c_fc", f"{target}.mlp.fc1"),
        *module_rules(f"{block}/mlp/c_proj", f"{target}.mlp.fc2"),
    )


def _tower(tower: Section) -> dict[str, Any]:
    """Return the fields of `TowerConfig` of a tower of transformers."""
    width = tower.count("hidden_size")
    return {
        "width": width,
        "layers": tower.count("num_hidden_layers", largest=LARGEST_DEPTH),
        "heads": tower.count("num_attention_heads"),
        "mlp_ratio": tower.count("intermediate_size") / width,
        "activation": tower.choice("hidden_act", _ACTIVATIONS, None),
        "norm_epsilon": tower.number("layer_norm_eps", 0, 0, 1),
    }


def _images(preprocessor: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `CLIPConfig` of the image preprocessing."""
    images, zeros = Section(PREPROCESSOR_FILE, preprocessor), (0.0, 0.0, 0.0)
    names = [name for name in ("image_mean", "image_std", "resample", "size") if images.get(name) is not None]
    changes: dict[str, Any] = {name: images.numbers(name, zeros) for name in names if name.startswith("image_")}
    if "resample" in names:
        changes["interpolation"] = images.choice("resample", _RESAMPLE, None)
    if "size" in names:
        by_name = isinstance(images.get("size"), Mapping)
        size = images.section("size") if by_name else Section("size", {"shortest_edge": images.side("size")})
        is_squashed = size.get("height") is not None and not images.flag("do_center_crop")
        changes["resize_mode"] = "squash" if is_squashed else "shortest"
    return {**default, **changes}


def export_files(config: CLIPConfig) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a model by name, the inverse of `read_config`.

    Raises:
      ValueError: transformers' CLIP and SigLIP have no such model.
    """
    vision, text = config.vision, config.text
    refusal = (
        "expected a model that transformers' CLIP or SigLIP describes for format 'hf', got another; use 'open_clip'"
    )
    if not isinstance(vision, VisionConfig) or not isinstance(text, TextConfig):
        raise ValueError(refusal)
    siglip = vision.pool == "map"
    if siglip:
        kind, model = "siglip", {}
        words: dict[str, Any] = {"projection_size": config.embed_dim, "bos_token_id": None, "eos_token_id": None}
    else:
        kind, model = "clip", {"projection_dim": config.embed_dim, "logit_scale_init_value": config.init_logit_scale}
        end = text.vocab_size - 1 if text.end_token is None else text.end_token
        words = {"bos_token_id": max(0, end - 1), "eos_token_id": end}
    content = {
        "architectures": ["SiglipModel" if siglip else "CLIPModel"],
        "model_type": kind,
        **model,
        "dtype": config.param_dtype,
        "vision_config": {
            "model_type": f"{kind}_vision_model",
            **exported_tower(vision, config.activation),
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
        },
        "text_config": {
            "model_type": f"{kind}_text_model",
            **exported_tower(text, config.activation),
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context_length,
            **words,
        },
    }
    square = {"height": vision.image_size, "width": vision.image_size}
    crop = {"size": {"shortest_edge": vision.image_size}, "do_center_crop": True, "crop_size": square}
    preprocessor = {
        "image_processor_type": "SiglipImageProcessor" if siglip else "CLIPImageProcessor",
        "do_resize": True,
        **({"size": square, "do_center_crop": False} if config.resize_mode == "squash" else crop),
        "resample": {name: code for code, name in _RESAMPLE.items()}[config.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(config.image_mean),
        "image_std": list(config.image_std),
    }
    if inference_config(read_config(content, preprocessor, None)) != inference_config(config):
        raise ValueError(refusal)
    return {CONFIG_FILE: content, PREPROCESSOR_FILE: preprocessor}


def exported_tower(tower: TowerConfig, activation: str) -> dict[str, Any]:
    """Return the fields of a tower of transformers; `activation` is for a tower without its own."""
    return {
        "hidden_size": tower.width,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "intermediate_size": int(tower.width * tower.mlp_ratio),
        "hidden_act": {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[tower.activation or activation],
        "layer_norm_eps": tower.norm_epsilon,
    }
