"""Tokenizers of pretrained models: their ids, against OpenCLIP and transformers, and where their files are found."""

import json

import numpy as np
import pytest
from golden import make_pretrained_tokens as golden

from infcl_jax.data import load_tokenizer
from infcl_jax.inference.pretrained_tokenizer import check_padding_side, pretrained_tokenizer, save_tokenizer
from infcl_jax.models import BertConfig, model_config
from infcl_jax.models.convert.open_clip_files import export_files
from infcl_jax.models.convert.sources import Source

with np.load(golden.PATH) as stored:
    FILES: dict = {}
    for path in stored:
        FILES.setdefault(path.split("/")[0], {})[path.split("/")[1]] = stored[path]


def write(case, folder):
    """Write the files of a tokenizer, and return its OpenCLIP configuration."""
    folder.mkdir(exist_ok=True)
    contents = {name: array.tobytes() for name, array in FILES[case].items() if name != "ids"}
    text = json.loads(contents.pop("text_cfg", "null"))
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return None if text is None else {"model_cfg": {"text_cfg": text}}


def model(vocab_size=300, context_length=golden.LENGTH):
    return model_config("tiny", **{"text.vocab_size": vocab_size, "text.context_length": context_length})


def source(folder, config=None, find=None):
    local = lambda *names: next((folder / name for name in names if (folder / name).is_file()), None)  # noqa: E731
    return Source(str(folder), config, {}, "open_clip", folder / "model.safetensors", find or local)


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("subfolder", ["", "tokenizer"])
def test_ids_are_those_of_the_library_also_of_capitals(case, subfolder, tmp_path):
    config = write(case, tmp_path / subfolder)
    tokenizer = pretrained_tokenizer(source(tmp_path, config), model())
    np.testing.assert_array_equal(tokenizer(golden.TEXTS), FILES[case]["ids"])
    tokenizer.save(tmp_path / "saved")
    np.testing.assert_array_equal(load_tokenizer(tmp_path / "saved")(golden.TEXTS), FILES[case]["ids"])


@pytest.mark.parametrize("case", FILES)
def test_a_run_reads_the_same_options_from_a_folder(case, tmp_path):
    if (config := write(case, tmp_path)) is not None:
        (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    kind = "sentencepiece" if case == "hf_siglip" else "hf"
    tokenizer = load_tokenizer(f"{kind}:{tmp_path}", golden.LENGTH)
    np.testing.assert_array_equal(tokenizer(golden.TEXTS), FILES[case]["ids"])
    plain = load_tokenizer(f"{kind}:{tmp_path}", golden.LENGTH, clean="none")
    assert plain.clean == "none"


@pytest.mark.parametrize(
    "options", [{"language": "fr"}, {"clean": "none"}, {"strip_sep_token": 1}, {"additional_special_tokens": ["<x>"]}]
)
def test_other_options_of_openclip_are_refused(options, tmp_path):
    write("hf_bert_cased", tmp_path)
    config = {"text_cfg": {"hf_tokenizer_name": "owner/name", "tokenizer_kwargs": options}}
    message = (
        rf"^expected text_cfg\.tokenizer_kwargs with clean of .*, got {next(iter(options))}=.*; load the tokenizer"
    )
    with pytest.raises(ValueError, match=message):
        pretrained_tokenizer(source(tmp_path, config), model())


def test_the_context_length_of_openclip_and_the_cleaning_of_a_run_are_obeyed(tmp_path):
    config = write("open_clip_lower", tmp_path)
    config["model_cfg"]["text_cfg"]["tokenizer_kwargs"] |= {"context_length": 9}
    tokenizer = pretrained_tokenizer(source(tmp_path, config), model(), clean="none")
    assert tokenizer.context_length == 9 and tokenizer.clean == "none"


def test_the_repository_that_openclip_names_is_read_last(tmp_path, monkeypatch):
    config, own, named = write("open_clip_siglip", tmp_path / "named"), tmp_path / "own", tmp_path / "named"
    own.mkdir()
    asked = []

    def hub_finder(repository):
        asked.append(repository)
        return source(named).find

    monkeypatch.setattr("infcl_jax.inference.pretrained_tokenizer.hub_finder", hub_finder)
    hub = source(own, config)._replace(name="hf-hub:me/siglip")
    np.testing.assert_array_equal(pretrained_tokenizer(hub, model())(golden.TEXTS), FILES["open_clip_siglip"]["ids"])
    assert asked == ["owner/name"]
    with pytest.raises(ValueError, match=r"^expected the files of a tokenizer \(merges.txt, tokenizer.json, "):
        pretrained_tokenizer(source(own, config), model())
    write("open_clip_siglip", own)
    pretrained_tokenizer(hub, model())
    assert asked == ["owner/name"]


def test_all_files_that_a_tokenizer_reads_are_fetched(tmp_path):
    contents = {name: array.tobytes() for name, array in FILES["hf_bert_cased"].items() if name != "ids"}
    config = json.loads(contents["tokenizer_config.json"])
    del config["pad_token"]
    remote = contents | {"tokenizer_config.json": json.dumps(config).encode()}
    remote["special_tokens_map.json"] = b'{"pad_token": "[UNK]"}'

    def find(*names):
        for name in names:
            if name in remote:
                (tmp_path / name).write_bytes(remote[name])
                return tmp_path / name
        return None

    tokenizer = pretrained_tokenizer(source(tmp_path, find=find), model())
    assert tokenizer.pad_id == 1 and {path.name for path in tmp_path.iterdir()} == set(remote)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_lower_case": "yes"}, r"expected do_lower_case in .* to be true or false, got 'yes'$"),
        ({"strip_accents": 3}, r"expected strip_accents in .* to be true or false, got 3$"),
        ({"tokenizer_class": "SiglipTokenizer", "do_lower_case": False}, "expected do_lower_case of SigLIP in .* true"),
        ({"padding_side": "top"}, r"expected padding_side in .* to be left or right, got 'top'$"),
        ({"truncation_side": "left"}, r"expected truncation_side in .* to be right, got 'left'; remove it"),
    ],
)
def test_other_options_of_transformers_are_refused(config, message, tmp_path):
    write("hf_bert_cased", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"^{message}"):
        load_tokenizer(f"hf:{tmp_path}")


