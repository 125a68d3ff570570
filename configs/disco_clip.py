"""DisCo-CLIP: ViT-B/32 with a learning rate that grows with the batch.

    python -m experiments.train --config=configs/disco_clip.py --workdir=runs/disco
    python -m experiments.train --config=configs/disco_clip.py:laion400m,batch_size=65536 --workdir=runs/disco_400m
    python -m experiments.train --config=configs/disco_clip.py:laion100m,implementation=disco --workdir=runs/gathered

The argument is a dataset, followed by changes:

- `batch_size`: 32768 by default; the paper has 8192, 16384, 65536 and 196608 too. The learning rate is
  5e-4 batch_size / 32768.
- `epochs`: 16 by default for laion100m, 32 for laion400m. The paper has 4 and 8 for laion400m too.
- `implementation`: "best" by default, this library's best for the GPU; or "disco", the paper's decomposition, which
  gathers all features. Their gradients are the same.

| data | batch | epochs | published on | time | ImageNet zero-shot top-1, in % | table |
| --- | --- | --- | --- | --- | --- | --- |
| laion100m | 32,768 | 16 | 64 A100 (40 GB) | 12.1 hours | 51.64 | 2 |
| laion100m | 32,768 | 16 | 8 A100 (40 GB) | 2 days | | 9.3 |
| laion100m | 65,536 | 16 | 64 A100 (40 GB) | | 51.91 | 6 |
| laion400m | 32,768 / 65,536 | 4 | 64 A100 (40 GB) | | 55.52 / 55.50 | 6 |
| laion400m | 32,768 / 65,536 | 8 | 64 A100 (40 GB) | | 59.69 / 59.96 | 6 |
| laion400m | 65,536 | 32 | 64 A100 (40 GB) | | 64.3 | 7 |

Data: tar files of img2dataset in `data/laion100m` and `data/laion400m`, subsets of LAION-2B with 100 and 400 million
pairs. The accuracy is measured after each epoch, on `imagenet1k` in the layout of clip_benchmark below
`evaluation.data_dir`.

| setting | source |
| --- | --- |
| model, sizes of the data, batches, epochs, linear scaling of the learning rate | section 5.1 |
| cosine after linear warm-up, beta2, 76 tokens, checkpointing | section 5.1 |
| weight decay on all parameters but biases, gains and temperature | section 5.1 |
| bf16 for mixed precision | choice |
| weight decay 0.2, beta1 0.9, eps 1e-6 | choice: those of CLIP, on which the paper builds |
| 2,000 steps of warm-up, crops of 0.9 to 1 | choice: those of OpenCLIP, on which the paper builds |
| 224 pixels throughout | the paper trains at one resolution |

The recipe has not been run at full size here; times and accuracies are the published ones.

Chen et al., "DisCo-CLIP: A Distributed Contrastive Loss for Memory Efficient CLIP Training" (2023).
"""

from ml_collections import ConfigDict

from configs import base, changes

_EPOCHS = {"laion100m": 16, "laion400m": 32}
_SAMPLES = {"laion100m": 100_000_000, "laion400m": 400_000_000}
_BASE_BATCH, _BASE_RATE = 32_768, 5e-4


def get_config(argument: str = "laion100m") -> ConfigDict:
    """Return DisCo-CLIP's settings; `docs/settings.md` explains them.

    Args:
      argument: dataset and changes, such as "laion400m,batch_size=65536", see above.

    Raises:
      ValueError: the dataset or a change is unknown.
    """
    name = argument.partition(",")[0]
    choices = {
        "batch_size": (_BASE_BATCH, int),
        "epochs": (_EPOCHS.get(name), int),
        "implementation": ("best", "disco"),
    }
    name, chosen = changes.parse(argument, tuple(_SAMPLES), choices)
    config = base.get_config()
    config.dataset = f"data/{name}/*.tar"
    config.model = "ViT-B-32"
    config.model_overrides = "text.context_length=76,vision.remat=full,text.remat=full"
    config.precision = "bf16"
    if chosen["implementation"] == "disco":
        config.implementation = "disco"
    config.batch_size = chosen["batch_size"]
    epoch = _SAMPLES[name] // config.batch_size
    config.total_steps = chosen["epochs"] * epoch
    config.optimizer.learning_rate = _BASE_RATE * config.batch_size / _BASE_BATCH
    config.optimizer.weight_decay = 0.2
    config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps = 0.9, 0.98, 1e-6
    config.optimizer.warmup_steps = 2000
    config.eval_every = config.checkpoint_every = epoch
    config.evaluations = ("imagenet1k",)
    return config
