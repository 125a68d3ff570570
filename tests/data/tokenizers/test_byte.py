import concurrent.futures
import logging
import pickle

import numpy as np
import pytest

from infcl_jax.data import ByteTokenizer


def test_ids():
    ids = ByteTokenizer(context_length=6)(["ab", ""])
    assert ids.dtype == np.int32
    assert ids.tolist() == [[257, 98, 99, 258, 0, 0], [257, 258, 0, 0, 0, 0]]


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 100])
def test_end_token_has_the_largest_id_and_survives_truncation(length):
    tokenizer = ByteTokenizer(context_length=8)
    ids = tokenizer("\xff" * length)[0]
    data = min(2 * length, 6)
    assert ids.argmax() == data + 1 and ids.max() == 258 == tokenizer.vocab_size - 1
    assert (ids == 258).sum() == 1 and (ids[data + 2 :] == 0).all()


def test_decode_inverts_whole_characters():
    tokenizer = ByteTokenizer(context_length=13)
    for text, decoded in (("grün ≠ \x00", "grün ≠ \x00"), ("abcdefghijé", "abcdefghij\ufffd")):
        assert tokenizer.decode(tokenizer(text)[0]) == decoded


def test_truncation_is_counted_and_reported_once(caplog):
    tokenizer = ByteTokenizer(context_length=8)
    with caplog.at_level(logging.WARNING):
        tokenizer(["123456", ""])
        assert tokenizer.truncated == 0 and not caplog.records
        tokenizer(["1234567", "short", "ééééé"])
        assert tokenizer.truncated == 2
        tokenizer("12345678")
        assert tokenizer.truncated == 3
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("cut 2 of 3 texts to 6 bytes, the longest has 10; text.context_length=12 (now 8)")


def test_truncation_is_counted_over_threads(caplog):
    tokenizer = ByteTokenizer(context_length=3)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(tokenizer, [["ab", "a", "abc"]] * 500))
    assert tokenizer.truncated == 1000 and len(caplog.records) == 1


def test_a_pickled_copy_counts_for_itself():
    tokenizer = ByteTokenizer(context_length=8)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy("a red circle") == tokenizer("a red circle")).all()
    copy("a red circle")
    assert (tokenizer.truncated, copy.truncated) == (1, 2)
