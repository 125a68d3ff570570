import importlib.util

import numpy as np
import pytest
from golden import make_clip_tokens as golden

from infcl_jax.data import load_tokenizer

needs_open_clip = pytest.mark.skipif(importlib.util.find_spec("open_clip") is None, reason="needs open_clip_torch")


@needs_open_clip
@pytest.mark.parametrize(("clean", "length", "step"), golden.CASES)
def test_ids_are_those_of_open_clip(clean, length, step):
    captions = golden.captions()
    with np.load(golden.PATH) as stored:
        assert golden.digest_of_texts(captions) == stored["captions"]
        expected = stored[f"{clean}_{length}"]
    captions = captions[::step]
    ids = load_tokenizer("clip", length, clean=clean)(captions)
    wrong = [captions[row] for row in np.flatnonzero(golden.digests(ids) != expected)]
    assert len(expected) == len(captions) and not wrong, f"{len(wrong)} captions differ, the first are {wrong[:3]}"


@needs_open_clip
def test_vocabulary_of_open_clip(tmp_path):
    tokenizer = load_tokenizer("clip")
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.end_id) == (49408, 0, 49407)
    ids = tokenizer(["a photo of a cat", "", "cat " * 100])
    assert ids[0, :7].tolist() == [49406, 320, 1125, 539, 320, 2368, 49407] and not ids[0, 7:].any()
    assert ids.argmax(axis=1).tolist() == [6, 1, 76]
    tokenizer.save(tmp_path)
    np.testing.assert_array_equal(load_tokenizer(f"clip:{tmp_path}")(["Ünïcode 😀!"]), tokenizer(["Ünïcode 😀!"]))


def test_ids(specs):
    # 256 bytes, 256 last bytes of words, 6 merges, start and end
    tokenizer = load_tokenizer(specs["clip"], 8)
    assert tokenizer("The red  CAT!").tolist() == [[518, 513, 517, 515, 256, 519, 0, 0]]
    assert tokenizer("the\u00e9").tolist() == [[518, 512, 68, 127, 358, 519, 0, 0]]  # bytes C3 A9 are "Ã" and "©"
    assert tokenizer("the" * 9)[0, -1] == 519
    assert tokenizer.decode([518, 513, 68, 127, 358, 127, 519, 513]) == "the e\u00e9 \ufffd"


def test_words_split_at_contractions_digits_and_punctuation(specs):
    tokenizer = load_tokenizer(specs["clip"], 40)
    for text, words in (("they'll", "they 'll"), ("a1b22", "a 1 b 2 2"), ("x-y...", "x - y ..."), ("I'M", "i 'm")):
        np.testing.assert_array_equal(tokenizer(text), tokenizer(words))


@pytest.mark.parametrize("name", ["start_of_text", "|startoftext|"])
def test_special_tokens_of_a_folder(name, specs, tmp_path):
    tokenizer = load_tokenizer(specs["clip"], 8)
    tokenizer.save(tmp_path)
    file = tmp_path / "vocab.json"
    text = file.read_text().replace("start_of_text", name).replace("end_of_text", name.replace("start", "end"))
    file.write_text(text)
    renamed = load_tokenizer(f"clip:{tmp_path}", 8)
    np.testing.assert_array_equal(renamed("the red cat"), tokenizer("the red cat"))
    assert renamed(f"the<{name}>cat").tolist() == [[518, 513, 518, 515, 519, 0, 0, 0]]
