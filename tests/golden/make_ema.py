"""Write ema.npz: variables after each of 20 updates, and their moving averages by timm's `ModelEmaV3`.

It runs in fp64, with batch normalization, and also with the warm-up of the decay.

    pip install torch timm numpy
    python tests/golden/make_ema.py

Written with timm 1.0.31 and torch 2.13.0. `use_warmup` counts updates from 1, as in timm's training script.
"""

from pathlib import Path

import numpy as np
import torch
from timm.utils import ModelEmaV3

UPDATES, DECAY = 20, 0.8

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
averages = {"plain": ModelEmaV3(model, decay=DECAY), "warmup": ModelEmaV3(model, decay=DECAY, use_warmup=True)}
names = [name for name, value in model.state_dict().items() if value.is_floating_point()]


def values(module):
    return {name: module.state_dict()[name].numpy().copy() for name in names}


history = {"variables": [values(model)], "plain": [], "warmup": []}
for update in range(1, UPDATES + 1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
        model(torch.randn(8, 3).double())  # new running statistics
    averages["plain"].update(model)
    averages["warmup"].update(model, step=update)
    history["variables"].append(values(model))
    for kind, average in averages.items():
        history[kind].append(values(average.module))
np.savez_compressed(
    Path(__file__).with_name("ema.npz"),
    decay=DECAY,
    **{f"{kind}/{name}": np.stack([step[name] for step in steps]) for kind, steps in history.items() for name in names},
)
