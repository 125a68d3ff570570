"""SigLIP and SigLiT: the sigmoid loss on WebLI.

    python -m experiments.train --config=configs/siglip.py --workdir=runs/siglip
    python -m experiments.train --config=configs/siglip.py:base,batch_size=8192,millions=3000 --workdir=runs/siglip_8k
    python -m experiments.train --config=configs/siglip.py:siglit --workdir=runs/siglit

The argument is an experiment, followed by changes: `batch_size`, and `millions` of training pairs.

| experiment | models | tokens | batch | pairs | published on | ImageNet zero-shot top-1, in % |
| --- | --- | --- | --- | --- | --- | --- |
| base (default) | ViT-B/16, base text, random | 16 | 32,768 | 9 billion | 32 TPUv4, 5 days | 73.4 (Table 1) |
| finetune | ViT-B/16 pretrained, base text | 16 | 16,384 | 2.4 billion | 16 TPUv4, 3 days | 71.0 (Table 1) |
| scaled_b | ViT-B/16 at 256 pixels, base text, random | 64 | 32,768 | 40 billion | | 76.7 (Table 3) |
| scaled_l | ViT-L/16 at 256 pixels, large text, random | 64 | 32,768 | 40 billion | | 80.5 (Table 3) |
| siglit | ViT-g/14 frozen, base text | 16 | 32,768 | 18 billion | | 84.6 (Table 8) |
| siglit_4 | ViT-g/14 frozen, large text | 16 | 20,480 | 107,000 steps | 4 TPUv4, 2 days | 84.5 (Table 1) |

Table 5 has base with 3 billion pairs: 51.5, 57.3, 62.1, 65.3, 68.6 and 69.9 % for batches of 512, 1k, 2k, 4k, 8k and
32k. Accuracies of scaled models include 5 billion pairs more at the final resolution, with a hundredth of the learning
rate and no weight decay.

Data: tar files in `data/webli_en`, for SigLiT in `data/lit`; the paper's datasets are not public. Pretrained image
towers: folders of OpenCLIP's, `data/siglip/ViT-B-16-SigLIP` and `data/siglip/ViT-g-14`. Tokenizer:
`data/siglip/c4_en.model`, sentencepiece with 32,000 entries. The accuracy is measured 20 times, on `imagenet1k` in the
layout of clip_benchmark below `evaluation.data_dir`.

| setting | source |
| --- | --- |
| Adafactor 1e-3, weight decay 1e-4, betas 0.9 and 0.95, cosine, no crops | appendices A and C |
| bias -10, temperature 10; tokenizer | sections 3.2 and 4.2 |
| 200 million pairs of warm-up | appendix A for SigLiT; choice for the others |
| finetune: a tenth of the learning rate and no weight decay for the image tower | section 4.5 |
| siglit_4: Lion 1e-4, weight decay 1e-7, 6,500 steps of warm-up | section 4.4 |
| siglit_4: betas 0.9 and 0.99 | choice: Lion's defaults |
| gradient clipping at norm 1 | choice: that of big_vision's `siglip_lit_coco.py` |
| bf16 for activations | choice |
| pretrained towers of SigLIP and OpenCLIP | choice: the paper has ViTs trained on images with labels |
| siglit: 224 pixels, 1,024 features, those of OpenCLIP's ViT-g/14 | choice: the paper has 288 pixels |
| scaled: GPUs | open: without gradient caching scaled_b needs 64 H100, scaled_l 128 |

The recipe has not been run at full size here; times and accuracies are the published ones. The paper has TPUs; plan for
GPUs with `python -m experiments.plan --config=configs/siglip.py --device=H100 --target=1024`.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023).
"""

import math
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import base, changes

_WARMUP_PAIRS = 200_000_000
_EVALUATIONS = 20
_TEXT = "text.vocab_size=32000,text.causal=False,text.pool=last,text.projection_bias=True"
_BASE_TEXT, _LARGE_TEXT = "text.width=768,text.layers=12,text.heads=12", "text.width=1024,text.layers=24,text.heads=16"


