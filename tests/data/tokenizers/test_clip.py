import importlib.util
import itertools

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
