"""What differs between kinds of training data.

A task is a frozen dataclass of the settings of a run with these members:

| member | meaning |
| --- | --- |
| `base_model`, `model_config` | configuration of the model, without and with overrides |
| `tokenizer` | tokenizer that fits the model |
| `source`, `training_data`, `next_batch`, `batch_shapes` | training data, the batches of its steps, and their shapes |
| `suite` | evaluations |
| `initialize` | initial parameters from pretrained weights |
| `prefixes`, `precomputed`, `init_logit_scale` | feature prefixes; towers with cached features; initial temperature |
| `passages`, `unit` | rows of the second tower for each of the first; name of the rows |
| `load`, `export` | encoder of a checkpoint; files for other programs |
"""

from infcl_jax.models import text_pair_config
from infcl_jax.run.image_text import ImageTextTask
from infcl_jax.run.text_retrieval import TextRetrievalTask
from infcl_jax.settings import RunConfig

type Task = ImageTextTask | TextRetrievalTask


def task_of(config: RunConfig) -> Task:
    """Return the task of a run, which its model decides."""
    return ImageTextTask(config) if text_pair_config(config.model) is None else TextRetrievalTask(config)
