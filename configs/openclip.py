"""OpenCLIP: CLIP on LAION-400M with four image towers.

    python -m experiments.train --config=configs/openclip.py --workdir=runs/openclip
    python -m experiments.train --config=configs/openclip.py:ViT-L-14 --workdir=runs/openclip_l14

The argument is a model. A batch that does not fit onto fewer GPUs than the paper's needs gradient caching:
`python -m experiments.plan --config=configs/openclip.py --device=H200 --devices=8` recommends it, and `--target=1024`
shows 1 to 1,024 GPUs.

| model | batch | published on | time | ImageNet zero-shot top-1, in % |
| --- | --- | --- | --- | --- |
| ViT-B-32 (default) | 32,768 | 128 A100 (40 GB) | 36 hours | 62.96 |
| ViT-B-16 | 33,792 | 176 A100 (40 GB) | 61 hours | 67.07 |
| ViT-B-16-plus-240 | 35,840 | 224 A100 (40 GB) | 61 hours | 69.21 |
| ViT-L-14, gradient checkpointing | 38,400 | 400 A100 (40 GB) | 127 hours | 72.77 |

Data: tar files of img2dataset, `data/laion400m/00000.tar` to `41455.tar`. The accuracy is measured after each of 32
epochs, on `imagenet1k` in the layout of clip_benchmark below `evaluation.data_dir`.

| setting | source |
| --- | --- |
| model, 256 pairs per GPU on 32 hosts of 4, 32 epochs, 2,000 steps of warm-up, LAION-400M | README, "SLURM" |
| batches, GPUs, times, accuracies of all models | docs/PRETRAINED.md |
| learning rate 5e-4, betas 0.9 and 0.98, eps 1e-6, weight decay 0.2, cosine, crops of 0.9 to 1 | OpenCLIP's defaults |
| bf16 for automatic mixed precision | choice: there is no fp16 with loss scaling here |
| 400 million pairs an epoch | choice: the README gives no number of samples |
| settings of the other models like those of ViT-B-32 | choice: not published |

The recipe has not been run at full size here; times and accuracies are the published ones.

Ilharco et al., OpenCLIP (2021), https://github.com/mlfoundations/open_clip.
"""

from ml_collections import ConfigDict

from configs import base, changes

_EPOCHS, _SAMPLES = 32, 400_000_000
_BATCHES = {
    "ViT-B-32": 128 * 256,
    "ViT-B-16": 176 * 192,
    "ViT-B-16-plus-240": 224 * 160,
    "ViT-L-14": 400 * 96,
}
_CHECKPOINTED = "ViT-L-14"


def get_config(argument: str = "ViT-B-32") -> ConfigDict:
    """Return OpenCLIP's settings on LAION-400M; `docs/settings.md` explains them.

    Args:
      argument: model, see above.

    Raises:
      ValueError: the model has no settings.
    """
    model, _ = changes.parse(argument, tuple(_BATCHES), {})
    config = base.get_config()
    config.dataset = "data/laion400m/*.tar"
    config.model = model
    config.precision = "bf16"
    if model == _CHECKPOINTED:
        config.model_overrides = "vision.remat=full,text.remat=full"
    config.batch_size = _BATCHES[model]
    config.total_steps = _EPOCHS * _SAMPLES // config.batch_size
    config.optimizer.learning_rate, config.optimizer.weight_decay = 5e-4, 0.2
    config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps = 0.9, 0.98, 1e-6
    config.optimizer.warmup_steps, config.optimizer.warmup_start = 2000, "one_step"
    config.eval_every = config.checkpoint_every = _SAMPLES // config.batch_size
    config.evaluations = ("imagenet1k",)
    return config