class _Experiment(NamedTuple):
    """Model, batch and length of an experiment.

    Attributes:
      model: name of the model.
      overrides: changes to the model besides dtype and text length.
      tokens: length of texts.
      batch_size: global batch size.
      pairs: training pairs.
    """

    model: str
    overrides: str
    tokens: int
    batch_size: int
    pairs: int


_BILLION = 10**9
_EXPERIMENTS = {
    "base": _Experiment("ViT-B-16-SigLIP", "", 16, 32_768, 9 * _BILLION),
    "finetune": _Experiment("ViT-B-16-SigLIP", "", 16, 16_384, 24 * _BILLION // 10),
    "scaled_b": _Experiment("ViT-B-16-SigLIP-256", "", 64, 32_768, 40 * _BILLION),
    "scaled_l": _Experiment("ViT-L-16-SigLIP-256", "", 64, 32_768, 40 * _BILLION),
    "siglit": _Experiment("ViT-g-14", f"{_TEXT},{_BASE_TEXT}", 16, 32_768, 18 * _BILLION),
    "siglit_4": _Experiment("ViT-g-14", f"{_TEXT},{_LARGE_TEXT}", 16, 20_480, 107_000 * 20_480),
}


def get_config(argument: str = "base") -> ConfigDict:
    """Return the settings of an experiment; `docs/settings.md` explains them.

    Args:
      argument: experiment and changes, such as "base,batch_size=8192", see above.

    Raises:
      ValueError: the experiment or a change is unknown.
    """
    choices: dict[str, tuple[Any, ...]] = {"batch_size": (None, int), "millions": (None, int)}
    name, chosen = changes.parse(argument, tuple(_EXPERIMENTS), choices)
    experiment = _EXPERIMENTS[name]
    config = base.get_config()
    config.dataset = "data/lit/*.tar" if name.startswith("siglit") else "data/webli_en/*.tar"
    config.augmentation.scale = (1.0, 1.0)
    config.tokenizer = "sentencepiece:data/siglip/c4_en.model"
    config.model, config.loss = experiment.model, "siglip"
    config.precision = "bf16"
    overrides = (f"text.context_length={experiment.tokens}", experiment.overrides)
    config.model_overrides = ",".join(filter(None, overrides))
    config.batch_size = chosen["batch_size"] or experiment.batch_size
    pairs = chosen["millions"] * 10**6 if chosen["millions"] else experiment.pairs
    config.total_steps = pairs // config.batch_size
    config.eval_every = config.checkpoint_every = max(1, config.total_steps // _EVALUATIONS)
    config.evaluations = ("imagenet1k",)
    optimizer = config.optimizer
    optimizer.name, optimizer.learning_rate, optimizer.weight_decay = "adafactor", 1e-3, 1e-4
    optimizer.beta1, optimizer.beta2 = 0.9, 0.95
    optimizer.warmup_steps = _WARMUP_PAIRS // config.batch_size
    optimizer.clip_norm = 1.0
    if name == "finetune":
        config.init.image = "data/siglip/ViT-B-16-SigLIP"
        optimizer.learning_rate_rules = (("visual/.*", 0.1), (".*", 1.0))
        optimizer.weight_decay_rules = (("visual/.*", 0.0), (".*(kernel|embedding)", 1.0), (".*", 0.0))
    if name.startswith("siglit"):
        config.init.image = "data/siglip/ViT-g-14"
        config.frozen, config.cache_frozen = ("image",), "workdir"
        config.model_overrides += f",init_logit_scale={math.log(10)},init_logit_bias=-10.0"
    if name == "siglit_4":
        optimizer.name, optimizer.learning_rate, optimizer.weight_decay = "lion", 1e-4, 1e-7
        optimizer.beta2, optimizer.warmup_steps = 0.99, 6500
    return config
