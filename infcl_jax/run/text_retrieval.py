"""Parts of a run of dense text retrieval, whose model is a `TextPair`."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from infcl_jax.data import (
    Corpus,
    PairTexts,
    QuerySource,
    Tokenizer,
    TrainIterator,
    pair_iterator,
    read_judgments,
    read_questions,
)
from infcl_jax.data.tokenizers import BaseTokenizer
from infcl_jax.evaluation import TextRetrievalSuite
from infcl_jax.models import TextPairConfig, build_model, text_pair_config, towers_of, variable_shapes
from infcl_jax.models.convert import open_source
from infcl_jax.models.convert.bert import read_config, weight_map
from infcl_jax.models.convert.sources import Source
from infcl_jax.models.convert.text_pair import check_architecture
from infcl_jax.models.convert.weight_map import flat_shapes, to_variables
from infcl_jax.models.registry import change_config
from infcl_jax.runtime.console import say
from infcl_jax.runtime.mesh import flat_mesh
from infcl_jax.settings import RunConfig, check_model_overrides, model_changes
from infcl_jax.training import TrainState
from infcl_jax.training.ema import initial_ema

# Entries of a batch that the step takes.
BATCH = ("query", "passage", "passage_mask")


def read_text_pair(config: RunConfig) -> TextPairConfig | None:
    """Return the model configuration of a run of text retrieval.

    It includes the overrides. The result is None for other runs.

    Raises:
      ValueError: an override is unknown or has the wrong type.
    """
    base = text_pair_config(config.model)
    if base is None:
        return None
    overrides = model_changes(config.precision, config.model_overrides)
    check_model_overrides(base, overrides)
    if base.text.projection == "none" and "text.projection" not in overrides:
        overrides.setdefault("embed_dim", overrides.get("text.width", base.text.width))
    return change_config(base, **overrides)


def pair_texts(config: RunConfig, tokenizer: Tokenizer) -> PairTexts:
    """Return the tokenization of queries and passages.

    Raises:
      ValueError: queries have more tokens than the context length.
    """
    settings = config.text_retrieval
    if settings.query_length is not None and settings.query_length > tokenizer.context_length:
        raise ValueError(
            f"expected text_retrieval.query_length <= text.context_length={tokenizer.context_length}, got "
            f"{settings.query_length}"
        )
    return PairTexts(cast(BaseTokenizer, tokenizer), settings.query_length, settings.separator)


def pair_data(config: RunConfig, source: QuerySource, tokenizer: Tokenizer) -> TrainIterator:
    """Create the endless iterator over this process's rows of training batches.

    Raises:
      ValueError: see `pair_iterator` and `pair_texts`.
    """
    settings = config.text_retrieval
    return pair_iterator(
        source,
        pair_texts(config, tokenizer),
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


def pair_suite(
    config: RunConfig, model: TextPairConfig, mesh: Mesh, tokenizer: Tokenizer, check: Callable[[], None] | None
) -> TextRetrievalSuite:
    """Open the corpus and the questions of a run; see `infcl_jax.run.evaluation_suite`.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a file is damaged, or see `TextRetrievalSuite` and `pair_texts`.
    """
    settings = config.text_retrieval
    suite = TextRetrievalSuite(build_model(model), pair_texts(config, tokenizer), flat_mesh(mesh))
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
        batch_size=config.evaluation.batch_size,
        check=check or (lambda: None),
        names=(settings.questions, settings.judgments or "the judgments"),
    )
    suite.check_inputs()
    return suite


def open_bert(path: str, model: TextPairConfig) -> Source:
    """Open a BERT of Hugging Face with the architecture of a model.

    Raises:
      FileNotFoundError: no such source.
      ValueError: the source is no BERT, or has another architecture.
    """
    source = open_source(path)
    if source.config is None or source.format != "hf":
        raise ValueError(f"expected a BERT of Hugging Face with config.json in {path}, got another model")
    shortest = dataclasses.replace(model.text, context_length=1)  # any length is checked with the other fields
    check_architecture(model, read_config(source.config, shortest), path)
    return source


def initialize_pair(path: str, model: TextPairConfig, state: TrainState) -> TrainState:
    """Initialize both encoders from a BERT of Hugging Face.

    A projection keeps its initial values. The moving averages start at the weights.

    Args:
      path: folder, file or Hub name, see `infcl_jax.models.load_pretrained`.
      model: configuration of the model.
      state: initial train state.

    Raises:
      FileNotFoundError: no such source.
      ValueError: the source is no BERT, or has another architecture.
    """
    source = open_bert(path, model)
    tied = variable_shapes(build_model(dataclasses.replace(model, tied=True)))
    shapes = {name: shape for name, shape in flat_shapes(tied).items() if "/text_projection/" not in name}
    tensors = source.tensors()
    arrays = flat_shapes(to_variables(weight_map(model.text, shapes, tensors), tensors, shapes, source.name))
    params = dict(flat_shapes(state.params))
    for subtree in set(towers_of(state.params).values()):
        for name, array in arrays.items():
            target = name.replace("params/text/", f"{subtree}/", 1)
            params[target] = _placed(array, params[target])
    say(f"initialized both encoders from {path}: {len(arrays)} of {len(flat_shapes(tied))} tensors of each")
    state = state.replace(params=unflatten_dict(params, sep="/"))
    return state if state.ema_config is None else state.replace(ema=initial_ema(state.averaged))


def _placed(array: np.ndarray, current: Any) -> jax.Array:
    return jax.device_put(array.astype(current.dtype), current.sharding)
