"""Frozen towers of a run, whose features may be cached: of the model and of a teacher."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from infcl_jax.data import FeatureStore, PairTexts, TowerInput, cache_features, feature_key
from infcl_jax.data.feature_store import TeacherFeatures, TeacherTokens
from infcl_jax.data.parallelism import usable_cores
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.models import CLIP, TOWERS, TextPair
from infcl_jax.runtime.mesh import to_host
from infcl_jax.runtime.processes import gather, local_processes
from infcl_jax.training import GradCacheConfig
from infcl_jax.training.frozen import frozen_encoder, tower_variables
from infcl_jax.training.step import TrainStep
from infcl_jax.training.teacher import with_teacher

if TYPE_CHECKING:
    from infcl_jax.run.base import Run

TeacherInputs = TeacherTokens | TeacherFeatures | PairTexts  # entries that batches have for a teacher

_FOLDER = "features"  # in the work directory
_IN_WORKDIR = "workdir"  # value of cache_frozen, distill.cache and guide.cache


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """Computation of the features of all samples of a run, once."""

    run: "Run"
    workdir: Path
    say: Callable[[str], None]

    def features(
        self, towers: Sequence[str], model: CLIP, variables: Any, tokenizer: BaseTokenizer, folder: str, owner: str
    ) -> dict[str, FeatureStore]:
        """Return features by tower, of which those that the cache lacks are computed from images' central squares.

        All processes must call this method. Lines of progress name the owner, such as "frozen".
        """
        run, config, devices, stores = self.run, self.run.config, self.run.mesh.local_devices, {}
        # As many rows as in a step, for features of equal bits; texts are padded.
        rows = (run.grad_cache.chunk_size or config.batch_size) // run.mesh.size
        for name in towers:
            weights = on_host(tower_variables(variables, name))
            image_size: int = model.visual.image_size  # type: ignore[attr-defined]
            tower = TowerInput(name, image_size, tokenizer, config.max_image_pixels)
            facts = (getattr(model, TOWERS[name]), model.feature_dtype, model.image_mean, model.image_std)
            stores[name] = cache_features(
                run.source,
                tower,
                frozen_encoder(model.apply, weights, name, devices),
                rows * len(devices),
                self.workdir / _FOLDER if folder == _IN_WORKDIR else Path(folder),
                feature_key(run.source, tower, repr(facts), flatten_dict(weights, sep="/")),
                threads=config.num_threads or max(1, usable_cores() // local_processes().cores),
                process_index=jax.process_index(),
                process_count=jax.process_count(),
                say=self.say,
            )
            self.say(f"features of the {owner} {name} tower: {len(run.source)} samples in {stores[name].folder}")
        if stores:
            gather(None)  # once all processes have written their share
        return stores


def on_host(variables: Any) -> Any:
    """Copy variables to the host; a collective with several processes."""
    return jax.device_get(variables) if jax.process_count() == 1 else to_host(variables)


@dataclasses.dataclass(eq=False)
class Teacher:
    """Frozen model of a run with distillation or guided negatives.

    Attributes:
      model: its model.
      variables: its variables on the host; None once all of its features are cached.
      texts: its tokenizer; for text retrieval the tokenization of queries and passages.
      scale: inverse temperature of its similarities, at most `max_logit_scale` if that is set.
      cache: folder of its cached features, or "workdir"; None: it encodes the batch of each step.
    """

    model: CLIP | TextPair
    variables: Any
    texts: BaseTokenizer | PairTexts
    scale: float
    cache: str | None

    def inputs(self, texts: BaseTokenizer | PairTexts, cache: FeatureCache) -> TeacherInputs | None:
        """Return cached features, or the tokens of a teacher with another tokenizer than the student; else None.

        All processes must call this method, which computes the features that the cache lacks.
        """
        if self.cache is not None:
            arguments = self.model, self.variables, self.texts, self.cache
            features = TeacherFeatures(cache.features(tuple(TOWERS), *arguments, "teacher's"))  # type: ignore[arg-type]
            self.variables = None
            return features
        own = self.own_tokens(texts)
        return own if own is None or isinstance(own, PairTexts) else TeacherTokens(own)

    def own_tokens(self, texts: BaseTokenizer | PairTexts) -> BaseTokenizer | PairTexts | None:
        """Return the tokenization of the teacher's own token ids; None for the student's."""
        return None if self.cache is not None or _fingerprint(self.texts) == _fingerprint(texts) else self.texts

    def with_features(
        self, step: TrainStep, mesh: Mesh, cache: GradCacheConfig, padded: Collection[str] = ()
    ) -> TrainStep:
        """Return a step that gets the teacher's features of its batch, encoded in the chunks of the step.

        For `padded` see `with_teacher`.
        """
        return step if self.cache is not None else with_teacher(step, self.model, self.variables, mesh, cache, padded)


def _fingerprint(texts: BaseTokenizer | PairTexts) -> tuple[Any, ...]:
    """Return what decides the token ids of texts."""
    if isinstance(texts, PairTexts):
        return *_fingerprint(texts.tokenizer), texts.query_tokenizer.context_length, texts.separator
    return (TowerInput("text", 0, texts).fingerprint(),)
