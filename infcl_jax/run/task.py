"""The kinds of training data."""

from infcl_jax.models import text_pair_config
from infcl_jax.run.image_text import ImageTextTask
from infcl_jax.run.text_retrieval import TextRetrievalTask
from infcl_jax.settings import RunConfig

type Task = ImageTextTask | TextRetrievalTask


def task_of(config: RunConfig) -> Task:
    """Return the task of a run, which its model decides."""
    return ImageTextTask(config) if text_pair_config(config.model) is None else TextRetrievalTask(config)
