"""Inf-CL: LiT and CLIP with batches from 4 thousand to 12 million pairs.

    python -m experiments.train --config=configs/inf_cl.py --workdir=runs/inf_cl
    python -m experiments.train --config=configs/inf_cl.py:cc3m,model=ViT-B/32,batch_size=16384 --workdir=runs/cc3m
    python -m experiments.train --config=configs/inf_cl.py:laion400m,experiment=clip,model=ViT-L/14,offload=yes,\\
        batch_size=4194304 --workdir=runs/offload

The argument is a dataset, followed by changes:

- `experiment`: "lit" by default, a frozen pretrained image tower and a trained text tower (Tables 3, 4, S2 and S3); or
  "clip", both towers from random parameters (Tables 1, 2 and S1, Figures 1, 4 and S2).
- `model`: image tower, "ViT-B/16" (default), "ViT-B/32" or "ViT-L/14".
- `text`: text tower of LiT, "bert" (default) from BERT's weights, or "clip", CLIP's from random parameters.
- `batch_size`: 65536 by default; 16384 for cc3m and 32768 for cc12m, the best of Table S2.
- `gpus`: GPUs that train, 8 by default, on which the global size of the chunks depends.
- `chunk`: pairs encoded at a time on each GPU, by default 256 for LiT (Table 4) and 128 for CLIP (Table 1).
- `offload`: "no" by default; "yes" keeps the batch in host memory, the paper's data offload.

| data, tar files | pairs | layout |
| --- | --- | --- |
| `data/cc3m/*.tar` | 3,018,714 | webdataset, of img2dataset |
| `data/cc12m/*.tar` | 10,445,970 | the same |
| `data/laion400m/*.tar` | 280,321,756 | the same, `00000.tar` to `41407.tar` |
| `data/inf_cl/ViT-B-16` and so on | | pretrained image tower, a folder of OpenCLIP's |
| `data/inf_cl/bert-base-uncased`, `bert-large-uncased` | | BERT of Hugging Face with `tokenizer.json` |

Expected ImageNet zero-shot top-1 of LiT, in %:

| data | model | 4k | 8k | 16k | 32k | 64k | 128k | 256k | 1024k | table |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| cc3m | ViT-B/32 | 47.60 | 51.36 | 53.01 | 52.57 | 51.08 | | | | S2 |
| cc3m | ViT-B/16 | 60.49 | 62.99 | 64.66 | 64.89 | 64.01 | | | | S3 |
| cc12m | ViT-B/32 | | 54.25 | 54.90 | 56.10 | 55.70 | 54.89 | | | S2 |
| laion400m | ViT-B/32 | | | | 63.99 | 66.62 | 66.77 | 65.28 | | S2 |
| laion400m | ViT-B/16 | | | | | 74.93 | | 75.12 | 73.58 | 3 |

Published times: 59 hours an epoch for ViT-L/14 on 8 A800 with any batch (Figure 4). A step of ViT-B/32 takes 5.01 s
with 32,768 pairs and 45.98 s with 262,144 on 8 A800 (Table S1). Largest batches of ViT-L/14 with offload: 4,194,304 on
8 A800, 12,582,912 on 32 (Table 2).

| setting | source |
| --- | --- |
| Adafactor 1e-3, weight decay 1e-4, betas 0.9 and 0.95, cosine, half an epoch of warm-up, 8 epochs | section 4.1 |
| crops of 0.08 to 1, ratios 3/4 to 4/3 | section 4.1 |
| ViT-B/16 with BERT-base for LiT; chunks | section 4.3; Tables 1 and 4 |
| 20 epochs on cc3m and cc12m, gradient clipping at norm 1 for LiT, sizes of the data | the authors' scripts |
| BERT's first token, one linear projection; BERT-large with the large tower | the authors' model files |
| AdamW 5e-4, betas 0.9 and 0.98, eps 1e-8, weight decay 0.5 for CLIP | the authors' scripts; Table 1 has AdamW too |
| bf16 for fp16 with loss scaling | choice |
| image tower of OpenCLIP with its projection, of 512 or 768 features | choice: the authors have ImageNet's ViT |
| ViT-L/14 for LiT | choice: the authors have ViT-L/16 |

The accuracy is measured after each epoch, on `imagenet1k` in the layout of clip_benchmark below `evaluation.data_dir`.
With another image tower the accuracies of LiT differ from the published ones. The recipe has not been run at full size.

Cheng et al., "Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss" (2024), and its
supplement; scripts of https://github.com/DAMO-NLP-SG/Inf-CLIP.
"""

