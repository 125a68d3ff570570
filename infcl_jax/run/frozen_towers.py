"""Cached features of frozen towers: those of the model, and those of a teacher."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from infcl_jax.data import FeatureStore, Source, TowerInput, cache_features, feature_key
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.models import CLIP, TOWERS
from infcl_jax.runtime.mesh import to_host
from infcl_jax.runtime.processes import gather, local_processes
from infcl_jax.training.frozen import frozen_encoder, tower_variables

_FOLDER = "features"  # in the work directory
_IN_WORKDIR = "workdir"  # value of cache_frozen and distill.cache


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """Computation of the features of all samples, once.

    Attributes:
      source: training data.
      workdir: directory of the run.
      rows: rows encoded at once on each device. Those of a training step give features of the same bits.
      devices: devices of this process that share the rows.
      threads: threads that read and decode; None: one per core.
      max_image_pixels: largest number of pixels of an encoded image; larger ones are bad samples.
      say: function that gets lines of progress.
    """

    source: Source
    workdir: Path
    rows: int
    devices: Sequence[jax.Device]
    threads: int | None
    max_image_pixels: int
    say: Callable[[str], None]

    def features(
        self, towers: Sequence[str], model: CLIP, variables: Any, tokenizer: BaseTokenizer, folder: str, owner: str
    ) -> dict[str, FeatureStore]:
        """Compute the features that a cache lacks, from the central square of each image.

        All processes must call this method.

        Args:
          towers: frozen towers, "image" or "text".
          model: model of the towers.
          variables: its variables.
          tokenizer: tokenizer of the captions.
          folder: folder of the cache, or "workdir" for one in the work directory.
          owner: words for the model in lines of progress, such as "frozen".

        Returns:
          Features by tower.
        """
        cache, stores = self.workdir / _FOLDER if folder == _IN_WORKDIR else Path(folder), {}
        for name in towers:
            weights = on_host(tower_variables(variables, name))
            image_size: int = model.visual.image_size  # type: ignore[attr-defined]
            tower = TowerInput(name, image_size, tokenizer, self.max_image_pixels)
            facts = (getattr(model, TOWERS[name]), model.feature_dtype, model.image_mean, model.image_std)
            stores[name] = cache_features(
                self.source,
                tower,
                frozen_encoder(model.apply, weights, name, self.devices),
                self.rows * len(self.devices),
                cache,
                feature_key(self.source, tower, repr(facts), flatten_dict(weights, sep="/")),
                threads=self.threads or max(1, usable_cores() // local_processes().cores),
                process_index=jax.process_index(),
                process_count=jax.process_count(),
                say=self.say,
            )
            self.say(f"features of the {owner} {name} tower: {len(self.source)} samples in {stores[name].folder}")
        if stores:
            gather(None)  # once all processes have written their share
        return stores


def on_host(variables: Any) -> Any:
    """Copy variables to the host; a collective with several processes."""
    return jax.device_get(variables) if jax.process_count() == 1 else to_host(variables)
