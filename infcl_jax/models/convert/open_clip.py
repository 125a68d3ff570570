"""OpenCLIP's names of tensors and its JSON configuration."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from infcl_jax.models.convert.weight_map import Rule, WeightMap, match_rules
from infcl_jax.models.registry import CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.resnet import ResNetConfig

CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILES = (
    "open_clip_model.safetensors",
    "open_clip_model.safetensors.index.json",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pt",
)

_UNUSED = r".*\.num_batches_tracked|(.*\.)?attn_mask|.*\.position_ids|input_resolution|context_length|vocab_size"


def weight_map(shapes: Mapping[str, Any], custom_text: bool) -> WeightMap:
    """Map the parameters of a model to OpenCLIP's tensors.

    Args:
      shapes: arrays or shapes by path.
      custom_text: whether the tensors of the text tower have the prefix "text.", as in OpenCLIP's `CustomTextCLIP`.

    Raises:
      ValueError: OpenCLIP has no such parameter.
    """
    text = "text." if custom_text else ""
    rules = (
        Rule(r"params/(logit_scale|logit_bias)", ("{0}",), "scalar"),
        Rule(r"params/visual/proj/kernel", ("visual.proj",), "same"),
        Rule(r"params/text/text_projection/kernel", (f"{text}text_projection",), "same"),
        Rule(r"params/text/token_embedding", (f"{text}token_embedding.weight",)),
        *_resnet_rules(),
        *_tower_rules("visual", "visual."),
        *_tower_rules("text", text),
    )
    entries = match_rules(rules, shapes)
    norms = [
        entry.names[0].removesuffix("running_mean") for entry in entries if entry.names[0].endswith("running_mean")
    ]
    return WeightMap(entries, _UNUSED, {f"{norm}num_batches_tracked": np.array(0, np.int64) for norm in norms})


def needs_custom_text(config: CLIPConfig) -> bool:
    """Return whether OpenCLIP builds the model as `CustomTextCLIP`, whose text tower has the prefix "text."."""
    return False


def export_files(config: CLIPConfig, custom_text: bool) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a model by name."""
    preprocess = {"size": [config.vision.image_size] * 2, "mode": "RGB", "interpolation": "bicubic"}
    preprocess |= {"mean": list(config.image_mean), "std": list(config.image_std), "resize_mode": "shortest"}
    return {CONFIG_FILE: {"model_cfg": write_config(config, custom_text), "preprocess_cfg": preprocess}}


def write_config(config: CLIPConfig, custom_text: bool) -> dict[str, Any]:
    """Write the configuration of a model as OpenCLIP's `model_cfg`."""
    vision, text = config.vision, config.text
    if isinstance(vision, ResNetConfig):
        vision_config: dict[str, Any] = {
            "image_size": vision.image_size,
            "layers": list(vision.layers),
            "width": vision.width,
            "head_width": vision.width * 32 // vision.heads,
        }
    else:
        vision_config = {
            "image_size": vision.image_size,
            "layers": vision.layers,
            "width": vision.width,
            "head_width": vision.width // vision.heads,
            "mlp_ratio": vision.mlp_ratio,
            "patch_size": vision.patch_size,
            "patch_dropout": vision.patch_dropout,
            "pool_type": vision.pool,
        }
    text_config: dict[str, Any] = {
        "context_length": text.context_length,
        "vocab_size": text.vocab_size,
        "width": text.width,
        "heads": text.heads,
        "layers": text.layers,
        "mlp_ratio": text.mlp_ratio,
    }
    if text.end_token is not None:
        text_config |= {"pool_type": "eos", "eos_id": text.end_token}
    written = {
        "embed_dim": config.embed_dim,
        "quick_gelu": config.activation == "quick_gelu",
        "init_logit_scale": config.init_logit_scale,
        "vision_cfg": vision_config,
        "text_cfg": text_config,
    }
    if config.init_logit_bias is not None:
        written["init_logit_bias"] = config.init_logit_bias
    return written | ({"custom_text": True} if custom_text else {})


