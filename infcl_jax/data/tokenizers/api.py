"""Loading of tokenizers by name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infcl_jax.data.tokenizers.base import CLEANINGS, SETTINGS_FILE, BaseTokenizer
from infcl_jax.data.tokenizers.byte import ByteTokenizer
from infcl_jax.data.tokenizers.clip import CLIPTokenizer
from infcl_jax.data.tokenizers.hugging_face import HuggingFaceTokenizer
from infcl_jax.data.tokenizers.sentence_piece import SentencePieceTokenizer
from infcl_jax.runtime.file_io import CONFIG_BYTES, read_json

_LONGEST = 2**20  # tokens of a context
_FILES = {kind.kind: kind for kind in (CLIPTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer)}
_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "kind": lambda kind: kind in ("bytes", *_FILES),
    "context_length": lambda length: type(length) is int and 0 < length <= _LONGEST,
    "clean": lambda clean: clean in CLEANINGS,
    "strip_sep_token": lambda strip: isinstance(strip, bool),
    "repository": lambda name: isinstance(name, str),
}
_OPTIONAL = ("strip_sep_token", "repository")
_SPECS = "'bytes', 'clip', 'clip:PATH', 'hf:PATH', 'sentencepiece:PATH' or a folder of a saved tokenizer"


def load_tokenizer(
    spec: str | os.PathLike,
    context_length: int | None = None,
    *,
    clean: str | None = None,
    strip_sep_token: bool | None = None,
) -> BaseTokenizer:
    """Load a tokenizer.

    - `bytes`: UTF-8 bytes.
    - `clip`: CLIP's byte pairs, with the vocabulary of an installed package, such as `clip-anytorch`.
    - `clip:PATH`: the same from `bpe_simple_vocab_16e6.txt.gz`, or from a folder with `vocab.json` and `merges.txt`.
    - `hf:PATH`: a `tokenizer.json` of Hugging Face, or a folder with one.
    - `sentencepiece:PATH`: a SentencePiece model, or a folder with one.
    - a folder: a tokenizer that `save` or `train_bpe` wrote.

    Examples:
      >>> tokenizer = load_tokenizer("bytes", context_length=8)
      >>> tokenizer(["a cat"])
      array([[257,  98,  33, 100,  98, 117, 258,   0]], dtype=int32)

    Args:
      spec: kind and path of the tokenizer.
      context_length: tokens per row, special tokens included. Default: the saved one of a folder, else 77.
      clean: text cleaning: "none", "whitespace", "lower", "canonicalize" or "siglip". Default: the saved one of a
        folder, or that which the files of `hf:PATH` or `sentencepiece:PATH` name, else "lower" for `clip` and "none"
        for the others.
      strip_sep_token: whether 0 replaces the last special token of each text, for `hf:PATH` only. Default: the saved
        option of a folder, or that which the files name, else False.

    Returns:
      The tokenizer.

    Raises:
      ValueError: the spec is unknown, its path does not hold such a tokenizer, or an argument is out of range.
      ImportError: a package is missing.
    """
    settings = {"context_length": context_length, "clean": clean, "strip_sep_token": strip_sep_token}
    settings = {name: value for name, value in settings.items() if value is not None}
    file = Path(spec) / SETTINGS_FILE
    if file.is_file():
        saved = _read_settings(file)
        kind, repository = saved.pop("kind"), saved.pop("repository", None)
        tokenizer = _load(kind, str(spec), saved | settings)
        tokenizer.repository = repository
        return tokenizer
    kind, _, path = str(spec).partition(":")
    if strip_sep_token is not None and kind != HuggingFaceTokenizer.kind:
        raise ValueError(f"expected strip_sep_token=None for the tokenizer {str(spec)!r}, got {strip_sep_token}")
    if spec in ("bytes", "clip") or (kind in _FILES and path):
        return _load(kind, path or None, settings)
    raise ValueError(f"expected the tokenizer to be {_SPECS}, got {str(spec)!r}")


def _load(kind: str, path: str | None, settings: dict) -> BaseTokenizer:
    return ByteTokenizer(**settings) if kind == "bytes" else _FILES[kind](path, **settings)


def _read_settings(path: Path) -> dict:
    try:
        saved = read_json(path, limit=CONFIG_BYTES)
        names = [name for name in _SETTINGS if name in saved or name not in _OPTIONAL]
        if wrong := [name for name in names if not _SETTINGS[name](saved.get(name))]:
            raise ValueError(f"another {wrong[0]}")
    except ValueError as error:
        raise ValueError(f"expected the settings of a tokenizer in {path}, got {error}; save it again") from None
    return {name: saved[name] for name in names}


def check_vocabulary(tokenizer: BaseTokenizer, vocab_size: int, end_token: int | None = None) -> None:
    """Check that a text tower fits a tokenizer.

    It must embed all token ids, and pool the features of the token that ends each text.

    Examples:
      >>> check_vocabulary(ByteTokenizer(), vocab_size=259)

    Args:
      tokenizer: the tokenizer.
      vocab_size: `text.vocab_size` of the model.
      end_token: `text.end_token` of the model; None: the largest id of each text.

    Raises:
      ValueError: the model does not fit the tokenizer, or the tokenizer has no end token.
    """
    size, end = tokenizer.vocab_size, tokenizer.end_id
    if end is None:
        raise ValueError(
            f"expected a tokenizer with a special token at the end of each text, got {tokenizer.kind!r} without;"
            " add one to the post-processor in its tokenizer.json"
        )
    pooled = size - 1 if end_token is None else end_token
    if vocab_size < size or pooled != end:
        raise ValueError(
            f"expected text.vocab_size >= {size} and text.end_token={end} with the tokenizer {tokenizer.kind!r}, got"
            f" {vocab_size} and {end_token}; set text.vocab_size={max(size, vocab_size)},text.end_token={end} in"
            " model_overrides, or choose another tokenizer"
        )
