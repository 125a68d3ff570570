"""`infcl_jax.load` of a run of text retrieval: features, export and one-line errors."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from retrieval_runs import save, settings, write_corpus
from safetensors.numpy import load_file

import infcl_jax
from infcl_jax import export
from infcl_jax.data import PairTexts, Passage, load_tokenizer
from infcl_jax.models import text_pair_config
from infcl_jax.run.load import load_encoder

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers_tokens.npz"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("dpr"))
    save(folder / "run", settings(folder, **{"text_retrieval.query_length": 16, "text_retrieval.separator": " | "}))
    return folder / "run"


@pytest.fixture(scope="module")
def encoder(workdir):
    return infcl_jax.load(workdir, batch_size=8, mesh=oracle.mesh_of(2))


def test_features_are_those_of_the_model(encoder):
    queries, passages = ["how tall?", "it\u2019s old"], ["a", ("b", "c"), Passage("e", "d"), ["f", "g"]]
    apply = jax.jit(encoder.model.apply, static_argnames="method")
    tokenizer = encoder.texts.tokenizer
    expected = apply(encoder.variables, encoder.texts.queries(queries), method="encode_query")
    np.testing.assert_allclose(encoder.encode_queries(queries), expected, atol=1e-5)
    ids = tokenizer(["a", "b | c", "d | e", "f | g"])
    expected = apply(encoder.variables, ids, method="encode_passage")
    features = encoder.encode_passages(passages)
    np.testing.assert_allclose(features, expected, atol=1e-5)
    assert features.dtype == np.float32 and encoder.encode_passages([]).shape == (0, 32)
    assert "features of 32 dimensions" in repr(encoder)


def test_other_inputs_are_refused(encoder, workdir):
    for call, values, message in (
        (encoder.encode_queries, "a", "expected queries to be a list, got str; put a single one in a list"),
        (encoder.encode_queries, ["a", None], "expected queries to be texts, got NoneType at 1"),
        (encoder.encode_queries, [("a", "b")], "expected queries to be texts, got tuple at 0"),
        (encoder.encode_passages, [("a", "b", "c")], "texts or pairs of a title and a text, got tuple at 0"),
        (encoder.encode_passages, [("a", None)], "texts or pairs of a title and a text, got tuple at 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call(values)
    with pytest.raises(ValueError, match="expected batch_size >= 1"):
        infcl_jax.load(workdir, batch_size=0)
    for load in (load_encoder, lambda path: infcl_jax.load(path, dim=8)):
        with pytest.raises(ValueError, match="expected a model of images and texts, got model='bert-tiny'"):
            load(workdir)


def test_the_command_exports_both_encoders(workdir, encoder, tmp_path, capsys):
    checked = export(workdir, tmp_path)
    assert "tensors match" in checked and capsys.readouterr().out.endswith(f": {checked}\n")
    for name, length in (("query", 16), ("passage", 24)):
        folder = tmp_path / f"{name}_encoder"
        embedding = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"]
        np.testing.assert_array_equal(embedding, encoder.variables["params"][name]["token_embedding"])
        assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == length
        assert json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_cls_token"]
        assert load_tokenizer(folder).context_length == length
    with pytest.raises(ValueError, match="expected format 'hf' and no dim for a run of text retrieval"):
        export(workdir, tmp_path, "open_clip")


def test_a_tokenizer_of_hugging_face_is_exported_for_transformers(encoder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(np.load(GOLDEN)["bert_json"].tobytes())
    tokenizer = load_tokenizer(f"hf:{tmp_path}", 24)
    dataclasses.replace(encoder, texts=PairTexts(tokenizer)).save(tmp_path / "a")
    content = json.loads((tmp_path / "a/query_encoder/tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast" and content["model_max_length"] == 24
    assert load_tokenizer(tmp_path / "a/query_encoder")("A text?").tolist() == tokenizer("A text?").tolist()


def test_a_projection_has_no_bert(encoder, tmp_path):
    text = dataclasses.replace(encoder.config.text, projection="linear")
    other = dataclasses.replace(encoder, config=dataclasses.replace(encoder.config, text=text))
    with pytest.raises(ValueError, match=r"expected text.projection='none' .*, got 'linear'"):
        other.save(tmp_path)
    text = dataclasses.replace(text_pair_config("bert-tiny").text, activation="quick_gelu")
    other = dataclasses.replace(encoder, config=dataclasses.replace(encoder.config, text=text))
    with pytest.raises(ValueError, match="expected a model that transformers' BERT describes"):
        other.save(tmp_path)
