"""FastCLIP: global contrastive losses at the paper's three sizes.

A fourth size, "quickstart", trains on two CPU cores.

    python -m experiments.train --config=configs/fastclip.py:quickstart --workdir=runs/fastclip
    python -m experiments.train --config=configs/fastclip.py:medium,loss=fastclip_v2 --workdir=runs/v2
    python -m experiments.train --config=configs/fastclip.py:medium,experiment=optimizer,optimizer=lion --workdir=runs/l

The argument is a size, followed by changes:

- `experiment`: the paper's experiment whose settings are used, see below. A loss can have different settings in
  different experiments.
- `loss`: "fastclip_v3" by default. "fastclip_v3_const" is FastCLIP-v3 with a constant gamma.
- `optimizer`: "adamw" by default. Only the experiment "optimizer" has "sgd", "lamb" and "lion".
- `mode`: "reference" by default, the loss of the authors' code, with which the published settings were tuned; or
  "published", the loss of the papers.

| size | data, samples | model | batch | epochs |
| --- | --- | --- | --- | --- |
| quickstart | built-in shapes, 8,192 of them | tiny-shapes | 64 | 24 |
| medium | CC3M, 2.7 M | ResNet-50 | 1024 | 37 |
| large | CC12M, 9.1 M | ViT-B/32 | 2048 | 33 |
| xlarge | LAION, 315 M | ViT-B/16 | 5120 | 42 |

| experiment | table of the paper | losses | sizes |
| --- | --- | --- | --- |
| temperature (default) | Table 9: temperature updates | clip, fastclip_v0 to fastclip_v3 | medium, large, xlarge |
| schedule | Table 8: schedule of gamma | sogclr, isogclr, fastclip_v1 to _v3, _v3_const | medium, large, xlarge |
| optimizer | Table 10: optimizers | fastclip_v3 | medium, large |
| shapes (default) | none | all | quickstart |

At xlarge the only losses are clip and fastclip_v3. "clip" is the paper's OpenCLIP. The momentum of SGD is beta1.
FastCLIP-v0 trains its temperature with the learning rate of all other parameters, as in the authors' scripts.

"quickstart" takes about 3 minutes on two CPU cores. The others expect datasets in TFDS's array_record format in the
folders `cc3m`, `cc12m` and `laion` of `data_dir`. Their step counts follow from the paper's numbers of samples.

Wei et al., "FastCLIP: A Suite of Optimization Techniques to Accelerate CLIP Training with Limited Resources" (2024),
Appendix B.
"""

import math
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import base


class _Loss(NamedTuple):
    """Settings of a loss in one experiment.

    Attributes:
      temperature: initial temperature.
      gamma: inner learning rate, constant or final value of the cosine; None for CLIP's loss, which has none.
      gamma_epochs: epochs of the cosine schedule; None: constant gamma.
      rho: weight of the temperatures in the loss.
      temperature_rate: learning rate of the global or per-sample temperatures; None: that of the other parameters.
    """

    temperature: float
    gamma: float | None = None
    gamma_epochs: int | None = None
    rho: float = 0.0
    temperature_rate: float | None = None


