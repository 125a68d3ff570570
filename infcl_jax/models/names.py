"""Named configurations: OpenCLIP's models, one with BERT, and tiny ones for a CPU."""

import dataclasses
import math
import re
from typing import Any, NamedTuple

from infcl_jax.models.config import BertConfig, CLIPConfig, TextConfig, VisionConfig
from infcl_jax.models.resnet import ResNetConfig

# Names of OpenCLIP's configurations with Vision Transformers, see `_vit`.
_VIT_NAMES = """
ViT-S-16 ViT-S-32 ViT-S-16-alt ViT-S-32-alt ViT-M-16 ViT-M-32 ViT-M-16-alt ViT-M-32-alt
ViT-B-32 ViT-B-32-quickgelu ViT-B-32-256 ViT-B-32-plus-256 ViT-B-16 ViT-B-16-quickgelu ViT-B-16-plus ViT-B-16-plus-240
ViT-L-16 ViT-L-16-320 ViT-L-14 ViT-L-14-quickgelu ViT-L-14-280 ViT-L-14-336 ViT-L-14-336-quickgelu
ViT-H-16 ViT-H-14 ViT-H-14-quickgelu ViT-H-14-378 ViT-H-14-378-quickgelu
ViT-g-14 ViT-bigG-14 ViT-bigG-14-quickgelu ViT-e-14
ViT-L-14-CLIPA ViT-L-14-CLIPA-336 ViT-H-14-CLIPA ViT-H-14-CLIPA-336 ViT-bigG-14-CLIPA ViT-bigG-14-CLIPA-336
ViT-L-14-worldwide ViT-L-14-worldwide-quickgelu ViT-H-14-worldwide ViT-H-14-worldwide-quickgelu ViT-H-14-worldwide-378
ViT-bigG-14-worldwide ViT-bigG-14-worldwide-378
"""

# Names of OpenCLIP's configurations of SigLIP (Zhai et al. 2023) and SigLIP 2 (Tschannen et al. 2025), see `_siglip`.
_SIGLIP_NAMES = """
ViT-B-16-SigLIP ViT-B-16-SigLIP-256 ViT-B-16-SigLIP-384 ViT-B-16-SigLIP-512 ViT-B-16-SigLIP-i18n-256
ViT-L-16-SigLIP-256 ViT-L-16-SigLIP-384
ViT-SO400M-14-SigLIP ViT-SO400M-14-SigLIP-378 ViT-SO400M-14-SigLIP-384 ViT-SO400M-16-SigLIP-i18n-256
ViT-B-32-SigLIP2-256 ViT-B-16-SigLIP2 ViT-B-16-SigLIP2-256 ViT-B-16-SigLIP2-384 ViT-B-16-SigLIP2-512
ViT-L-16-SigLIP2-256 ViT-L-16-SigLIP2-384 ViT-L-16-SigLIP2-512
ViT-SO400M-14-SigLIP2 ViT-SO400M-14-SigLIP2-378
ViT-SO400M-16-SigLIP2-256 ViT-SO400M-16-SigLIP2-384 ViT-SO400M-16-SigLIP2-512
ViT-gopt-16-SigLIP2-256 ViT-gopt-16-SigLIP2-384
"""


class _Size(NamedTuple):
    """Shape of a model with a Vision Transformer; text heads have 64 channels."""

    embed_dim: int
    width: int
    layers: int
    head_channels: int
    mlp_ratio: float
    text_width: int
    text_layers: int


_SIZES = {
    "S": _Size(384, 384, 12, 64, 4.0, 384, 12),
    "S-alt": _Size(256, 384, 12, 64, 4.0, 256, 10),
    "M": _Size(512, 512, 12, 64, 4.0, 512, 12),
    "M-alt": _Size(384, 512, 12, 64, 4.0, 384, 12),
    "B": _Size(512, 768, 12, 64, 4.0, 512, 12),
    "B-plus": _Size(640, 896, 12, 64, 4.0, 640, 12),
    "L": _Size(768, 1024, 24, 64, 4.0, 768, 12),
    "H": _Size(1024, 1280, 32, 80, 4.0, 1024, 24),
    "g": _Size(1024, 1408, 40, 88, 4.3637, 1024, 24),
    "bigG": _Size(1280, 1664, 48, 104, 4.9231, 1280, 32),
    "e": _Size(1280, 1792, 56, 112, 8.5715, 1280, 36),
}

# ResNets: features, bottlenecks of each stage, channels after the stem, image size, width of the text tower.
_RESNETS: dict[str, tuple[int, tuple[int, int, int, int], int, int, int]] = {
    "RN50": (1024, (3, 4, 6, 3), 64, 224, 512),
    "RN101": (512, (3, 4, 23, 3), 64, 224, 512),
    "RN50x4": (640, (4, 6, 10, 6), 80, 288, 640),
    "RN50x16": (768, (6, 8, 18, 8), 96, 384, 768),
    "RN50x64": (1024, (3, 15, 36, 10), 128, 448, 1024),
}

