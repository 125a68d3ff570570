"""JSON configurations of transformers, the inverse of `hugging_face.read_config`."""

from typing import Any

from infcl_jax.models.config import CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.convert import hugging_face
from infcl_jax.models.registry import inference_config

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}
_RESAMPLE = {"bilinear": 2, "bicubic": 3}  # of Pillow


def export_files(config: CLIPConfig) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a model by name.

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
    content = _siglip(config, vision, text) if siglip else _clip(config, vision, text)
    preprocessor = _preprocessor(config, siglip)
    if inference_config(hugging_face.read_config(content, preprocessor, None)) != inference_config(config):
        raise ValueError(refusal)
    return {hugging_face.CONFIG_FILE: content, hugging_face.PREPROCESSOR_FILE: preprocessor}


def _clip(config: CLIPConfig, vision: VisionConfig, text: TextConfig) -> dict[str, Any]:
    end = text.vocab_size - 1 if text.end_token is None else text.end_token
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.embed_dim,
        "logit_scale_init_value": config.init_logit_scale,
        "dtype": config.param_dtype,
        "vision_config": {"model_type": "clip_vision_model", **_vision(config, vision)},
        "text_config": {
            "model_type": "clip_text_model",
            **_text(config, text),
            "bos_token_id": max(0, end - 1),
            "eos_token_id": end,
        },
    }


def _siglip(config: CLIPConfig, vision: VisionConfig, text: TextConfig) -> dict[str, Any]:
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "dtype": config.param_dtype,
        "vision_config": {"model_type": "siglip_vision_model", **_vision(config, vision)},
        "text_config": {
            "model_type": "siglip_text_model",
            **_text(config, text),
            "projection_size": config.embed_dim,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    }


def _preprocessor(config: CLIPConfig, siglip: bool) -> dict[str, Any]:
    """Return the image preprocessing as `preprocessor_config.json`."""
    square = {"height": config.vision.image_size, "width": config.vision.image_size}
    crop = {"size": {"shortest_edge": config.vision.image_size}, "do_center_crop": True, "crop_size": square}
    return {
        "image_processor_type": "SiglipImageProcessor" if siglip else "CLIPImageProcessor",
        "do_resize": True,
        **({"size": square, "do_center_crop": False} if config.resize_mode == "squash" else crop),
        "resample": _RESAMPLE[config.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(config.image_mean),
        "image_std": list(config.image_std),
    }


def _vision(config: CLIPConfig, vision: VisionConfig) -> dict[str, Any]:
    return _tower(config, vision) | {"image_size": vision.image_size, "patch_size": vision.patch_size}


def _text(config: CLIPConfig, text: TextConfig) -> dict[str, Any]:
    return _tower(config, text) | {"vocab_size": text.vocab_size, "max_position_embeddings": text.context_length}


def _tower(config: CLIPConfig, tower: VisionConfig | TextConfig) -> dict[str, Any]:
    return {
        "hidden_size": tower.width,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "intermediate_size": int(tower.width * tower.mlp_ratio),
        "hidden_act": _ACTIVATIONS[tower.activation or config.activation],
        "layer_norm_eps": tower.norm_epsilon,
    }