# Table 7. adam: beta1, beta2, eps. adamw: learning rate, weight decay. state_eps: constant added to the sample state u.
_SIZES: dict[str, dict[str, Any]] = {
    "quickstart": {
        "data": ("shapes/quickstart", 8192),
        "model": "tiny-shapes",
        "batch_size": 64,
        "epochs": 24,
        "adam": (0.9, 0.98, 1e-8),
        "adamw": (1e-3, 0.1),
        "warmup_steps": 100,
        "state_eps": 3e-3,
    },
    "medium": {
        "data": ("cc3m", 2_700_000),
        "model": "RN50",
        "batch_size": 1024,
        "epochs": 37,
        "adam": (0.9, 0.999, 1e-8),
        "adamw": (1e-3, 0.1),
        "warmup_steps": 10_000,
        "state_eps": 1e-14,
    },
    "large": {
        "data": ("cc12m", 9_100_000),
        "model": "ViT-B/32",
        "batch_size": 2048,
        "epochs": 33,
        "adam": (0.9, 0.98, 1e-6),
        "adamw": (4e-4, 0.1),
        "warmup_steps": 10_000,
        "state_eps": 1e-14,
    },
    "xlarge": {
        "data": ("laion", 315_000_000),
        "model": "ViT-B/16",
        "batch_size": 5120,
        "epochs": 42,
        "adam": (0.9, 0.98, 1e-6),
        "adamw": (2e-4, 0.2),
        "warmup_steps": 13_000,
        "state_eps": 1e-6,
    },
}
# Entries shared by several experiments.
_CLIP = {"clip": _Loss(0.07)}
_MEDIUM_V3 = {"fastclip_v3": _Loss(0.07, 0.2, 18, rho=6.5, temperature_rate=2e-4)}
_LARGE_V3 = {"fastclip_v3": _Loss(0.07, 0.2, 16, rho=8.5, temperature_rate=1e-4)}
_XLARGE_V3 = {"fastclip_v3": _Loss(0.07, 0.8, 10, rho=16.0, temperature_rate=5e-5)}
# Losses by size and experiment. The first experiment of a size is its default.
_EXPERIMENTS: dict[str, dict[str, dict[str, _Loss]]] = {
    "quickstart": {
        "shapes": {
            **_CLIP,
            "sogclr": _Loss(0.03, 0.8),
            "isogclr": _Loss(0.03, 0.8, rho=6.5, temperature_rate=1e-2),
            "fastclip_v0": _Loss(0.03, 0.8, 12),
            "fastclip_v1": _Loss(0.03, 0.8, 12),
            "fastclip_v2": _Loss(0.03, 0.8, 12, rho=6.5, temperature_rate=1e-2),
            "fastclip_v3": _Loss(0.07, 0.8, 12, rho=3.0, temperature_rate=1e-4),
            "fastclip_v3_const": _Loss(0.07, 0.8, rho=3.0, temperature_rate=1e-4),
        },
    },
    "medium": {
        "temperature": {  # Table 9; final gamma of the cosine as in the authors' scripts
            **_CLIP,
            "fastclip_v0": _Loss(0.03, 0.2, 18),
            "fastclip_v1": _Loss(0.03, 0.2, 18),
            "fastclip_v2": _Loss(0.03, 0.2, 18, rho=7.0, temperature_rate=1e-2),
            **_MEDIUM_V3,
        },
        "schedule": {  # Table 8
            "sogclr": _Loss(0.03, 0.6),
            "fastclip_v1": _Loss(0.03, 0.2, 18),
            "isogclr": _Loss(0.03, 0.6, rho=9.0, temperature_rate=1e-2),
            "fastclip_v2": _Loss(0.03, 0.2, 18, rho=9.0, temperature_rate=1e-2),
            "fastclip_v3_const": _Loss(0.07, 0.6, rho=6.5, temperature_rate=2e-4),
            **_MEDIUM_V3,
        },
        "optimizer": _MEDIUM_V3,
    },
    "large": {
        "temperature": {
            **_CLIP,
            "fastclip_v0": _Loss(0.03, 0.2, 16),
            "fastclip_v1": _Loss(0.03, 0.2, 16),
            "fastclip_v2": _Loss(0.03, 0.2, 16, rho=8.5, temperature_rate=1e-4),
            **_LARGE_V3,
        },
        "schedule": {
            "sogclr": _Loss(0.03, 0.6),
            "fastclip_v1": _Loss(0.03, 0.2, 16),
            "isogclr": _Loss(0.03, 0.8, rho=9.0, temperature_rate=1e-2),
            "fastclip_v2": _Loss(0.03, 0.6, 16, rho=9.0, temperature_rate=1e-2),
            "fastclip_v3_const": _Loss(0.07, 0.6, rho=8.5, temperature_rate=1e-4),
            **_LARGE_V3,
        },
        "optimizer": _LARGE_V3,
    },
    "xlarge": {"temperature": _CLIP | _XLARGE_V3, "schedule": _XLARGE_V3},
}
# Table 10: learning rate and weight decay of the experiment "optimizer".
_OPTIMIZERS = {
    "medium": {"adamw": (1e-3, 0.1), "lamb": (2e-3, 0.1), "lion": (2e-4, 0.3), "sgd": (1.0, 3e-6)},
    "large": {"adamw": (4e-4, 0.1), "lamb": (2e-3, 0.1), "lion": (1e-4, 0.3), "sgd": (2.0, 3e-6)},
}


