"""OpenCLIP's JSON configuration of a model, the inverse of `read_open_clip_config`."""

import dataclasses
from typing import Any

from infcl_jax.models.config import BertConfig, CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.convert.open_clip import is_timm, needs_custom_text
from infcl_jax.models.names import BERT_CONFIGS, TIMM_SIZES, bert_config, timm_vision_config
from infcl_jax.models.open_clip_config import CONFIG_FILE, read_open_clip_config
from infcl_jax.models.registry import inference_config, inference_tower
from infcl_jax.models.resnet import ResNetConfig

UNNAMED_TOKENIZER = "./tokenizer"  # OpenCLIP reads the model's folder, whatever the name
_CLIP_VOCAB_SIZE = 49408
_TEXT_POOLS = {"end": "argmax", "first": "first", "last": "last"}
_HF_POOLS = {"mean": "mean_pooler", "pooler": "cls_pooler", "cls": "cls_last_hidden_state_pooler"}


def export_files(config: CLIPConfig) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a model by name.

    Raises:
      ValueError: OpenCLIP has no such model.
    """
    preprocess = {
        "size": [config.vision.image_size] * 2,
        "mode": "RGB",
        "mean": list(config.image_mean),
        "std": list(config.image_std),
        "interpolation": config.interpolation,
        "resize_mode": config.resize_mode,
    }
    content = {"model_cfg": _model(config), "preprocess_cfg": preprocess}
    if inference_config(read_open_clip_config(content)) != inference_config(config):
        raise ValueError("expected a model that OpenCLIP's configuration describes, got another; use stablehlo")
    return {CONFIG_FILE: content}


def _model(config: CLIPConfig) -> dict[str, Any]:
    """Return OpenCLIP's `model_cfg`."""
    vision, text = config.vision, config.text
    model: dict[str, Any] = {
        "embed_dim": config.embed_dim,
        "quick_gelu": _quick_gelu(config),
        "init_logit_scale": config.init_logit_scale,
        "vision_cfg": _timm(vision, config) if is_timm(vision) else _vision(vision, config),
        "text_cfg": _bert(text, config) if isinstance(text, BertConfig) else _text(text, config),
    }
    if config.init_logit_bias is not None:
        model["init_logit_bias"] = config.init_logit_bias
    if needs_custom_text(config):
        model["custom_text"] = True
    return model


def _quick_gelu(config: CLIPConfig) -> bool:
    """Return whether the towers that OpenCLIP's `quick_gelu` sets have quick GELU."""
    towers = [config.text] if is_timm(config.vision) else [config.vision, config.text]
    return any(_activation(tower, config) == "quick_gelu" for tower in towers if not isinstance(tower, ResNetConfig))


def _activation(tower: Any, config: CLIPConfig) -> str:
    return tower.activation or config.activation


def _vision(vision: Any, config: CLIPConfig) -> dict[str, Any]:
    if isinstance(vision, ResNetConfig):
        return {
            "image_size": vision.image_size,
            "layers": list(vision.layers),
            "width": vision.width,
            "head_width": vision.width * 32 // vision.heads,
        }
    return {
        "image_size": vision.image_size,
        "width": vision.width,
        "head_width": vision.width // vision.heads,
        "patch_size": vision.patch_size,
        "patch_dropout": vision.patch_dropout,
        "pool_type": vision.pool,
        "pos_embed_type": vision.pos_embed,
        "no_ln_pre": not vision.ln_pre,
        "final_ln_after_pool": vision.final_ln_after_pool,
        **_blocks(vision, config),
    }


def _timm(vision: Any, config: CLIPConfig) -> dict[str, Any]:
    """Return the configuration of a tower of timm, whose name has its shape."""
    for size in TIMM_SIZES:
        name = f"vit_{size}_patch{vision.patch_size}_siglip_{vision.image_size}"
        head = {"projection": vision.projection, "projection_bias": vision.projection_bias}
        named = dataclasses.replace(timm_vision_config(name), **head)
        if inference_tower(named, "gelu") == inference_tower(vision, config.activation):
            return {
                "image_size": vision.image_size,
                "timm_model_name": name,
                "timm_model_pretrained": False,
                "timm_pool": "map",
                "timm_proj": vision.projection,
                "timm_proj_bias": vision.projection_bias,
                "patch_dropout": vision.patch_dropout,
            }
    raise ValueError(
        "expected an image tower without class token of timm's SigLIP shapes, got another; export stablehlo"
    )


def _text(text: TextConfig, config: CLIPConfig) -> dict[str, Any]:
    written = {
        "context_length": text.context_length,
        "vocab_size": text.vocab_size,
        "width": text.width,
        "heads": text.heads,
        "no_causal_mask": not text.causal,
        "pool_type": _TEXT_POOLS[text.pool],
        "proj_type": text.projection,
        "proj_bias": text.projection_bias,
        **_blocks(text, config),
    }
    if (
        text.vocab_size > _CLIP_VOCAB_SIZE
    ):  # OpenCLIP's default, CLIP's tokenizer, would give other ids without an error
        written["hf_tokenizer_name"] = UNNAMED_TOKENIZER
    eos = text.pool == "end" and text.end_token is not None
    return written | ({"pool_type": "eos", "eos_id": text.end_token} if eos else {})


def _bert(text: BertConfig, config: CLIPConfig) -> dict[str, Any]:
    """Return the configuration of a tower of transformers, whose name has its shape."""
    head = {"context_length": text.context_length, "pool": text.pool, "projection": text.projection}
    for name in BERT_CONFIGS:
        if inference_tower(bert_config(name, **head), "gelu") == inference_tower(text, config.activation):
            return {
                "context_length": text.context_length,
                "hf_model_name": name,
                "hf_model_pretrained": False,
                "hf_tokenizer_name": name,
                "hf_pooler_type": _HF_POOLS[text.pool],
                "hf_proj_type": None if text.projection == "none" else text.projection,
            }
    raise ValueError("expected the shape of a known BERT, got another; use stablehlo")


def _blocks(tower: VisionConfig | TextConfig, config: CLIPConfig) -> dict[str, Any]:
    """Return the fields of the blocks that both towers have."""
    activation = _activation(tower, config)
    return {
        "layers": tower.layers,
        "mlp_ratio": tower.mlp_ratio,
        "ls_init_value": tower.layer_scale,
        "act_kwargs": {"approximate": "tanh"} if activation == "gelu_tanh" else None,
        "norm_kwargs": {"eps": tower.norm_epsilon},
    }
