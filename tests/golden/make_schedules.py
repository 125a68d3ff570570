"""Write schedules.npz: learning rates of every step, and layer-wise factors.

The learning rates are those of OpenCLIP, timm and big_vision, in fp64 except for big_vision's result (fp32). The
factors are those of timm's `param_groups_layer_decay` for a Vision Transformer.

    pip install numpy torch timm open_clip_torch
    git clone https://github.com/google-research/big_vision
    python tests/golden/make_schedules.py big_vision

Written with open_clip_torch 3.3.0, timm 1.0.31, torch 2.13.0 and big_vision of commit 0127fb6. NumPy takes the place of
`jax.numpy` in big_vision's functions, which are read from its `utils.py`.
"""

import ast
import json
import sys
from pathlib import Path

import numpy as np
import timm
import torch
from open_clip_train import scheduler
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler, PolyLRScheduler

PEAK, WARMUP, TOTAL, COOLDOWN = 5e-4, 7, 60, 13
LAYER_DECAY = 0.75


def optimizer(rate=PEAK):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def open_clip(name, *arguments, warmup=WARMUP, total=TOTAL):
    rate = getattr(scheduler, name)(optimizer(), PEAK, warmup, total, *arguments)
    return [rate(step) for step in range(total)]


def timm_rates(kind, final, **options):
    sgd = optimizer()
    rates = kind(sgd, TOTAL - WARMUP, lr_min=final, warmup_t=WARMUP, warmup_prefix=True, t_in_epochs=False, **options)
    values = []
    for step in range(TOTAL):
        rates.step_update(step)
        values.append(sgd.param_groups[0]["lr"])
    return values


def big_vision(path):
    """Compile big_vision's `create_learning_rate_schedule` without its imports."""
    module = ast.parse(Path(path, "big_vision", "utils.py").read_text())
    names = ("steps", "create_learning_rate_schedule")
    module.body = [node for node in module.body if getattr(node, "name", None) in names]
    space = {"jnp": np}
    exec(compile(module, "utils.py", "exec"), space)

    def rates(**options):
        rate = space["create_learning_rate_schedule"](TOTAL, base=PEAK, warmup_steps=WARMUP, **options)
        return [rate(step) for step in range(TOTAL)]

    return rates


theirs = big_vision(sys.argv[1])
same = {"learning_rate": PEAK, "warmup_steps": WARMUP}
from_one = same | {"warmup_start": "one_step"}
cooldown = {"cooldown_steps": COOLDOWN}
# Settings of `OptimizerConfig`, total steps and learning rates.
cases = [
    (from_one | {"schedule": "constant"}, TOTAL, open_clip("const_lr")),
    (from_one | {"schedule": "cosine"}, TOTAL, open_clip("cosine_lr")),
    (from_one | {"schedule": "cosine"}, 2000, open_clip("cosine_lr", total=2000)),
    (from_one | {"schedule": "cosine", "warmup_steps": 0}, TOTAL, open_clip("cosine_lr", warmup=0)),
    (from_one | {"schedule": "constant"} | cooldown, TOTAL, open_clip("const_lr_cooldown", COOLDOWN)),
    (
        from_one | {"schedule": "constant", "cooldown_power": 2.5, "final_learning_rate": 1e-5} | cooldown,
        TOTAL,
        open_clip("const_lr_cooldown", COOLDOWN, 2.5, 1e-5),
    ),
    (same | {"schedule": "cosine", "final_learning_rate": 1e-5}, TOTAL, timm_rates(CosineLRScheduler, 1e-5)),
    (same | {"schedule": "linear", "final_learning_rate": 1e-5}, TOTAL, timm_rates(PolyLRScheduler, 1e-5, power=1.0)),
    (same | {"schedule": "linear"}, TOTAL, theirs(decay_type="linear")),
    (same | {"schedule": "linear"} | cooldown, TOTAL, theirs(decay_type="linear", **cooldown)),
    (same | {"schedule": "cosine"} | cooldown, TOTAL, theirs(decay_type="cosine", **cooldown)),
    (same | {"schedule": "rsqrt"}, TOTAL, theirs(decay_type="rsqrt")),
    (
        same | {"schedule": "rsqrt", "rsqrt_timescale": 5} | cooldown,
        TOTAL,
        theirs(decay_type="rsqrt", timescale=5, **cooldown),
    ),
    (same | {"schedule": "constant"} | cooldown, TOTAL, theirs(decay_type="stair", **cooldown)),
]
vit = timm.create_model("vit_tiny_patch16_224", depth=3, pre_norm=True)
scale_of = {}
for group in param_groups_layer_decay(vit, layer_decay=LAYER_DECAY):
    scale_of |= {id(parameter): group["lr_scale"] for parameter in group["params"]}
factors = {name: scale_of[id(parameter)] for name, parameter in vit.named_parameters()}

np.savez_compressed(
    Path(__file__).with_name("schedules.npz"),
    settings=json.dumps([{"config": config, "total_steps": total} for config, total, _ in cases]),
    layer_decay=LAYER_DECAY,
    layer_factors=json.dumps(factors),
    **{f"rates_{number}": np.asarray(rates, np.float64) for number, (*_, rates) in enumerate(cases)},
)
