"""FastCLIP: global contrastive losses at the paper's three sizes, and at one that two CPU cores can train.

    python -m experiments.train --config=configs/fastclip.py:quickstart --workdir=runs/fastclip
    python -m experiments.train --config=configs/fastclip.py:medium,loss=fastclip_v2,optimizer=lamb --workdir=runs/v2

The argument is a size and what to change of it: `loss` ("clip", "sogclr", "isogclr", or "fastclip_v0" to "fastclip_v3",
the default), `optimizer` ("adamw", "lamb", "lion", "sgd") and `mode` ("reference", with which the published settings
were tuned, or "published").

| size | data, samples | model | batch | epochs |
| --- | --- | --- | --- | --- |
| quickstart | built-in shapes, 8,192 of them | tiny-shapes | 64 | 24 |
| medium | CC3M, 2.7 M | ResNet-50 | 1024 | 37 |
| large | CC12M, 9.1 M | ViT-B/32 | 2048 | 33 |
| xlarge | LAION, 315 M | ViT-B/16 | 5120 | 42 |

"quickstart" takes about 3 minutes on two CPU cores. The others expect datasets in TFDS's array_record format in the
folders `cc3m`, `cc12m` and `laion` of `data_dir`, and take as many steps as the paper's numbers of samples give.
Wei et al., "FastCLIP: A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources" (2024).
"""

import math
from typing import Any

from ml_collections import ConfigDict

from configs import base
from infcl_jax.losses.global_contrastive import VARIANTS

# What the sizes differ in; `rho` and `temperature_rate` by loss.
_SIZES: dict[str, dict[str, Any]] = {
    "quickstart": {
        "data": ("shapes/quickstart", 8192),
        "model": "tiny-shapes",
        "batch_size": 64,
        "epochs": 24,
        "adam": (0.9, 0.98, 1e-8),
        "warmup_steps": 100,
        "optimizers": {"adamw": (1e-3, 0.1)},
        "eps": 3e-3,
        "gamma": (0.8, 12),
        "rho": {"fastclip_v2": 6.5, "fastclip_v3": 3.0},
        "temperature_rate": {"fastclip_v2": 1e-2, "fastclip_v3": 1e-4},
    },
    "medium": {
        "data": ("cc3m", 2_700_000),
        "model": "RN50",
        "batch_size": 1024,
        "epochs": 37,
        "adam": (0.9, 0.999, 1e-8),
        "warmup_steps": 10_000,
        "optimizers": {"adamw": (1e-3, 0.1), "lamb": (2e-3, 0.1), "lion": (2e-4, 0.3), "sgd": (1.0, 3e-6)},
        "eps": 1e-14,
        "gamma": (0.2, 18),
        "rho": {"fastclip_v2": 7.0, "fastclip_v3": 6.5},
        "temperature_rate": {"fastclip_v2": 1e-2, "fastclip_v3": 2e-4},
    },
    "large": {
        "data": ("cc12m", 9_100_000),
        "model": "ViT-B/32",
        "batch_size": 2048,
        "epochs": 33,
        "adam": (0.9, 0.98, 1e-6),
        "warmup_steps": 10_000,
        "optimizers": {"adamw": (4e-4, 0.1), "lamb": (2e-3, 0.1), "lion": (1e-4, 0.3), "sgd": (2.0, 3e-6)},
        "eps": 1e-14,
        "gamma": (0.2, 16),
        "rho": {"fastclip_v2": 8.5, "fastclip_v3": 8.5},
        "temperature_rate": {"fastclip_v2": 1e-4, "fastclip_v3": 1e-4},
    },
    "xlarge": {
        "data": ("laion", 315_000_000),
        "model": "ViT-B/16",
        "batch_size": 5120,
        "epochs": 42,
        "adam": (0.9, 0.98, 1e-6),
        "warmup_steps": 13_000,
        "optimizers": {"adamw": (2e-4, 0.2)},
        "eps": 1e-6,
        "gamma": (0.8, 10),
        "rho": {"fastclip_v3": 16.0},
        "temperature_rate": {"fastclip_v3": 5e-5},
    },
}
# iSogCLR differs from FastCLIP-v2 in the schedule of gamma alone.
_SAME_SETTINGS = {"isogclr": "fastclip_v2"}
_LOW_TEMPERATURE, _HIGH_TEMPERATURE = 0.03, 0.07


def get_config(argument: str = "quickstart") -> ConfigDict:
    """See `configs/base.py` for the meaning of each setting.

    Raises:
      ValueError: an unknown size, or a change of it for which there are no settings.
    """
    name, *changes = argument.split(",")
    if name not in _SIZES:
        raise ValueError(f"expected one of the sizes {tuple(_SIZES)}, got {name!r}")
    size = _SIZES[name]
    chosen = {"loss": "fastclip_v3", "optimizer": "adamw", "mode": "reference"}
    for change in changes:
        what, _, value = change.partition("=")
        chosen[what] = value
    loss, settings = chosen["loss"], _SAME_SETTINGS.get(chosen["loss"], chosen["loss"])
    _check(chosen, size, settings)

    config = base.get_config()
    config.dataset, samples = size["data"]
    config.model = size["model"]
    config.batch_size = size["batch_size"]
    config.total_steps = samples // config.batch_size * size["epochs"]
    config.loss = loss
    gcl = config.global_contrastive
    gcl.mode, gcl.eps = chosen["mode"], size["eps"]
    gcl.gamma_min, gcl.gamma_epochs = size["gamma"]
    if name == "large" and settings == "fastclip_v2":
        gcl.gamma_min = 0.6
    optimizer = config.optimizer
    optimizer.name = chosen["optimizer"]
    optimizer.learning_rate, optimizer.weight_decay = size["optimizers"][chosen["optimizer"]]
    optimizer.beta1, optimizer.beta2, optimizer.eps = size["adam"]
    optimizer.warmup_steps = size["warmup_steps"]
    temperature = _LOW_TEMPERATURE if loss in VARIANTS and loss != "fastclip_v3" else _HIGH_TEMPERATURE
    if name == "xlarge":
        temperature = _HIGH_TEMPERATURE
    config.model_overrides = f"init_logit_scale={math.log(1 / temperature)}"
    gcl.rho = size["rho"].get(settings, 0.0)
    if settings == "fastclip_v2":
        gcl.temperature_learning_rate = size["temperature_rate"][settings]
    elif settings == "fastclip_v3":
        optimizer.temperature_learning_rate = size["temperature_rate"][settings]
        optimizer.temperature_schedule = "threshold"
    if name == "quickstart":
        config.augmentation.scale = (1.0, 1.0)
        config.split = f"train[:{samples}]"
        config.eval_every = config.checkpoint_every = 768
        config.evaluation.retrieval_dataset = config.evaluation.zero_shot_dataset = config.dataset
        config.evaluation.gallery = 500
        config.evaluation.zero_shot_split = "zero_shot"
    return config


def _check(chosen: dict[str, str], size: dict[str, Any], settings: str) -> None:
    known = {
        "loss": ("clip", *VARIANTS),
        "optimizer": tuple(size["optimizers"]),
        "mode": ("published", "reference"),
    }
    for name, value in chosen.items():
        if name not in known:
            raise ValueError(f"expected changes of {tuple(known)}, got {name!r}")
        if value not in known[name]:
            raise ValueError(f"expected {name} to be one of {known[name]} at this size, got {value!r}")
    if settings == "fastclip_v2" and settings not in size["rho"]:
        raise ValueError(f"expected another loss at this size, got {chosen['loss']}, for which no settings are known")
