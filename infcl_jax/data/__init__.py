"""Captioned images: sources, tokenizer, transforms, and batches for training and evaluation."""

from infcl_jax.data.convert import convert
from infcl_jax.data.iterator import BatchReader, TrainIterator
from infcl_jax.data.pipeline import EvalBatches, eval_batches, train_iterator
from infcl_jax.data.prepare import prepare
from infcl_jax.data.sources import BadRecordError, Classes, Example, Source, classes, load_source
from infcl_jax.data.tokenizer import ByteTokenizer, Tokenizer
from infcl_jax.data.transforms import Augmentation

__all__ = [
    "Augmentation",
    "BadRecordError",
    "BatchReader",
    "ByteTokenizer",
    "Classes",
    "EvalBatches",
    "Example",
    "Source",
    "Tokenizer",
    "TrainIterator",
    "classes",
    "convert",
    "eval_batches",
    "load_source",
    "prepare",
    "train_iterator",
]
