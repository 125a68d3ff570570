"""Write open_clip_positions.npz: position embeddings resized by OpenCLIP.

    pip install open_clip_torch numpy
    OMP_NUM_THREADS=1 python tests/golden/make_open_clip_positions.py

Written with open_clip_torch 3.3.0 and torch 2.13.0, by `resize_pos_embed` and `resize_text_pos_embed`. Image tables
have a class token.
"""

import types
from pathlib import Path

import numpy as np
import torch
from open_clip.model import resize_pos_embed, resize_text_pos_embed

WIDTH = 5
GRIDS = ((4, 7), (7, 4), (5, 9))
LENGTHS = ((12, 20), (20, 12))

generator = torch.Generator().manual_seed(0)
arrays = {}
for old, new in GRIDS:
    state = {"visual.positional_embedding": torch.randn(1 + old * old, WIDTH, generator=generator)}
    arrays[f"image/{old}/{new}/before"] = state["visual.positional_embedding"].numpy()
    resize_pos_embed(state, types.SimpleNamespace(visual=types.SimpleNamespace(grid_size=(new, new))))
    arrays[f"image/{old}/{new}/after"] = state["visual.positional_embedding"].numpy()
for old, new in LENGTHS:
    state = {"positional_embedding": torch.randn(old, WIDTH, generator=generator)}
    arrays[f"text/{old}/{new}/before"] = state["positional_embedding"].numpy()
    resize_text_pos_embed(state, types.SimpleNamespace(positional_embedding=torch.zeros(new, WIDTH)))
    arrays[f"text/{old}/{new}/after"] = state["positional_embedding"].numpy()
np.savez_compressed(Path(__file__).with_name("open_clip_positions.npz"), **arrays)
