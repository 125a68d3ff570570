"""Text tokenizers: bytes, CLIP's byte pairs, Hugging Face files and SentencePiece models."""

from infcl_jax.data.tokenizers.api import check_vocabulary as check_vocabulary
from infcl_jax.data.tokenizers.api import load_tokenizer as load_tokenizer
from infcl_jax.data.tokenizers.base import BaseTokenizer as BaseTokenizer
from infcl_jax.data.tokenizers.base import Tokenizer as Tokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer as ByteTokenizer
from infcl_jax.data.tokenizers.training import train_bpe as train_bpe
