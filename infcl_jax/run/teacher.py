"""Teacher of a run with distillation: its model, its cached features and its memory."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from infcl_jax.data import Source, TowerInput, cache_features, feature_key
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.teacher_inputs import TeacherFeatures, TeacherTokens
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.inference.encoder import Encoder, load_encoder
from infcl_jax.models import TOWERS
from infcl_jax.planner import TeacherMemory
from infcl_jax.run.frozen_features import FEATURES_FOLDER, IN_WORKDIR
from infcl_jax.runtime.mesh import flat_mesh, to_host
from infcl_jax.runtime.processes import local_processes
from infcl_jax.settings import RunConfig
from infcl_jax.training.frozen import frozen_encoder, tower_variables
from infcl_jax.training.step import TrainStep
from infcl_jax.training.teacher import TeacherTowers


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """Teacher of a run.

    Attributes:
      encoder: its model, with variables and tokenizer.
      config: settings of the run.
      mesh: devices over which the batch is sharded.
    """

    encoder: Encoder
    config: RunConfig
    mesh: Mesh

    @property
    def scale(self) -> float:
        """Inverse temperature of the teacher's similarities, at most `max_logit_scale` if that is set."""
        limit = self.config.max_logit_scale
        return self.encoder.logit_scale if limit is None else min(self.encoder.logit_scale, limit)

    def memory(self) -> TeacherMemory:
        """Return the memory of the teacher on each device, for the planner."""
        return TeacherMemory(self.encoder.model, cached=self.config.distill.cache is not None)

    def inputs(
        self, workdir: str | Path, source: Source, tokenizer: BaseTokenizer, say: Callable[[str], None]
    ) -> TeacherTokens | TeacherFeatures | None:
        """Return what the batches of the run need for the teacher.

        With `distill.cache` the features of all samples are computed first, unless the cache has them. All processes
        must call this function.

        Args:
          workdir: directory of the run.
          source: training data.
          tokenizer: tokenizer of the student.
          say: function that gets lines of progress.

        Returns:
          Cached features, or the tokens of a teacher with another tokenizer than the student; else None.
        """
        if self.config.distill.cache is not None:
            return self._cached(Path(workdir), source, say)
        teacher_text, text = (TowerInput("text", 0, t).fingerprint() for t in (self.encoder.tokenizer, tokenizer))
        return None if teacher_text == text else TeacherTokens(self.encoder.tokenizer)

    def with_features(self, step: TrainStep) -> TrainStep:
        """Return the step of a run, which gets the teacher's features of its batch."""
        if self.config.distill.cache is not None:
            return step
        cache = self.config.grad_cache
        variables = _on_host(self.encoder.variables)
        towers = TeacherTowers(
            self.encoder.model, variables, self.mesh, cache.chunk_size, on_device=cache.residency == "device"
        )
        return towers.with_features(step)

    def _cached(self, workdir: Path, source: Source, say: Callable[[str], None]) -> TeacherFeatures:
        """Compute the features that the cache lacks, from the central square of each image."""
        config, encoder, devices = self.config, self.encoder, self.mesh.local_devices
        folder = workdir / FEATURES_FOLDER if config.distill.cache == IN_WORKDIR else Path(config.distill.cache)
        shard_rows = (config.grad_cache.chunk_size or config.batch_size) // self.mesh.size
        model: Any = encoder.model
        stores = {}
        for name in TOWERS:
            variables = tower_variables(_on_host(encoder.variables), name)
            tower = TowerInput(name, encoder.image_size, encoder.tokenizer, config.max_image_pixels)
            facts = (getattr(model, TOWERS[name]), model.feature_dtype, model.image_mean, model.image_std)
            stores[name] = cache_features(
                source,
                tower,
                frozen_encoder(model.apply, variables, name, devices),
                shard_rows * len(devices),
                folder,
                feature_key(source, tower, repr(facts), flatten_dict(variables, sep="/")),
                threads=config.num_threads or max(1, usable_cores() // local_processes().cores),
                process_index=jax.process_index(),
                process_count=jax.process_count(),
                say=say,
            )
            say(f"features of the teacher's {name} tower: {len(source)} samples in {stores[name].folder}")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("cached features of the teacher")
        return TeacherFeatures(stores)


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
    return Teacher(load_encoder(config.distill.teacher, mesh=flat_mesh(mesh)), config, mesh)


def _on_host(variables: Any) -> Any:
    return jax.device_get(variables) if jax.process_count() == 1 else to_host(variables)
