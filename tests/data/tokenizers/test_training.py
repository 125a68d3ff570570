import json

import numpy as np
import pytest
import tokenizers
from golden import make_clip_tokens

from infcl_jax.data import load_tokenizer, train_bpe

CAPTIONS = make_clip_tokens.captions()[300:1300]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trained") / "tokenizer"


@pytest.fixture(scope="module")
def trained(folder):
    return train_bpe(iter(CAPTIONS), 1000, folder, context_length=32)


def test_size_and_files(trained, folder):
    assert trained.vocab_size == 1000 and trained.end_id == 999
    for spec in (folder, f"clip:{folder}"):
        np.testing.assert_array_equal(load_tokenizer(spec, 32)(CAPTIONS[:50]), trained(CAPTIONS[:50]))
    assert load_tokenizer(folder).context_length == 32


def test_frequent_words_are_tokens(trained):
    ids = trained(["skyscraper", "jeans"])
    assert (ids != 0).sum(axis=1).tolist() == [3, 3]
    assert trained.decode(trained("A red SKYSCRAPER")[0]) == "a red skyscraper"


def test_merges_are_those_of_the_tokenizers_package(trained, folder):
    # Another implementation of byte pairs, on the words of our pattern.
    ids = json.loads((folder / "vocab.json").read_text())
    merges = [tuple(line.split()) for line in (folder / "merges.txt").read_text().splitlines()[1:]]
    other = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges, end_of_word_suffix="</w>"))
    pattern = tokenizers.Regex(r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+")
    other.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(pattern, "removed", invert=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    texts = [text for text in (text.lower() for text in CAPTIONS) if text.isascii() and text.isprintable()]
    texts = [text for text in texts if not set("&<") & set(text)]
    assert len(texts) > 250
    tokenizer = load_tokenizer(f"clip:{folder}", 400)
    for text, row in zip(texts, tokenizer(texts), strict=True):
        assert row[row != 0][1:-1].tolist() == [token for token in other.encode(text).ids if token], text


@pytest.mark.parametrize(
    ("captions", "vocab_size", "message"),
    [
        (["a cat"], 514, r"^expected vocab_size > 514 .*, got 514$"),
        (["cat", "dog"], 600, r"^expected captions in which .*, got none; give more captions$"),
    ],
)
def test_mistakes(captions, vocab_size, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_bpe(captions, vocab_size, tmp_path)
