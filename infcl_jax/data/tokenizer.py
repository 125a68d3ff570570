"""Text tokenizers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

_PAD, _FIRST_BYTE, _START, _END = 0, 1, 257, 258

_logger = logging.getLogger(__name__)
_count_lock = threading.Lock()  # module-level, because a tokenizer with a lock cannot be pickled


class Tokenizer(Protocol):
    """Interface of a tokenizer, picklable for worker processes."""

    vocab_size: int
    context_length: int

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Encode n texts as int32 [n, context_length]; n = 1 for a string."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decode one row of ids."""
        ...


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes.

    Token ids are 0 for padding, 1 + v for byte v, 257 for start and 258 for end. The end token has the largest id and
    appears once, so a text tower can pool at the argmax of the ids, as CLIP does (Radford et al. 2021, section 2.4).
    Texts that are too long are truncated before the end token. The first truncation of each tokenizer logs a warning.

    Attributes:
      vocab_size: 259.
      context_length: tokens per row, start and end included.
      truncated: number of truncated texts so far. Each worker process counts and warns separately.
    """

    vocab_size: int = 259

    def __init__(self, context_length: int = 77):
        if context_length < 3:
            raise ValueError(f"context_length must be at least 3 (start, one byte, end), got {context_length}")
        self.context_length = context_length
        self.truncated = 0

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Encode one or several texts.

        Args:
          texts: one string or n strings.

        Returns:
          int32 [n, context_length] (n = 1 for a string): start, bytes, end, padding.
        """
        rows = [texts] if isinstance(texts, str) else texts
        ids = np.full((len(rows), self.context_length), _PAD, dtype=np.int32)
        ids[:, 0] = _START
        encoded = [text.encode("utf-8") for text in rows]
        self._count_truncated([len(text) for text in encoded])
        for row, text in zip(ids, encoded, strict=True):
            data = np.frombuffer(text, dtype=np.uint8)[: self.context_length - 2]
            row[1 : 1 + data.size] = data
            row[1 : 1 + data.size] += _FIRST_BYTE
            row[1 + data.size] = _END
        return ids

    def _count_truncated(self, lengths: Sequence[int]) -> None:
        """Count texts, given their lengths in bytes, above the limit; warn once."""
        limit = self.context_length - 2
        cut = sum(length > limit for length in lengths)
        if not cut:
            return
        with _count_lock:
            first = self.truncated == 0
            self.truncated += cut
        if first:
            _logger.warning(
                "cut %d of %d texts to %d bytes, the longest has %d; text.context_length=%d (now %d) keeps them whole;"
                " later cuts are counted without a warning",
                *(cut, len(lengths), limit, max(lengths), max(lengths) + 2, self.context_length),
            )

    def decode(self, ids: Iterable[int]) -> str:
        """Decode one row up to its end token.

        A character split by truncation becomes U+FFFD.

        Args:
          ids: token ids, with or without the start token and padding.

        Returns:
          The text.

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        data = bytearray()
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token ids must be in [0, {self.vocab_size}), got {token}")
            if token == _END:
                break
            if _FIRST_BYTE <= token < _START:
                data.append(int(token) - _FIRST_BYTE)
        return data.decode("utf-8", errors="replace")
