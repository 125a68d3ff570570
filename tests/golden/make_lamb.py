"""Write lamb.npz: initial parameters, gradients and parameters after 20 steps of timm's `Lamb`.

It runs in fp64.

    pip install torch timm numpy
    python tests/golden/make_lamb.py

Written with timm 1.0.31 and torch 2.15.0. Only one default of `Lamb` differs from `OptimizerConfig(name="lamb")`: it
clips gradients to a global norm of 1 (`max_grad_norm`), which is off here. The others are written out: corrected and
averaged moments, no bound on the trust ratio, and no trust ratio where nothing decays (`always_adapt=False`).
"""

from pathlib import Path

import numpy as np
import torch
from timm.optim import Lamb

STEPS = 20
DECAYING = ("kernel", "zero_kernel")

rng = np.random.default_rng(0)
start = {
    "kernel": rng.normal(size=(6, 4)),
    "zero_kernel": np.zeros((3, 4)),
    "bias": np.zeros(4),
    "gain": np.ones(4),
    "logit_scale": np.array(2.6593),
}
start = {name: value.astype(np.float32) for name, value in start.items()}
gradients = {name: rng.normal(0.3, 1.0, (STEPS, *value.shape)).astype(np.float32) for name, value in start.items()}
params = {name: torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for name, value in start.items()}
groups = [
    {"params": [p for name, p in params.items() if name in DECAYING], "weight_decay": 0.1},
    {"params": [p for name, p in params.items() if name not in DECAYING], "weight_decay": 0.0},
]
optimizer = Lamb(
    groups,
    lr=1e-2,
    betas=(0.9, 0.98),
    eps=1e-6,
    max_grad_norm=None,
    bias_correction=True,
    grad_averaging=True,
    trust_clip=False,
    always_adapt=False,
)
for step in range(STEPS):
    for name, parameter in params.items():
        parameter.grad = torch.tensor(gradients[name][step], dtype=torch.float64)
    optimizer.step()
np.savez_compressed(
    Path(__file__).with_name("lamb.npz"),
    **{f"start/{name}": value for name, value in start.items()},
    **{f"gradients/{name}": value for name, value in gradients.items()},
    **{f"after/{name}": parameter.detach().numpy() for name, parameter in params.items()},
)