def read_config(config: Mapping[str, Any]) -> CLIPConfig:
    """Read the configuration of `open_clip_config.json`.

    Raises:
      ValueError: the model has a field that is not supported.
    """
    model, preprocess = config.get("model_cfg", config), config.get("preprocess_cfg", {})
    vision, text = dict(model["vision_cfg"]), dict(model["text_cfg"])
    statistics: Any = {f"image_{name}": tuple(preprocess[name]) for name in ("mean", "std") if name in preprocess}
    end = text.pop("eos_id", None)
    text.pop("pool_type", None)
    if isinstance(vision["layers"], list):
        heads = vision["width"] * 32 // vision.pop("head_width")
        vision_config: Any = ResNetConfig(**(vision | {"layers": tuple(vision["layers"]), "heads": heads}))
    else:
        heads = vision["width"] // vision.pop("head_width", 64)
        vision_config = VisionConfig(**{"pool" if k == "pool_type" else k: v for k, v in vision.items()}, heads=heads)
    return CLIPConfig(
        embed_dim=model["embed_dim"],
        vision=vision_config,
        text=TextConfig(**text, end_token=end),
        activation="quick_gelu" if model.get("quick_gelu") else "gelu",
        init_logit_bias=model.get("init_logit_bias"),
        **({"init_logit_scale": model["init_logit_scale"]} if "init_logit_scale" in model else {}),
        **statistics,
    )


def has_custom_text(names: Collection[str]) -> bool:
    """Return whether the tensors of the text tower have the prefix "text."."""
    return any(name.startswith("text.") for name in names)


def _tower_rules(path: str, prefix: str) -> tuple[Rule, ...]:
    """Return the rules of a transformer tower."""
    block, target = rf"params/{path}/transformer/block_0*(\d+)", f"{prefix}transformer.resblocks.{{0}}"
    return (
        Rule(rf"{block}/attn/in_proj/kernel", (f"{target}.attn.in_proj_weight",)),
        Rule(rf"{block}/attn/in_proj/bias", (f"{target}.attn.in_proj_bias",)),
        Rule(rf"{block}/(\w+)/(?:kernel|scale)", (f"{target}.{{1}}.weight",)),
        Rule(rf"{block}/(\w+)/bias", (f"{target}.{{1}}.bias",)),
        Rule(rf"{block}/(\w+)/(\w+)/kernel", (f"{target}.{{1}}.{{2}}.weight",)),
        Rule(rf"{block}/(\w+)/(\w+)/bias", (f"{target}.{{1}}.{{2}}.bias",)),
        Rule(rf"params/{path}/(\w+)/(?:kernel|scale)", (f"{prefix}{{0}}.weight",)),
        Rule(rf"params/{path}/(\w+)/bias", (f"{prefix}{{0}}.bias",)),
        Rule(rf"params/{path}/(\w+)", (f"{prefix}{{0}}",)),
    )


def _resnet_rules() -> tuple[Rule, ...]:
    """Return the rules of the ResNet, with its running statistics."""
    rules: list[Rule] = []
    for collection, ours, theirs in (
        ("params", "(?:kernel|scale)", "weight"),
        ("params", "bias", "bias"),
        ("batch_stats", "mean", "running_mean"),
        ("batch_stats", "var", "running_var"),
    ):
        stage = rf"{collection}/visual/layer(\d)_(\d+)"
        rules += [
            Rule(rf"{stage}/downsample_conv/{ours}", (f"visual.layer{{0}}.{{1}}.downsample.0.{theirs}",)),
            Rule(rf"{stage}/downsample_bn/{ours}", (f"visual.layer{{0}}.{{1}}.downsample.1.{theirs}",)),
            Rule(rf"{stage}/(\w+)/{ours}", (f"visual.layer{{0}}.{{1}}.{{2}}.{theirs}",)),
            Rule(rf"{collection}/visual/attnpool/(\w+)/{ours}", (f"visual.attnpool.{{0}}.{theirs}",)),
            Rule(rf"{collection}/visual/((?:conv|bn)\d)/{ours}", (f"visual.{{0}}.{theirs}",)),
        ]
    return (*rules, Rule(r"params/visual/attnpool/positional_embedding", ("visual.attnpool.positional_embedding",)))
