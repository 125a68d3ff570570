"""The kinds of runs."""

from typing import Any

from infcl_jax.models import text_pair_config
from infcl_jax.run.base import Run
from infcl_jax.run.image_text import ImageTextRun
from infcl_jax.run.text_retrieval import TextRetrievalRun
from infcl_jax.settings import RunConfig


def make_run(config: RunConfig, *parts: Any, **further: Any) -> Run:
    """Return a run of the kind that its model decides; for the other arguments see `Run`."""
    kind = ImageTextRun if text_pair_config(config.model) is None else TextRetrievalRun
    return kind(config, *parts, **further)