# SigLIP towers of the timm library: width, layers, heads, ratio of the MLP.
TIMM_SIZES: dict[str, tuple[int, int, int, float]] = {
    "base": (768, 12, 12, 4.0),
    "large": (1024, 24, 16, 4.0),
    "so400m": (1152, 27, 16, 3.7362),
    "giantopt": (1536, 40, 16, 4.0),
}
_TIMM_NAMES = {"B": "base", "L": "large", "SO400M": "so400m", "gopt": "giantopt"}
_SIGLIP_VOCAB_SIZES = {"SigLIP": 32000, "SigLIP-i18n": 250000, "SigLIP2": 256000}

# BERT and RoBERTa text towers by their names on the Hugging Face hub.
_BASE: dict[str, Any] = {"width": 768, "layers": 12, "heads": 12}
_LARGE: dict[str, Any] = {"width": 1024, "layers": 24, "heads": 16}
# RoBERTa counts positions from `pad_id + 1` (Liu et al. 2019; facts of the hub's config.json files).
_ROBERTA: dict[str, Any] = {
    "norm_epsilon": 1e-5,
    "max_positions": 514,
    "position_offset": 2,
    "token_types": 1,
    "pad_id": 1,
}

BERT_CONFIGS: dict[str, BertConfig] = {
    "bert-base-uncased": BertConfig(**_BASE, vocab_size=30522),
    "bert-base-cased": BertConfig(**_BASE, vocab_size=28996),
    "bert-base-multilingual-cased": BertConfig(**_BASE, vocab_size=119547),
    "bert-large-uncased": BertConfig(**_LARGE, vocab_size=30522),
    "bert-large-cased": BertConfig(**_LARGE, vocab_size=28996),
    "roberta-base": BertConfig(**_BASE, **_ROBERTA, vocab_size=50265),
    "roberta-large": BertConfig(**_LARGE, **_ROBERTA, vocab_size=50265),
    "xlm-roberta-base": BertConfig(**_BASE, **_ROBERTA, vocab_size=250002),
    "xlm-roberta-large": BertConfig(**_LARGE, **_ROBERTA, vocab_size=250002),
}


def bert_config(name: str, **changes: Any) -> BertConfig:
    """Return the configuration of a BERT or RoBERTa text tower, with changed fields.

    The name is that on the Hugging Face hub, with or without its owner, such as "bert-base-uncased".

    Raises:
      ValueError: the name is unknown.
    """
    known = BERT_CONFIGS.get(name.rpartition("/")[2])
    if known is None:
        raise ValueError(f"expected one of {tuple(BERT_CONFIGS)}, got {name!r}; other text towers are not supported")
    return dataclasses.replace(known, activation="gelu", **changes)


def timm_vision_config(name: str) -> VisionConfig:
    """Return the configuration of one of timm's SigLIP image towers, `vit_SIZE_patchN_siglip_PIXELS`.

    Raises:
      ValueError: the name has another form.
    """
    match = re.fullmatch(r"vit_([a-z0-9]+)_patch(\d+)_siglip_(\d+)", name)
    if match is None or match[1] not in TIMM_SIZES:
        raise ValueError(
            f"expected a timm model vit_SIZE_patchN_siglip_PIXELS with a size among {', '.join(TIMM_SIZES)}, got "
            f"{name!r}; other towers of timm are not supported"
        )
    width, layers, heads, mlp_ratio = TIMM_SIZES[match[1]]
    return VisionConfig(
        width=width,
        layers=layers,
        heads=heads,
        mlp_ratio=mlp_ratio,
        activation="gelu_tanh" if match[1] == "giantopt" else "gelu",  # whatever the model's activation
        norm_epsilon=1e-6,
        patch_size=int(match[2]),
        image_size=int(match[3]),
        pool="map",
        class_token=False,
        ln_pre=False,
        patch_bias=True,
        projection="none",
    )