from ml_collections import ConfigDict

from configs import base, changes

_SAMPLES = {"cc3m": 3_018_714, "cc12m": 10_445_970, "laion400m": 280_321_756}
_EPOCHS = {"cc3m": 20, "cc12m": 20, "laion400m": 8}
_BATCHES = {"cc3m": 16_384, "cc12m": 32_768, "laion400m": 65_536}
_CHUNKS = {"lit": 256, "clip": 128}
# BERT of each image tower, and the changes to `bert-ViT-B-32` that give both.
_BERT_CLS = "text.pool=cls,text.projection=linear"
_BERTS = {
    "ViT-B/32": ("bert-base-uncased", _BERT_CLS),
    "ViT-B/16": ("bert-base-uncased", f"{_BERT_CLS},vision.patch_size=16"),
    "ViT-L/14": (
        "bert-large-uncased",
        f"{_BERT_CLS},vision.patch_size=14,vision.width=1024,vision.layers=24,vision.heads=16,embed_dim=768,"
        "text.width=1024,text.layers=24,text.heads=16",
    ),
}


def get_config(argument: str = "laion400m") -> ConfigDict:
    """Return Inf-CL's settings; `docs/settings.md` explains them.

    Args:
      argument: dataset and changes, such as "cc3m,model=ViT-B/32", see above.

    Raises:
      ValueError: the dataset or a change is unknown, or a change does not fit the experiment.
    """
    choices = {
        "experiment": ("lit", "clip"),
        "model": ("ViT-B/16", "ViT-B/32", "ViT-L/14"),
        "text": ("bert", "clip"),
        "batch_size": (None, int),
        "gpus": (8, int),
        "chunk": (None, int),
        "offload": ("no", "yes"),
    }
    name, chosen = changes.parse(argument, tuple(_SAMPLES), choices)
    config = base.get_config()
    config.dataset = f"data/{name}/*.tar"
    config.precision = "bf16"
    config.augmentation.scale = (0.08, 1.0)
    config.batch_size = chosen["batch_size"] or _BATCHES[name]
    epoch = _SAMPLES[name] // config.batch_size
    config.total_steps = epoch * _EPOCHS[name]
    chunk = chosen["chunk"] or _CHUNKS[chosen["experiment"]]
    config.grad_cache.chunk_size = min(chunk * chosen["gpus"], config.batch_size)
    if chosen["offload"] == "yes":
        config.grad_cache.offload = "host"
    config.optimizer.warmup_steps = _SAMPLES[name] // (2 * config.batch_size)
    config.eval_every = config.checkpoint_every = epoch
    config.evaluations = ("imagenet1k",)
    if chosen["experiment"] == "lit":
        _set_lit(config, chosen["model"], chosen["text"])
    else:
        _set_clip(config, chosen["model"])
    return config


def _set_lit(config: ConfigDict, model: str, text: str) -> None:
    config.frozen = ("image",)
    config.init.image = f"data/inf_cl/{model.replace('/', '-')}"
    if text == "bert":
        bert, overrides = _BERTS[model]
        config.model = "bert-ViT-B-32"
        config.model_overrides = overrides
        config.tokenizer = f"hf:data/inf_cl/{bert}"
        config.init.text = f"data/inf_cl/{bert}"
        config.init.rules = (("text/text_projection/.*", ""),)
    else:
        config.model = model
    optimizer = config.optimizer
    optimizer.name, optimizer.learning_rate, optimizer.weight_decay = "adafactor", 1e-3, 1e-4
    optimizer.beta1, optimizer.beta2 = 0.9, 0.95
    optimizer.clip_norm = 1.0


def _set_clip(config: ConfigDict, model: str) -> None:
    config.model = model
    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.weight_decay = 5e-4, 0.5
    optimizer.beta1, optimizer.beta2, optimizer.eps = 0.9, 0.98, 1e-8
