"""Training of dense text retrieval, on queries with their passages."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import jax
from jax.sharding import Mesh

from infcl_jax.data import (
    Corpus,
    FeatureStore,
    PairTexts,
    QuerySource,
    Source,
    TrainIterator,
    load_tokenizer,
    pair_iterator,
    read_judgments,
    read_questions,
)
from infcl_jax.data.feature_store import TeacherFeatures, TeacherTokens
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.evaluation import TextRetrievalSuite
from infcl_jax.inference.pretrained_tokenizer import pretrained_tokenizer
from infcl_jax.inference.text_encoder import TextEncoder
from infcl_jax.models import TextPair, TextPairConfig, text_pair_config
from infcl_jax.models.registry import change_config
from infcl_jax.run.initialize import initialize_pair, open_bert
from infcl_jax.run.model import restored_model
from infcl_jax.run.tokenizer import load_run_tokenizer
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import data_mesh, flat_mesh, shard_batch
from infcl_jax.settings import RunConfig, check_model_overrides, model_changes
from infcl_jax.training import TrainState

_BATCH = ("query", "passage", "passage_mask")  # entries of a batch that the step takes


@dataclasses.dataclass(frozen=True, eq=False)
class TextRetrievalTask:
    """Contrastive training of a `TextPair` model, see `infcl_jax.run.task`.

    Attributes:
      config: settings of the run.
      unit: name of the rows of a batch.
      prefixes: sizes of the feature prefixes to train; not supported.
      precomputed: frozen towers with cached features; not supported.
      init_logit_scale: logarithm of the scale of the similarities.
    """

    config: RunConfig

    unit: ClassVar[str] = "queries"
    prefixes: ClassVar[tuple[int, ...]] = ()
    precomputed: ClassVar[tuple[str, ...]] = ()
    init_logit_scale: ClassVar[float] = 0.0

    @property
    def passages(self) -> int:
        """Passages of each query."""
        return 1 + self.config.text_retrieval.hard_negatives

    @functools.cached_property
    def base_model(self) -> TextPairConfig:
        """Model configuration without overrides."""
        return cast(TextPairConfig, text_pair_config(self.config.model))

    @functools.cached_property
    def model_config(self) -> TextPairConfig:
        """Model configuration with overrides.

        Raises:
          ValueError: an override is unknown or has the wrong type.
        """
        base, overrides = self.base_model, model_changes(self.config.precision, self.config.model_overrides)
        check_model_overrides(base, overrides)
        if base.text.projection == "none" and "text.projection" not in overrides:
            overrides.setdefault("embed_dim", overrides.get("text.width", base.text.width))
        return change_config(base, **overrides)

    def tokenizer(self, workdir: str | Path | None = None) -> BaseTokenizer:
        """Load the tokenizer, see `load_run_tokenizer`."""
        of_weights = None if self.config.init.text is None else self._tokenizer_of_weights
        size = self.base_model.text.vocab_size
        return load_run_tokenizer(self.config, self.model_config, size, of_weights, workdir)

    def _tokenizer_of_weights(self) -> BaseTokenizer:
        weights = open_bert(self.config.init.text, self.model_config)
        return pretrained_tokenizer(weights, self.model_config, self.config.text_cleaning)

    def pair_texts(self, tokenizer: BaseTokenizer) -> PairTexts:
        """Return the tokenization of queries and passages.

        Raises:
          ValueError: queries have more tokens than the context length.
        """
        length = self.config.text_retrieval.query_length
        if length is not None and length > tokenizer.context_length:
            raise ValueError(
                f"expected text_retrieval.query_length <= text.context_length={tokenizer.context_length}, got {length}"
            )
        return PairTexts(tokenizer, length, self.config.text_retrieval.separator)

    def source(self) -> Source:
        """Open the training data, see `infcl_jax.data.QuerySource`."""
        return cast(Source, QuerySource(self.config.dataset, self.config.split))

    def training_data(
        self,
        source: Source,
        tokenizer: BaseTokenizer,
        mesh: Mesh,
        features: Mapping[str, FeatureStore] | None = None,
        teacher: TeacherTokens | TeacherFeatures | None = None,
    ) -> TrainIterator:
        """Create the endless iterator over this process's rows of training batches, see `pair_iterator`."""
        del mesh, features, teacher  # without images to decode, frozen towers and teachers
        config, settings = self.config, self.config.text_retrieval
        return pair_iterator(
            cast(QuerySource, source),
            self.pair_texts(tokenizer),
            batch_size=config.batch_size,
            hard_negatives=settings.hard_negatives,
            positive=settings.positive,
            seed=config.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            num_workers=config.num_workers,
            num_threads=config.num_threads,
            prefetch_batches=config.prefetch_batches,
            max_bad_records=config.max_bad_records,
        )

    def next_batch(self, data: TrainIterator, mesh: Mesh) -> dict[str, Any]:
        """Return the batch of the next step, see `infcl_jax.run.next_batch`."""
        batch = next(data)
        texts = {name: batch[name] for name in _BATCH}
        if self.config.grad_cache.residency == "host":
            return texts
        return {name: shard_batch(mesh, array) for name, array in texts.items()}

    def batch_shapes(self, tokenizer: BaseTokenizer, mesh: Mesh) -> None:
        """Return None: the first step is compiled when it has its batch."""

    def suite(
        self,
        model: TextPair,
        tokenizer: BaseTokenizer,
        mesh: Mesh,
        say: Callable[[str], None] | None,
        check: Callable[[], None] | None,
    ) -> TextRetrievalSuite:
        """Open the corpus and the questions, see `infcl_jax.run.evaluation_suite`."""
        del say  # the search is silent
        settings = self.config.text_retrieval
        suite = TextRetrievalSuite(model, self.pair_texts(tokenizer), flat_mesh(mesh))
        if settings.corpus is None or settings.questions is None:
            return suite
        corpus = Corpus(settings.corpus)
        for row in (0, len(corpus) - 1):
            corpus[row]  # raises before the first step if the file is no corpus
        suite = dataclasses.replace(
            suite,
            corpus=corpus,
            questions=read_questions(settings.questions),
            judgments=None if settings.judgments is None else read_judgments(settings.judgments),
            batch_size=self.config.evaluation.batch_size,
            check=check or (lambda: None),
            names=(settings.questions, settings.judgments or "the judgments"),
        )
        suite.check_inputs()
        return suite

    def initialize(self, state: TrainState) -> TrainState:
        """Return a state with the parameters of the setting `init.text`."""
        path = self.config.init.text
        return state if path is None else initialize_pair(path, self.model_config, state)

    def load(
        self,
        workdir: Path,
        step: int | None,
        tokenizer: str | BaseTokenizer | None,
        dtype: str | None,
        mesh: Mesh,
        batch_size: int,
    ) -> TextEncoder:
        """Load the encoders of a checkpoint, see `infcl_jax.load`."""
        _, config, variables = restored_model(self.model_config, workdir, mesh, step, dtype)
        if tokenizer is None:
            tokenizer = self.tokenizer(workdir)
        elif not isinstance(tokenizer, BaseTokenizer):
            tokenizer = load_tokenizer(tokenizer, config.text.context_length)
        return TextEncoder(config, variables, self.pair_texts(tokenizer), mesh, batch_size)

    def export(self, workdir: Path, output: Path, format: str | None, dim: int | None) -> str:
        """Write the latest checkpoint for other programs, see `infcl_jax.export`."""
        if format not in (None, "hf") or dim is not None:
            raise ValueError(f"expected format 'hf' and no dim for a run of text retrieval, got {format!r} and {dim}")
        mesh = data_mesh(jax.local_devices(backend="cpu")[:1])
        checked = self.load(workdir, None, None, None, mesh, batch_size=1).save(output)
        say(f"exported {workdir}: {checked}")
        return checked