def _tiny(width: int, layers: int, text_width: int, context_length: int) -> CLIPConfig:
    """Build a tiny configuration that a CPU trains in minutes.

    It takes byte-level text and 32-pixel images.
    """
    return CLIPConfig(
        embed_dim=width,
        vision=VisionConfig(width=width, layers=layers, heads=width // 32, image_size=32, patch_size=8),
        text=TextConfig(
            width=text_width, layers=2, heads=text_width // 32, vocab_size=259, context_length=context_length
        ),
        activation="quick_gelu",
    )


def _clip_text(width: int, layers: int, **changes: Any) -> TextConfig:
    return TextConfig(width=width, layers=layers, heads=width // 64, **changes)


def _vit(name: str) -> CLIPConfig:
    """Build the configuration of a name such as "ViT-L-14-CLIPA-336" or "ViT-B-16-quickgelu"."""
    pattern = r"ViT-(\w+?)-(\d+)(-alt|-plus)?(-CLIPA|-worldwide)?(?:-(\d+))?(-quickgelu)?"
    letter, patch_size, variant, training, image_size, quickgelu = _groups(pattern, name)
    size = _SIZES[letter + (variant or "")]
    vision: dict[str, Any] = {}
    text: dict[str, Any] = {}
    if training == "-CLIPA":  # Li et al. 2023 (An Inverse Scaling Law for CLIP Training)
        vision = {"ln_pre": False, "pool": "avg", "final_ln_after_pool": True}
        text = {"context_length": 32, "vocab_size": 32000, "causal": False, "pool": "last"}
    elif training == "-worldwide":  # Chuang et al. 2025 (Meta CLIP 2): tokenizers of many languages
        text = {"vocab_size": 250100, "end_token": 1} if letter == "L" else {"vocab_size": 901629, "end_token": 2}
    return CLIPConfig(
        embed_dim=size.embed_dim,
        vision=VisionConfig(
            width=size.width,
            layers=size.layers,
            heads=size.width // size.head_channels,
            mlp_ratio=size.mlp_ratio,
            patch_size=int(patch_size),
            image_size=int(image_size or 224),
            layer_scale=1e-4 if name == "ViT-M-16-alt" else None,
            **vision,
        ),
        text=_clip_text(size.text_width, size.text_layers, **text),
        activation="quick_gelu" if quickgelu else "gelu",
    )


def _siglip(name: str) -> CLIPConfig:
    """Build the configuration of a name such as "ViT-B-16-SigLIP-i18n-256".

    Images are normalized to [-1, 1] and squashed, and scale and bias start at 10 and -10, as in the paper.
    """
    letter, patch_size, version, image_size = _groups(r"ViT-(\w+?)-(\d+)-(SigLIP(?:-i18n|2)?)(?:-(\d+))?", name)
    vision = timm_vision_config(f"vit_{_TIMM_NAMES[letter]}_patch{patch_size}_siglip_{image_size or 224}")
    width, layers, heads, mlp_ratio = TIMM_SIZES["so400m" if letter == "gopt" else _TIMM_NAMES[letter]]
    has_projection = name != "ViT-SO400M-16-SigLIP-i18n-256"
    return CLIPConfig(
        embed_dim=vision.width,
        vision=vision,
        text=TextConfig(
            width=width,
            layers=layers,
            heads=heads,
            mlp_ratio=mlp_ratio,
            activation="gelu_tanh" if version == "SigLIP2" else None,
            norm_epsilon=1e-6,
            vocab_size=_SIGLIP_VOCAB_SIZES[version],
            context_length=16 if name == "ViT-SO400M-14-SigLIP" else 64,
            causal=False,
            pool="last",
            projection="linear" if has_projection else "none",
            projection_bias=has_projection,
        ),
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        resize_mode="squash",
        init_logit_scale=math.log(10),
        init_logit_bias=-10.0,
    )


def _resnet(name: str) -> CLIPConfig:
    embed_dim, layers, width, image_size, text_width = _RESNETS[name]
    # Heads of the attention pool have 64 channels.
    vision = ResNetConfig(width=width, layers=layers, heads=width // 2, image_size=image_size)
    return CLIPConfig(embed_dim=embed_dim, vision=vision, text=_clip_text(text_width, 12))


def _with_bert(vision: str, text: str) -> CLIPConfig:
    """Build a Vision Transformer with a BERT or RoBERTa text tower."""
    return dataclasses.replace(_vit(vision), text=bert_config(text))


def _groups(pattern: str, name: str) -> tuple[Any, ...]:
    match = re.fullmatch(pattern, name)
    assert match is not None, name
    return match.groups()


CONFIGS: dict[str, CLIPConfig] = {
    "tiny": _tiny(width=64, layers=2, text_width=64, context_length=77),
    "tiny-shapes": _tiny(width=96, layers=3, text_width=64, context_length=60),
    **{name: _vit(name) for name in _VIT_NAMES.split()},
    **{name: _resnet(name) for name in _RESNETS},
    **{f"{name}-quickgelu": dataclasses.replace(_resnet(name), activation="quick_gelu") for name in _RESNETS},
    **{name: _siglip(name) for name in _SIGLIP_NAMES.split()},
    "roberta-ViT-B-32": _with_bert("ViT-B-32-quickgelu", "roberta-base"),
    "xlm-roberta-base-ViT-B-32": _with_bert("ViT-B-32", "xlm-roberta-base"),
    "xlm-roberta-large-ViT-H-14": _with_bert("ViT-H-14", "xlm-roberta-large"),
    "bert-ViT-B-32": _with_bert("ViT-B-32", "bert-base-uncased"),
}
