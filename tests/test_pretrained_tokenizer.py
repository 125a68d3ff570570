"""Tokenizers of pretrained models: their ids, against OpenCLIP and transformers, and where their files are found."""

import json

import numpy as np
import pytest
from golden import make_pretrained_tokens as golden

from infcl_jax.data import load_tokenizer
from infcl_jax.models import model_config
from infcl_jax.models.convert.sources import Source
from infcl_jax.pretrained_tokenizer import pretrained_tokenizer

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

    monkeypatch.setattr("infcl_jax.pretrained_tokenizer.hub_finder", hub_finder)
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


def test_lower_case_must_be_true_or_false(tmp_path):
    write("hf_bert_cased", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": "yes"}')
    with pytest.raises(ValueError, match=r"^expected do_lower_case in .* to be true or false, got 'yes'$"):
        load_tokenizer(f"hf:{tmp_path}")


def test_stripping_is_an_option_of_hugging_face_tokenizers_alone():
    with pytest.raises(ValueError, match=r"^expected strip_sep_token=None for the tokenizer 'bytes', got True$"):
        load_tokenizer("bytes", strip_sep_token=True)
