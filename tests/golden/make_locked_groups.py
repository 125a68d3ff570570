"""Write locked_groups.json: the parameters that OpenCLIP trains in locked towers, by number of unlocked groups.

The names are those of `infcl_jax`.

    pip install open_clip_torch
    python tests/golden/make_locked_groups.py

Written with open_clip 3.3.0 and torch 2.13.0.
"""

import json
import re
from pathlib import Path

from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

LAYERS = 3
RENAMED = (
    (r"^(token_embedding|positional_embedding|transformer|ln_final|text_projection)", r"text.\1"),
    (r"resblocks\.(\d+)", lambda match: f"block_{int(match[1]):02d}"),
    (r"in_proj_(weight|bias)", r"in_proj.\1"),
    (r"token_embedding\.weight", "token_embedding"),
    (r"(ln_\w+)\.weight", r"\1.scale"),
    (r"weight$", "kernel"),
    (r"(\.proj|text_projection)$", r"\1.kernel"),
)


def model() -> CLIP:
    """Build the smallest CLIP with three layers in each tower."""
    vision = CLIPVisionCfg(layers=LAYERS, width=16, head_width=8, patch_size=8, image_size=16)
    text = CLIPTextCfg(layers=LAYERS, width=16, heads=2, vocab_size=32, context_length=8)
    return CLIP(8, vision, text)


def renamed(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name.replace(".", "/")


def trained(tower: str, groups: int) -> list[str]:
    """List the trained parameters of a tower with its last groups unlocked."""
    locked = model()
    lock = locked.lock_image_tower if tower == "visual" else locked.lock_text_tower
    lock(groups)
    names = [renamed(name) for name, parameter in locked.named_parameters() if parameter.requires_grad]
    return sorted(name for name in names if name.startswith(f"{tower}/"))


groups = range(LAYERS + 4)  # one more than there are
table = {tower: [trained(tower, count) for count in groups] for tower in ("visual", "text")}
Path(__file__).with_name("locked_groups.json").write_text(json.dumps(table, indent=1) + "\n")