@pytest.mark.parametrize("case", ["hf_siglip2_left", "hf_bert_left"])
def test_padding_on_the_left_is_masked_and_refused_for_bert(case, tmp_path):
    write(case, tmp_path)
    tokenizer = load_tokenizer(f"hf:{tmp_path}", golden.LENGTH)
    ids = tokenizer(["a cat", ""])
    mask = tokenizer.attention_mask(ids)
    np.testing.assert_array_equal(mask, ids != tokenizer.pad_id)
    assert mask[:, -1].all() and not mask[1, 0] and tokenizer.decode(ids[0]).strip() == "a cat"
    bert = BertConfig(width=8, layers=1, heads=1)
    check_padding_side(tokenizer, model().text)
    with pytest.raises(ValueError, match=r"^expected a tokenizer that pads on the right for a BERT text tower, got "):
        check_padding_side(tokenizer, bert)


def test_the_side_of_padding_in_tokenizer_json_is_obeyed(tmp_path):
    write("hf_bert_cased", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    padding = {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0}
    content["padding"] = padding | {"pad_type_id": 0, "pad_token": "[PAD]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(f"hf:{tmp_path}").padding_side == "left"
    (tmp_path / "tokenizer_config.json").write_text('{"padding_side": "right"}')
    assert load_tokenizer(f"hf:{tmp_path}").padding_side == "right"


@pytest.mark.parametrize("case", FILES)
def test_openclip_finds_the_tokenizer_of_an_export(case, tmp_path, caplog):
    tokenizer = pretrained_tokenizer(source(tmp_path / "in", write(case, tmp_path / "in")), model())
    (tmp_path / "out").mkdir()
    config = tmp_path / "out" / "open_clip_config.json"
    config.write_text(json.dumps({"model_cfg": {"text_cfg": {}}}))
    save_tokenizer(tmp_path / "out", tokenizer)
    text = json.loads(config.read_text())["model_cfg"]["text_cfg"]
    given = json.loads(FILES[case]["text_cfg"].tobytes()) if case.startswith("open_clip") else {}
    assert text["hf_tokenizer_name"] == given.get("hf_tokenizer_name", "./tokenizer")
    assert text["tokenizer_kwargs"].items() >= given.get("tokenizer_kwargs", {}).items()
    assert ("expected a text cleaning of OpenCLIP" in caplog.text) == (tokenizer.clean == "none")
    loaded = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert loaded.repository == tokenizer.repository
    if case != "hf_siglip":  # from SentencePiece, OpenCLIP has none of the files and fails
        in_folder = load_tokenizer(f"hf:{tmp_path / 'out'}", golden.LENGTH, clean=tokenizer.clean)
        np.testing.assert_array_equal(in_folder(golden.TEXTS), FILES[case]["ids"])


@pytest.mark.parametrize(("size", "name"), [(49408, None), (250_000, "./tokenizer")])
def test_weights_of_a_larger_vocabulary_than_clips_do_not_fall_back_to_clips_tokenizer(size, name):
    text = export_files(model(size, 77))["open_clip_config.json"]["model_cfg"]["text_cfg"]
    assert text.get("hf_tokenizer_name") == name


def test_a_model_with_vocab_txt_alone_is_refused_with_the_way_out(tmp_path):
    def offline(*names):
        raise FileNotFoundError("expected tokenizer.json in the cache, got none")

    with pytest.raises(FileNotFoundError, match=r"got none; vocab\.txt alone is not supported: write tokenizer\.json"):
        pretrained_tokenizer(source(tmp_path, find=offline), model())
    with pytest.raises(ValueError, match=r"got none; pass tokenizer=; vocab\.txt alone is not supported"):
        pretrained_tokenizer(source(tmp_path), model())


def test_stripping_is_an_option_of_hugging_face_tokenizers_alone():
    with pytest.raises(ValueError, match=r"^expected strip_sep_token=None for the tokenizer 'bytes', got True$"):
        load_tokenizer("bytes", strip_sep_token=True)
