"""Interface and shared code of the tokenizers."""

import abc
import html
import importlib
import json
import logging
import os
import string
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

import ftfy
import numpy as np

from infcl_jax.runtime.file_io import read_regular

# Text cleanings before tokenization: the options of OpenCLIP, and SigLIP's in transformers.
OPEN_CLIP_CLEANINGS = ("whitespace", "lower", "canonicalize")
CLEANINGS = ("none", *OPEN_CLIP_CLEANINGS, "siglip")

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # of SentencePiece
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

SETTINGS_FILE = "tokenizer_settings.json"  # name that no Hugging Face file has, because both share a folder

# Characters that are encoded of a text, and at least of each token. A damaged caption of a megabyte takes CLIP seconds
# to encode, for tokens that truncation drops.
_LONGEST_TEXT, _LONGEST_TOKEN = 2**14, 64

_LARGEST_FILE = 2**28  # bytes of a vocabulary; Gemma's tokenizer.json has 33 MiB

_logger = logging.getLogger(__name__)
_count_lock = threading.Lock()  # module-level, because a tokenizer with a lock cannot be pickled


def read_vocabulary_file(path: Path) -> bytes:
    """Read a vocabulary, see `infcl_jax.runtime.file_io.read_regular`."""
    return read_regular(path, _LARGEST_FILE, "vocabulary")


def optional_package(name: str) -> ModuleType:
    """Import a package of a tokenizer.

    Raises:
      ImportError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"expected the package {name}, got none installed; pip install {name}") from None


class Tokenizer(Protocol):
    """Interface of a tokenizer, picklable for worker processes.

    Examples:
      >>> tokenizer: Tokenizer = ByteTokenizer(context_length=8)
      >>> tokenizer(["a cat", "a dog"]).shape
      (2, 8)
    """

    vocab_size: int
    context_length: int

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Encode n texts as int32 [n, context_length]; n = 1 for a string."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decode one row of ids."""
        ...


