"""Teacher of a run with distillation: its model and what a step gets from it."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from infcl_jax.data import TowerInput
from infcl_jax.data.feature_store import TeacherFeatures, TeacherTokens
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.models import CLIP, TOWERS
from infcl_jax.run.frozen_towers import FeatureCache, on_host
from infcl_jax.run.load import load_encoder
from infcl_jax.runtime.mesh import flat_mesh
from infcl_jax.settings import RunConfig
from infcl_jax.training import GradCacheConfig
from infcl_jax.training.step import TrainStep
from infcl_jax.training.teacher import TeacherTowers


@dataclasses.dataclass(eq=False)
class Teacher:
    """Teacher of a run.

    Attributes:
      model: its model.
      variables: its variables on the host; None once all of its features are cached.
      tokenizer: its tokenizer.
      scale: inverse temperature of its similarities, at most `max_logit_scale` if that is set.
      cache: folder of its cached features, or "workdir"; None: it encodes the batch of each step.
    """

    model: CLIP
    variables: Any
    tokenizer: BaseTokenizer
    scale: float
    cache: str | None

    def inputs(self, tokenizer: BaseTokenizer, cache: FeatureCache) -> TeacherTokens | TeacherFeatures | None:
        """Return what the batches of the run need for the teacher.

        With a cache, the features of all samples are computed first, unless the cache has them. All processes must
        call this method.

        Args:
          tokenizer: tokenizer of the student.
          cache: computation of features.

        Returns:
          Cached features, or the tokens of a teacher with another tokenizer than the student; else None.
        """
        if self.cache is not None:
            arguments = self.model, self.variables, self.tokenizer, self.cache
            features = TeacherFeatures(cache.features(tuple(TOWERS), *arguments, "teacher's"))
            self.variables = None
            return features
        theirs, ours = (TowerInput("text", 0, each).fingerprint() for each in (self.tokenizer, tokenizer))
        return None if theirs == ours else TeacherTokens(self.tokenizer)

    def with_features(self, step: TrainStep, mesh: Mesh, cache: GradCacheConfig) -> TrainStep:
        """Return a step that gets the teacher's features of its batch.

        Args:
          step: training step with the loss of distillation.
          mesh: devices over which the batch is sharded.
          cache: gradient caching of the step, whose chunks the teacher encodes.
        """
        if self.cache is not None:
            return step
        on_device = cache.residency == "device"
        return TeacherTowers(self.model, self.variables, mesh, cache.chunk_size, on_device).with_features(step)


def load_teacher(config: RunConfig, mesh: Mesh) -> Teacher | None:
    """Load the teacher of a run; None without one.

    Args:
      config: settings of the run.
      mesh: devices over which the batch is sharded.

    Raises:
      FileNotFoundError, ValueError, ImportError: `distill.teacher` holds no model, see `infcl_jax.load`.
    """
    if config.distill.teacher is None:
        return None
    encoder, limit = load_encoder(config.distill.teacher, mesh=flat_mesh(mesh)), config.max_logit_scale
    scale = encoder.logit_scale if limit is None else min(encoder.logit_scale, limit)
    return Teacher(encoder.model, on_host(encoder.variables), encoder.tokenizer, scale, config.distill.cache)
