"""SigLIP image towers of the timm library, whose shapes follow from their names."""

import re

from infcl_jax.models.config import VisionConfig

# Width, layers, heads, ratio of the MLP.
TIMM_SIZES: dict[str, tuple[int, int, int, float]] = {
    "base": (768, 12, 12, 4.0),
    "large": (1024, 24, 16, 4.0),
    "so400m": (1152, 27, 16, 3.7362),
    "giantopt": (1536, 40, 16, 4.0),
}


def timm_vision_config(name: str) -> VisionConfig:
    """Return the configuration of one of timm's SigLIP image towers.

    Args:
      name: `vit_SIZE_patchN_siglip_PIXELS`, with a size in base, large, so400m or giantopt.

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
