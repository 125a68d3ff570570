"""Write recipes.json: the settings of every recipe that differ from the defaults.

    PYTHONPATH=.:tests python tests/golden/make_recipes.py

Run it after a deliberate change of a recipe, and read the difference.
"""

import importlib
import json
from pathlib import Path

import runs

from configs import base

ARGUMENTS = {
    "inf_cl": (
        "laion400m",
        "laion400m,model=ViT-B/32,batch_size=262144,gpus=32,chunk=128",
        "laion400m,model=ViT-L/14",
        "laion400m,model=ViT-B/32,text=clip,gpus=4",
        "cc3m,model=ViT-B/32",
        "cc12m,model=ViT-B/32,batch_size=4096",
        "laion400m,experiment=clip,model=ViT-L/14,offload=yes,batch_size=4194304",
    ),
    "disco_clip": (
        "laion100m",
        "laion100m,batch_size=8192,implementation=disco",
        "laion400m,batch_size=65536,epochs=8",
    ),
    "siglip": ("base", "base,batch_size=512,millions=3000", "finetune", "scaled_b", "scaled_l", "siglit", "siglit_4"),
    "openclip": ("ViT-B-32", "ViT-B-16", "ViT-B-16-plus-240", "ViT-L-14"),
}


def settings(recipe: str, argument: str) -> dict:
    """Return the settings that differ from the defaults, as JSON holds them."""
    defaults = runs.flat(base.get_config())
    config = runs.flat(importlib.import_module(f"configs.{recipe}").get_config(argument))
    return json.loads(json.dumps({name: value for name, value in config.items() if value != defaults[name]}))


if __name__ == "__main__":
    frozen = {f"{recipe}:{a}": settings(recipe, a) for recipe, arguments in ARGUMENTS.items() for a in arguments}
    Path(__file__).with_name("recipes.json").write_text(json.dumps(frozen, indent=1) + "\n")
