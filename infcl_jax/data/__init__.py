"""Captioned images: sources, tokenizer, transforms, and batches for training and evaluation."""

from infcl_jax.data.pipeline import EvalBatches as EvalBatches
from infcl_jax.data.pipeline import TrainIterator as TrainIterator
from infcl_jax.data.pipeline import eval_batches as eval_batches
from infcl_jax.data.pipeline import train_iterator as train_iterator
from infcl_jax.data.sources import BadRecordError as BadRecordError
from infcl_jax.data.sources import Classes as Classes
from infcl_jax.data.sources import Example as Example
from infcl_jax.data.sources import Source as Source
from infcl_jax.data.sources import classes as classes
from infcl_jax.data.sources import load_source as load_source
from infcl_jax.data.tokenizer import ByteTokenizer as ByteTokenizer
from infcl_jax.data.tokenizer import Tokenizer as Tokenizer
from infcl_jax.data.transforms import Augmentation as Augmentation
