"""Write open_clip_*.safetensors: small OpenCLIP models with random weights, features and gradients.

    pip install open_clip_torch timm safetensors
    OMP_NUM_THREADS=1 python tests/golden/make_open_clip_models.py [NAME ...]

Written with open_clip_torch 3.3.0, timm 1.0.31 and torch 2.13.0. Each file holds the tensors `weights/*`, `inputs/*`,
`features/*` (normalized) and `gradients/*` of the objective in `record`. Its metadata holds the JSON configuration and,
for towers of timm, the overrides that shrink the named model.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import open_clip
import timm
import torch
from safetensors.torch import save_file

ROWS, SEED = 3, 0
VIT = {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "mlp_ratio": 2.0}
TEXT = {"context_length": 12, "vocab_size": 64, "width": 16, "heads": 2, "layers": 2, "mlp_ratio": 2.0}
SMALL_TIMM = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 32, "mlp_ratio": 2.0}
SMALL = {
    "vision.mlp_ratio": 2.0,
    "vision.width": 16,
    "vision.layers": 2,
    "vision.heads": 2,
    "vision.patch_size": 8,
    "vision.image_size": 32,
}
SIGLIP = {
    "image_size": 224,
    "timm_model_name": "vit_base_patch16_siglip_224",
    "timm_model_pretrained": False,
    "timm_pool": "map",
    "timm_proj": "none",
}
CASES = {
    "vit": ({"embed_dim": 8, "vision_cfg": VIT, "text_cfg": TEXT}, {}),
    "quick_gelu": ({"embed_dim": 8, "quick_gelu": True, "vision_cfg": VIT, "text_cfg": TEXT}, {}),
    "average_pool": (
        {
            "embed_dim": 8,
            "vision_cfg": VIT | {"pool_type": "avg", "no_ln_pre": True},
            "text_cfg": TEXT | {"ls_init_value": 0.1},
        },
        {},
    ),
    "layer_scale": (
        {
            "embed_dim": 8,
            "vision_cfg": VIT | {"ls_init_value": 0.1, "pos_embed_type": "sin_cos_2d"},
            "text_cfg": TEXT | {"no_causal_mask": True, "pool_type": "first"},
            "custom_text": True,
        },
        {},
    ),
    "text_eos": (
        {
            "embed_dim": 8,
            "vision_cfg": VIT | {"pool_type": "avg", "final_ln_after_pool": True},
            "text_cfg": TEXT | {"pool_type": "eos", "eos_id": 61, "proj_bias": True, "no_causal_mask": True},
            "custom_text": True,
        },
        {},
    ),
    "resnet": (
        {
            "embed_dim": 8,
            "vision_cfg": {"image_size": 32, "layers": [1, 2, 1, 1], "width": 2, "head_width": 16},
            "text_cfg": TEXT,
        },
        {},
    ),
    "siglip": (
        {
            "embed_dim": 16,
            "init_logit_bias": -10,
            "custom_text": True,
            "vision_cfg": SIGLIP,
            "text_cfg": TEXT
            | {
                "no_causal_mask": True,
                "proj_bias": True,
                "pool_type": "last",
                "norm_kwargs": {"eps": 1e-6},
            },
        },
        SMALL,
    ),
}


def random_tensors(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Move every floating tensor of the model away from its initial value."""
    with torch.no_grad():
        for name, value in sorted(model.state_dict().items()):
            noise = 0.1 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else 0
            value += noise.abs() if name.endswith("running_var") else noise


def record(model: torch.nn.Module, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return weights, inputs, features and gradients of `sum(coefficients * logits)`."""
    model.eval()
    features = model.encode_image(image, normalize=True), model.encode_text(text, normalize=True)
    coefficients = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(SEED + 1)) / ROWS
    logits = model.logit_scale.exp() * features[0] @ features[1].T
    if model.logit_bias is not None:
        logits = logits + model.logit_bias
    (coefficients * logits).sum().backward()
    tensors = {f"weights/{name}": value for name, value in model.state_dict().items()}
    tensors |= {"inputs/image": image, "inputs/text": text.to(torch.int32), "inputs/coefficients": coefficients}
    tensors |= {"features/image": features[0], "features/text": features[1]}
    tensors |= {f"gradients/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().clone().contiguous() for name, value in tensors.items()}


def build(config: dict, overrides: dict) -> torch.nn.Module:
    """Build a model of an OpenCLIP configuration, with a small timm tower where it names one."""
    config = json.loads(json.dumps(config))
    custom = config.pop("custom_text", False)
    create = timm.create_model
    shrunk = mock.patch.object(timm, "create_model", lambda *args, **kwargs: create(*args, **SMALL_TIMM, **kwargs))
    if not overrides:
        return (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**config)
    with shrunk:
        return open_clip.CustomTextCLIP(**config)


def main(names: list[str]) -> None:
    """Write the named cases, or all."""
    for name in names or CASES:
        torch.manual_seed(SEED)
        config, overrides = CASES[name]
        model = build(config, overrides)
        random_tensors(model, torch.Generator().manual_seed(SEED))
        size = overrides.get("vision.image_size", config["vision_cfg"]["image_size"])
        text = torch.randint(1, 60, (ROWS, TEXT["context_length"]))
        positions = torch.tensor([5, 11, 8])
        text[torch.arange(ROWS), positions] = config["text_cfg"].get("eos_id", TEXT["vocab_size"] - 1)
        tensors = record(model, torch.randn(ROWS, 3, size, size), text)
        metadata = {"config": json.dumps(config), "overrides": json.dumps(overrides)}
        save_file(tensors, Path(__file__).with_name(f"open_clip_{name}.safetensors"), metadata=metadata)


if __name__ == "__main__":
    main(sys.argv[1:])
