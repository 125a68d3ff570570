"""Tokenizer of UTF-8 bytes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infcl_jax.data.tokenizers.base import BaseTokenizer

_PAD, _FIRST_BYTE, _START, _END = 0, 1, 257, 258


class ByteTokenizer(BaseTokenizer):
    """Tokenizer of UTF-8 bytes.

    Token ids are 0 for padding, 1 + v for byte v, 257 for start and 258 for end. The end token has the largest id and
    appears once, so a text tower can pool at the argmax of the ids, as CLIP does (Radford et al. 2021, section 2.4).
    A character split by truncation decodes to U+FFFD.

    Examples:
      >>> ByteTokenizer(context_length=8)(["cat"])
      array([[257, 100,  98, 117, 258,   0,   0,   0]], dtype=int32)
    """

    kind = "bytes"
    unit = "bytes"
    vocab_size: int = 259

    def __init__(self, context_length: int = 77, clean: str = "none"):
        super().__init__(
            context_length, clean, vocab_size=self.vocab_size, pad_id=_PAD, end_id=_END, prefix=1, suffix=1
        )

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        rows = []
        for text in texts:
            data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
            row = np.empty(data.size + 2, dtype=np.int32)
            row[0], row[-1] = _START, _END
            row[1:-1] = data
            row[1:-1] += _FIRST_BYTE
            rows.append(row)
        return rows

    def _decode(self, ids: list[int]) -> str:
        end = ids.index(_END) if _END in ids else len(ids)
        data = bytes(token - _FIRST_BYTE for token in ids[:end] if _FIRST_BYTE <= token < _START)
        return data.decode("utf-8", errors="replace")

    def _save_vocabulary(self, folder: Path) -> None:
        pass  # the bytes need none