def get_config(argument: str = "quickstart") -> ConfigDict:
    """Return the settings of a size and an experiment of the paper.

    `docs/settings.md` explains them.

    Args:
      argument: size and changes, such as "medium,experiment=optimizer,optimizer=lion".

    Raises:
      ValueError: the size is unknown, or there are no settings for a change.
    """
    name, *changes = argument.split(",")
    if name not in _SIZES:
        raise ValueError(f"expected one of the sizes {tuple(_SIZES)}, got {name!r}")
    size, experiments = _SIZES[name], _EXPERIMENTS[name]
    chosen = {"experiment": next(iter(experiments)), "loss": "fastclip_v3", "optimizer": "adamw", "mode": "reference"}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in chosen:
            raise ValueError(f"expected changes of {tuple(chosen)}, got {key!r}")
        chosen[key] = value
    _check_choice("experiment", chosen, tuple(experiments), f"size {name!r}")
    where = f"experiment {chosen['experiment']!r} at size {name!r}"
    losses = experiments[chosen["experiment"]]
    optimizers = _OPTIMIZERS[name] if chosen["experiment"] == "optimizer" else {"adamw": size["adamw"]}
    _check_choice("loss", chosen, tuple(losses), where)
    _check_choice("optimizer", chosen, tuple(optimizers), where)
    _check_choice("mode", chosen, ("reference", "published"), where)

    config = base.get_config()
    config.dataset, samples = size["data"]
    config.model = size["model"]
    config.batch_size = size["batch_size"]
    config.total_steps = samples // config.batch_size * size["epochs"]
    optimizer = config.optimizer
    optimizer.name = chosen["optimizer"]
    optimizer.learning_rate, optimizer.weight_decay = optimizers[chosen["optimizer"]]
    optimizer.beta1, optimizer.beta2, optimizer.eps = size["adam"]
    optimizer.warmup_steps = size["warmup_steps"]
    config.global_contrastive.mode, config.global_contrastive.eps = chosen["mode"], size["state_eps"]
    _set_loss(config, chosen["loss"], losses[chosen["loss"]])
    if name == "quickstart":
        config.augmentation.scale = (1.0, 1.0)
        config.split = f"train[:{samples}]"
        config.eval_every = config.checkpoint_every = 768
        config.evaluation.retrieval_dataset = config.evaluation.zero_shot_dataset = config.dataset
        config.evaluation.gallery = 500
        config.evaluation.zero_shot_split = "zero_shot"
    return config


def _set_loss(config: ConfigDict, name: str, loss: _Loss) -> None:
    config.loss = name.removesuffix("_const")
    config.model_overrides = f"init_logit_scale={math.log(1 / loss.temperature)}"
    if loss.gamma is None:
        return
    gcl = config.global_contrastive
    gcl.rho, gcl.gamma_min = loss.rho, loss.gamma
    if loss.gamma_epochs is None:
        gcl.gamma_schedule = "constant"
    else:
        gcl.gamma_epochs = loss.gamma_epochs
    if config.loss in ("isogclr", "fastclip_v2"):
        gcl.temperature_learning_rate = loss.temperature_rate
    elif config.loss == "fastclip_v3":
        config.optimizer.temperature_learning_rate = loss.temperature_rate
        config.optimizer.temperature_schedule = "threshold"


def _check_choice(key: str, chosen: dict[str, str], known: tuple[str, ...], where: str) -> None:
    if chosen[key] not in known:
        raise ValueError(f"expected {key} to be one of {known} in {where}, got {chosen[key]!r}")