class BaseTokenizer(abc.ABC):
    """Base class with text cleaning, truncation, padding, masks and saving.

    Rows are truncated before the special tokens at their end and padded on the right, or on the left where the files of
    a tokenizer of Hugging Face say so. The first truncation of each tokenizer logs a warning. A tokenizer is picklable
    and can be shared by threads.

    Attributes:
      vocab_size: number of token ids.
      context_length: tokens per row, special tokens included.
      clean: text cleaning before encoding: "none", "whitespace", "lower", "canonicalize" or "siglip".
      pad_id: id of padding.
      end_id: id of the last special token after each text, or None.
      padding_side: side of the padding, "right" or "left".
      repository: repository on the Hub that OpenCLIP's configuration names for the tokenizer, or None.
      truncated: number of truncated texts so far. Each worker process counts and warns separately.
    """

    kind: ClassVar[str]  # name in the spec of `load_tokenizer`
    unit: ClassVar[str] = "tokens"

    def __init__(
        self,
        context_length: int,
        clean: str,
        *,
        vocab_size: int,
        pad_id: int,
        end_id: int | None,
        prefix: int,
        suffix: int,
        padding_side: str = "right",
    ):
        """Check and store the attributes, and the numbers of special tokens before and after each text."""
        if clean not in CLEANINGS:
            raise ValueError(f"expected clean to be one of {CLEANINGS}, got {clean!r}")
        if context_length < prefix + suffix + 1:
            raise ValueError(
                f"expected context_length to be at least {prefix + suffix + 1} ({prefix + suffix} special tokens and"
                f" one of text), got {context_length}; raise text.context_length"
            )
        self.context_length, self.clean, self.vocab_size = context_length, clean, vocab_size
        self.pad_id, self.end_id, self.padding_side = pad_id, end_id, padding_side
        self.repository: str | None = None
        self.truncated = 0
        self._special, self._suffix = prefix + suffix, suffix

    @abc.abstractmethod
    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """Encode cleaned texts as rows of any length, special tokens included."""

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Decode ids inside the vocabulary."""

    @abc.abstractmethod
    def _save_vocabulary(self, folder: Path) -> None:
        """Write the files from which the tokenizer can be loaded."""

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Encode one or several texts.

        Args:
          texts: one string or n strings.

        Returns:
          int32 [n, context_length] (n = 1 for a string): special tokens, text, special tokens, padding.
        """
        limit = max(_LONGEST_TEXT, _LONGEST_TOKEN * self.context_length)
        texts = [texts] if isinstance(texts, str) else texts
        rows = self._encode([clean_text(text[:limit], self.clean) for text in texts])
        ids = np.full((len(rows), self.context_length), self.pad_id, dtype=np.int32)
        kept = self.context_length - self._suffix
        for target, row in zip(ids, rows, strict=True):
            if len(row) <= self.context_length:
                start = self.context_length - len(row) if self.padding_side == "left" else 0
                target[start : start + len(row)] = row
            else:
                target[:kept], target[kept:] = row[:kept], row[len(row) - self._suffix :]
        self._count_truncated([len(row) for row in rows])
        return ids

    def _count_truncated(self, lengths: Sequence[int]) -> None:
        """Count rows, given their lengths, above the limit; warn once."""
        cut = sum(length > self.context_length for length in lengths)
        if not cut:
            return
        with _count_lock:
            first = self.truncated == 0
            self.truncated += cut
        if first:
            limit, longest = self.context_length - self._special, max(lengths)
            _logger.warning(
                "cut %d of %d texts to %d %s, the longest has %d; text.context_length=%d (now %d) keeps them whole;"
                " later cuts are counted without a warning",
                *(cut, len(lengths), limit, self.unit, longest - self._special, longest, self.context_length),
            )

    def attention_mask(self, ids: np.ndarray) -> np.ndarray:
        """Mark tokens that are not padding.

        Padding is the run of padding ids at the padded side of a row, because CLIP's vocabulary has a token with the
        same id. Where the end token also pads on the right, as in SigLIP, the first token of the run is the end token.

        Args:
          ids: integer [n, context_length] from this tokenizer.

        Returns:
          bool [n, context_length].
        """
        is_pad = np.asarray(ids) == self.pad_id
        if self.padding_side == "left":
            return ~np.logical_and.accumulate(is_pad, axis=1) | (np.arange(is_pad.shape[1]) == is_pad.shape[1] - 1)
        mask = ~np.logical_and.accumulate(is_pad[:, ::-1], axis=1)[:, ::-1]
        if self.pad_id == self.end_id:
            mask[:, 1:] |= mask[:, :-1].copy()
            mask[:, 0] = True
        return mask

    def decode(self, ids: Iterable[int]) -> str:
        """Decode one row up to its end token.

        Args:
          ids: token ids, with or without special tokens and padding.

        Returns:
          The text, as the tokenizer normalizes it.

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        tokens = [int(token) for token in ids]
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"expected token ids in [0, {self.vocab_size}), got {token}")
        return self._decode(tokens)

    def save(self, folder: str | os.PathLike) -> None:
        """Save settings and vocabulary, so that `load_tokenizer(folder)` restores the tokenizer.

        Args:
          folder: folder to write to. It is created where it is missing.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._save_vocabulary(folder)
        (folder / SETTINGS_FILE).write_text(json.dumps(self._settings(), indent=2) + "\n")

    def _settings(self) -> dict[str, Any]:
        settings = {"kind": self.kind, "context_length": self.context_length, "clean": self.clean}
        return settings | ({"repository": self.repository} if self.repository else {})


def clean_text(text: str, clean: str) -> str:
    """Clean one text.

    "none" only replaces lone surrogates. "whitespace" repairs wrongly decoded text, unescapes HTML entities and joins
    words with single spaces. "lower" also lowercases the text, as CLIP does. "canonicalize" also removes ASCII
    punctuation, as OpenCLIP does for SigLIP. "siglip" lowercases, removes ASCII punctuation and joins words, as the
    class of transformers does: "_" becomes no space, and entities and curly quotes remain.
    """
    if clean == "none":  # broken JSON has lone surrogates, which UTF-8 cannot encode
        return _encodable(text)
    if clean == "siglip":
        text = _encodable(text).replace(_SPACE, " ").lower().translate(_NO_PUNCTUATION)
        words = " ".join(text.split())
        return _SPACE + words if words and text[0].isspace() else words  # a token of its own in transformers
    text = _repair(text)
    if clean == "canonicalize":
        text = text.replace("_", " ").translate(_NO_PUNCTUATION).lower()
    text = " ".join(text.split())
    return text.lower() if clean == "lower" else text


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _repair(text: str) -> str:
    """Repair the encoding and unescape HTML entities, which web pages often escape twice."""
    if text.isascii() and text.isprintable() and "&" not in text:
        return text  # ftfy changes none of these texts, and takes longer than their tokenization
    return html.unescape(html.unescape(ftfy.fix_text(text)))
