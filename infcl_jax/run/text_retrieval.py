"""Training of dense text retrieval, on queries with their passages."""

import dataclasses
import functools
from collections.abc import Mapping
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
    pair_iterator,
    read_judgments,
    read_questions,
)
from infcl_jax.data.text_pairs import PairReader
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.evaluation import TextRetrievalSuite
from infcl_jax.inference.pretrained_tokenizer import pretrained_tokenizer
from infcl_jax.inference.text_encoder import TextEncoder
from infcl_jax.losses.base import RETRIEVAL_TEACHER
from infcl_jax.models import TextPairConfig, text_pair_config
from infcl_jax.run.base import Run
from infcl_jax.run.initialize import initialize_pair, open_bert
from infcl_jax.run.text_packing import TextReader, silent
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import data_mesh, flat_mesh
from infcl_jax.training import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class TextRetrievalRun(Run[TextPairConfig, TextEncoder]):
    """Contrastive training of a `TextPair` model."""

    unit: ClassVar[str] = "queries"

    @property
    def passages(self) -> int:
        """Passages of each query."""
        return 1 + self.config.text_retrieval.hard_negatives

    @functools.cached_property
    def base_model(self) -> TextPairConfig:
        """Model configuration without overrides."""
        return cast(TextPairConfig, text_pair_config(self.config.model))

    def tokenizer_of_weights(self) -> BaseTokenizer | None:
        """Load the tokenizer of `init.text`."""
        if self.config.init.text is None:
            return None
        weights = open_bert(self.config.init.text, self.model_config)
        return pretrained_tokenizer(weights, self.model_config, self.config.text_cleaning)

    def pair_texts(self, tokenizer: BaseTokenizer) -> PairTexts:
        """Return the tokenization of queries and passages."""
        length = self.config.text_retrieval.query_length
        if length is not None and length > tokenizer.context_length:
            raise ValueError(
                f"expected text_retrieval.query_length <= text.context_length={tokenizer.context_length}, got {length}"
            )
        return PairTexts(tokenizer, length, self.config.text_retrieval.separator)

    @property
    def texts(self) -> PairTexts:
        """Tokenization of queries and passages."""
        return self.pair_texts(self.tokenizer)

    def open_data(self) -> Source:
        """Open the training data, see `infcl_jax.data.QuerySource`."""
        return cast(Source, QuerySource(self.config.dataset, self.config.split))

    def open_iterator(self, features: Mapping[str, FeatureStore] | None = None, teacher: Any = None) -> TrainIterator:
        """Create the iterator over training batches, see `pair_iterator`."""
        del features  # without frozen towers
        settings = self.config.text_retrieval
        return pair_iterator(
            cast(QuerySource, self.source),
            self.texts,
            hard_negatives=settings.hard_negatives,
            positive=settings.positive,
            teacher=teacher,
            **self.iterator_options(),
        )

    def text_reader(self) -> TextReader:
        """Return the reader of the token ids of `text_towers`."""
        settings, teacher = self.config.text_retrieval, None
        if self.teacher is not None and (own := self.teacher.own_tokens(self.texts)) is not None:
            teacher = silent(cast(PairTexts, own))
        choice = settings.hard_negatives, settings.positive, self.config.seed
        return PairReader(cast(QuerySource, self.source), silent(self.texts), *choice, teacher)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return queries, passages, the mask of passages, and what the teacher needs."""
        inputs = {name: batch[name] for name in ("query", "passage", "passage_mask")}
        return inputs | {name: batch[name] for name in RETRIEVAL_TEACHER if name in batch}

    @functools.cached_property
    def suite(self) -> TextRetrievalSuite:
        """Search of the corpus for the questions, see `infcl_jax.run.evaluation_suite`."""
        settings = self.config.text_retrieval
        suite = TextRetrievalSuite(self.model, self.texts, flat_mesh(self.mesh))
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
            say=self.say,
            check=self.check,
            names=(settings.questions, settings.judgments or "the judgments"),
        )
        suite.check_inputs()
        return suite

    def _with_pretrained(self, state: TrainState) -> TrainState:
        """Replace the parameters that the setting `init.text` names."""
        init = self.config.init.text
        return state if init is None else initialize_pair(init, self.model_config, state)

    def encoder(
        self, config: TextPairConfig, variables: Any, tokenizer: BaseTokenizer, mesh: Mesh, batch_size: int
    ) -> TextEncoder:
        """Return the encoders of a restored model."""
        return TextEncoder(config, variables, self.pair_texts(tokenizer), mesh, batch_size)

    def export(self, output: Path, format: str | None, dim: int | None) -> str:
        """Write the latest checkpoint for other programs, see `infcl_jax.export`."""
        if format not in (None, "hf") or dim is not None:
            raise ValueError(f"expected format 'hf' and no dim for a run of text retrieval, got {format!r} and {dim}")
        mesh = data_mesh(jax.local_devices(backend="cpu")[:1])
        checked = self.load(None, None, None, mesh, batch_size=1).save(output)
        say(f"exported {self.origin}: {checked}")
        return checked
