"""Text tokenizers: bytes, CLIP's byte pairs, Hugging Face files and SentencePiece models."""

from infcl_jax.data.tokenizers.api import check_vocabulary, load_tokenizer
from infcl_jax.data.tokenizers.base import BaseTokenizer, Tokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer
from infcl_jax.data.tokenizers.clip import CLIPTokenizer
from infcl_jax.data.tokenizers.hugging_face import HuggingFaceTokenizer
from infcl_jax.data.tokenizers.sentence_piece import SentencePieceTokenizer
from infcl_jax.data.tokenizers.training import train_bpe

__all__ = [
    "BaseTokenizer",
    "ByteTokenizer",
    "CLIPTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "train_bpe",
]
