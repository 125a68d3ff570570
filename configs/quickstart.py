"""A small CLIP model on the built-in captioned shapes.

Trains through the ring on four simulated CPU devices:

    make quickstart
    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

About 5 minutes on two CPU cores. Expect zero-shot top-1 of 93 to 95 % over 36 classes, and R@1 of 72 to 79 % in both
directions with a gallery of 500. The results depend on the machine, see `docs/reproduction.md`.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """Return the settings of the quickstart; `docs/settings.md` explains them."""
    config = base.get_config()
    config.cpu_devices = 4
    config.dataset = "shapes/quickstart"
    config.augmentation.scale = (1.0, 1.0)
    config.model = "tiny-shapes"
    config.batch_size = 256
    config.total_steps = 1000
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.eval_every = 250
    config.evaluation.retrieval_dataset = "shapes/quickstart"
    config.evaluation.gallery = 500
    config.evaluation.zero_shot_dataset = "shapes/quickstart"
    config.evaluation.zero_shot_split = "zero_shot"
    config.checkpoint_every = 100
    return config
