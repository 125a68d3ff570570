"""CLIP's byte-pair encoding (Radford et al. 2021; Sennrich et al. 2016)."""

from __future__ import annotations

import functools
import heapq
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import regex

from infcl_jax.data.tokenizers.base import BaseTokenizer
from infcl_jax.data.tokenizers.clip_vocabulary import (
    END_OF_WORD,
    Vocabulary,
    byte_characters,
    installed_vocabulary,
    read_vocabulary,
    write_vocabulary,
)

_PAD = 0
_CACHED = 2**16  # chunks, and as many words; about 30 MB in each process
_CACHED_LENGTH = 32  # characters; longer chunks, such as sentences without spaces, rarely repeat
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_MERGED = -1  # in place of the right token of a merge


def word_pattern(*special_tokens: str) -> regex.Pattern:
    """Return CLIP's pattern of words: special tokens, contractions, letters, single digits, other characters."""
    literals = "|".join(map(regex.escape, (*special_tokens, *_CONTRACTIONS)))
    return regex.compile(literals + r"|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+", regex.IGNORECASE)


def _cached(encode: Callable[[str], tuple[int, ...]]) -> Callable[[str], tuple[int, ...]]:
    """Cache the ids of short texts."""
    cached = functools.lru_cache(_CACHED)(encode)
    return lambda text: (cached if len(text) <= _CACHED_LENGTH else encode)(text)


class BytePairEncoder:
    """Byte-pair encoding of text without special tokens around it.

    Attributes:
      vocabulary: the vocabulary.
      ids: id of each token.
    """

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.ids = ids = {token: index for index, token in enumerate(vocabulary.tokens)}
        self._first = [ids[character] for character in byte_characters()]
        self._last = [ids[character + END_OF_WORD] for character in byte_characters()]
        self._pairs = [(ids[left], ids[right]) for left, right in vocabulary.merges]
        self._ranks = {pair: rank for rank, pair in enumerate(self._pairs)}
        self._merged = [ids[left + right] for left, right in vocabulary.merges]
        self._special = {token: (ids[token],) for token in (vocabulary.start, vocabulary.end)}
        self._pattern = word_pattern(vocabulary.start, vocabulary.end)
        self._chunk_ids = _cached(self._encode_chunk)
        self._word_ids = _cached(self._encode_word)

    def __reduce__(self):
        return BytePairEncoder, (self.vocabulary,)

    def encode(self, text: str) -> list[int]:
        """Encode one text."""
        ids: list[int] = []
        for chunk in text.split():  # no word of the pattern contains whitespace
            ids += self._chunk_ids(chunk)
        return ids

    def _encode_chunk(self, chunk: str) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(map(self._word_ids, self._pattern.findall(chunk))))

    def _encode_word(self, word: str) -> tuple[int, ...]:
        return self._special.get(word) or tuple(self._merge(word.encode("utf-8")))

    def _merge(self, word: bytes) -> list[int]:
        """Merge the bytes of a word, the pair of the lowest rank first.

        A heap of pairs keeps the time of a very long word in O(n log n). Each merge keeps the left index of its pair.
        """
        ids = [self._first[byte] for byte in word]
        ids[-1] = self._last[word[-1]]
        end = len(ids)
        previous, following = list(range(-1, end - 1)), list(range(1, end + 1))
        heap = [(self._ranks[pair], left) for left, pair in enumerate(itertools.pairwise(ids)) if pair in self._ranks]
        heapq.heapify(heap)
        while heap:
            rank, left = heapq.heappop(heap)
            right = following[left]
            if right == end or (ids[left], ids[right]) != self._pairs[rank]:
                continue  # an earlier merge took one of the two
            ids[left], ids[right] = self._merged[rank], _MERGED
            following[left] = following[right]
            if following[left] < end:
                previous[following[left]] = left
            for start in (previous[left], left):
                if start >= 0 and following[start] < end:
                    pair = ids[start], ids[following[start]]
                    if pair in self._ranks:
                        heapq.heappush(heap, (self._ranks[pair], start))
        return [token for token in ids if token != _MERGED]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, with spaces between words. Invalid UTF-8 becomes U+FFFD."""
        text = "".join(self.vocabulary.tokens[token] for token in ids).replace(END_OF_WORD, " ")
        data = bytes(self._bytes[character] for character in text)
        return data.decode("utf-8", errors="replace").rstrip(" ")

    @functools.cached_property
    def _bytes(self) -> dict[str, int]:
        return {character: byte for byte, character in enumerate(byte_characters())} | {" ": ord(" ")}


class CLIPTokenizer(BaseTokenizer):
    """CLIP's byte-pair encoding, with the ids of OpenCLIP.

    Rows are start, text, end and padding (0). With CLIP's vocabulary, start is 49406 and end is 49407, the largest id,
    so a text tower can pool at the argmax of the ids. As in OpenCLIP, a text that contains the characters of a special
    token gets its id.
    """

    kind = "clip"

    def __init__(self, path: str | os.PathLike | None = None, context_length: int = 77, clean: str = "lower"):
        """Read the vocabulary.

        Args:
          path: `bpe_simple_vocab_16e6.txt.gz`, another text file of merges, or a folder with `vocab.json` and
            `merges.txt`. Default: the file of an installed package, such as `clip-anytorch`.
          context_length: tokens per row, start and end included.
          clean: text cleaning: "none", "whitespace", "lower", "canonicalize" or "siglip".

        Raises:
          ValueError: the path does not hold a vocabulary, or an argument is out of range.
          ImportError: `path` is None and no package with the file is installed.
        """
        vocabulary = read_vocabulary(installed_vocabulary() if path is None else Path(path))
        self._encoder = BytePairEncoder(vocabulary)
        self._start, end = (self._encoder.ids[token] for token in (vocabulary.start, vocabulary.end))
        size = len(vocabulary.tokens)
        super().__init__(context_length, clean, vocab_size=size, pad_id=_PAD, end_id=end, prefix=1, suffix=1)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._start, *self._encoder.encode(text), self.end_id] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        end = ids.index(self.end_id) if self.end_id in ids else len(ids)
        return self._encoder.decode([token for token in ids[:end] if token != self._start])

    def _save_vocabulary(self, folder: Path) -> None:
        write_vocabulary(self._encoder.vocabulary, folder)
