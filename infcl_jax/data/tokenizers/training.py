"""Training of byte-pair vocabularies."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from infcl_jax.data.tokenizers.base import clean_text, optional_package
from infcl_jax.data.tokenizers.clip import (
    END_OF_WORD,
    CLIPTokenizer,
    vocabulary_of_merges,
    word_pattern,
    write_vocabulary,
)

_UNMERGED = 2 * 256 + 2  # bytes, last bytes of words, start and end


def train_bpe(
    captions: Iterable[str],
    vocab_size: int,
    output: str | os.PathLike,
    *,
    context_length: int = 77,
    clean: str = "lower",
) -> CLIPTokenizer:
    """Train a byte-pair vocabulary in CLIP's format on captions and save the tokenizer.

    Examples:
      >>> tokenizer = train_bpe(["a cat and a dog", "a dog and a cat"], 520, "cats_and_dogs", context_length=8)
      >>> tokenizer(["a cat"]).shape
      (1, 8)

    Args:
      captions: captions to train on.
      vocab_size: number of token ids, at least 515. Few captions give fewer ids, because each merge must occur twice.
      output: folder to write to. `load_tokenizer(output)` restores the tokenizer. `clip:OUTPUT` reads the vocabulary.
      context_length: tokens per row of the tokenizer.
      clean: text cleaning of the captions and of the tokenizer.

    Returns:
      The tokenizer.

    Raises:
      ValueError: `vocab_size` is too small, `clean` is unknown, or the captions are too few.
      ImportError: the package `tokenizers` is not installed.
    """
    if vocab_size <= _UNMERGED:
        raise ValueError(f"expected vocab_size > {_UNMERGED} (bytes, last bytes, start, end), got {vocab_size}")
    pattern = word_pattern()
    words = (" ".join(pattern.findall(clean_text(caption, clean))) for caption in captions)
    merges = _train_merges(words, vocab_size)[: vocab_size - _UNMERGED]
    if not merges:
        raise ValueError("expected captions in which a pair of characters occurs twice, got none; give more captions")
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    write_vocabulary(vocabulary_of_merges(merges), folder)
    tokenizer = CLIPTokenizer(folder, context_length, clean)
    tokenizer.save(folder)
    return tokenizer


def _train_merges(captions: Iterator[str], vocab_size: int) -> list[tuple[str, str]]:
    """Learn the merges of captions with spaces between their words."""
    optional_package("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=END_OF_WORD))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix=END_OF_WORD,
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
