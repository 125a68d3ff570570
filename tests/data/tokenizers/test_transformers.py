"""Ids of Hugging Face's transformers, from vocabularies in its golden file."""

import json

import numpy as np
import pytest
from golden import make_clip_tokens
from golden import make_transformers_tokens as golden

from infcl_jax.data import load_tokenizer


@pytest.fixture(scope="module")
def stored():
    with np.load(golden.PATH) as arrays:
        return dict(arrays)


def check_ids(tokenizer, captions, expected):
    ids = tokenizer(captions)
    wrong = np.flatnonzero(make_clip_tokens.digests(ids) != expected)
    first = [(captions[row], ids[row].tolist()) for row in wrong[:3]]
    assert len(expected) == len(captions) == 1000 and not wrong.size, (
        f"{wrong.size} captions differ, the first: {first}"
    )


def test_bert(stored, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(stored["bert_json"].tobytes())
    (tmp_path / "tokenizer_config.json").write_bytes(stored["bert_config"].tobytes())
    check_ids(load_tokenizer(f"hf:{tmp_path}", golden.LENGTH), golden.bert_captions(), stored["bert"])


def test_t5(stored, tmp_path):
    (tmp_path / "spiece.model").write_bytes(stored["sentence_piece"].tobytes())
    check_ids(load_tokenizer(f"sentencepiece:{tmp_path}", golden.LENGTH), golden.t5_captions(), stored["t5"])


@pytest.mark.parametrize("clean", ["canonicalize", "siglip"])
def test_siglip(clean, stored, tmp_path):
    (tmp_path / "spiece.model").write_bytes(stored["sentence_piece"].tobytes())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "</s>"}}))
    tokenizer = load_tokenizer(f"sentencepiece:{tmp_path}", golden.LENGTH, clean=clean)
    check_ids(tokenizer, golden.siglip_captions(), stored["siglip"])
