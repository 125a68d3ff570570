"""List OpenCLIP's pretrained tags of the supported models, with their repositories on the Hub.

    python tests/golden/make_open_clip_tags.py

Needs open_clip_torch, but not PyTorch. The stored file, infcl_jax/models/pretrained_tags.json, is from open_clip_torch
3.3.0. Its repositories are those that `open_clip.create_model(MODEL, pretrained=TAG)` loads.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

from infcl_jax.models import model_names

PATH = Path(__file__).parents[2] / "infcl_jax" / "models" / "pretrained_tags.json"


def registry() -> dict[str, dict[str, str]]:
    """Return the repository of each tag of each model, from OpenCLIP's source."""
    folder = Path(importlib.util.find_spec("open_clip").origin).parent
    package = types.ModuleType("open_clip")  # whose own module imports PyTorch
    package.__path__ = [str(folder)]
    progress = types.ModuleType("tqdm")
    progress.tqdm = None
    replaced = {"open_clip": package} | ({} if importlib.util.find_spec("tqdm") else {"tqdm": progress})
    before = {name: sys.modules.get(name) for name in replaced}
    sys.modules |= replaced
    try:
        from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
        for name in [name for name in sys.modules if name.startswith("open_clip.")]:
            del sys.modules[name]
    tags = {
        model: {
            tag: repository.rstrip("/")
            for tag in list_pretrained_tags_by_model(model)
            if (repository := get_pretrained_cfg(model, tag)["hf_hub"])
        }
        for model in model_names()
    }
    return {model: repositories for model, repositories in tags.items() if repositories}


if __name__ == "__main__":
    PATH.write_text(json.dumps(registry(), indent=1) + "\n")
