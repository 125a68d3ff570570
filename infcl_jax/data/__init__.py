"""Captioned images and text pairs: sources, tokenizers, transforms, and batches for training and evaluation."""

from infcl_jax.data.cached_features import TowerInput, cache_features, check_deterministic, feature_key
from infcl_jax.data.convert import convert
from infcl_jax.data.eval_batches import EvalBatches, eval_batches
from infcl_jax.data.feature_store import FeatureStore
from infcl_jax.data.iterator import BatchReader, TrainIterator
from infcl_jax.data.pipeline import train_iterator
from infcl_jax.data.prepare import prepare, prepare_tokenizer
from infcl_jax.data.sources import SOURCES, BadRecordError, Classes, Example, Source, classes, load_source
from infcl_jax.data.sources.text_questions import Question, read_judgments, read_questions
from infcl_jax.data.sources.text_records import Passage
from infcl_jax.data.sources.text_retrieval import Corpus, QuerySource
from infcl_jax.data.text_pairs import PairTexts, pair_iterator
from infcl_jax.data.tokenizers import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer, train_bpe
from infcl_jax.data.transforms import Augmentation

__all__ = [
    "SOURCES",
    "Augmentation",
    "BadRecordError",
    "BatchReader",
    "ByteTokenizer",
    "Classes",
    "Corpus",
    "EvalBatches",
    "Example",
    "FeatureStore",
    "PairTexts",
    "Passage",
    "QuerySource",
    "Question",
    "Source",
    "Tokenizer",
    "TowerInput",
    "TrainIterator",
    "cache_features",
    "check_deterministic",
    "check_vocabulary",
    "classes",
    "convert",
    "eval_batches",
    "feature_key",
    "load_source",
    "load_tokenizer",
    "pair_iterator",
    "prepare",
    "prepare_tokenizer",
    "read_judgments",
    "read_questions",
    "train_bpe",
    "train_iterator",
]
