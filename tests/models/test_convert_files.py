"""Files of weights: formats, damage, sizes, and the names in errors."""

import functools
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infcl_jax.models import config_of, create_model, load_pretrained, save_pretrained
from infcl_jax.models.convert.position_embeddings import resize_grid, resize_sequence
from infcl_jax.models.convert.tensor_files import read_tensors, write_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPE = {"width": 16, "layers": 1, "heads": 2}
OVERRIDES = {f"{tower}.{name}": value for tower in ("vision", "text") for name, value in SHAPE.items()} | {
    "embed_dim": 8,
    "text.context_length": 12,
}
WEIGHTS = "open_clip_model.safetensors"
load = functools.partial(load_pretrained, compare_features=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small model in OpenCLIP's format."""
    folder = tmp_path_factory.mktemp("saved")
    model = create_model("tiny", **OVERRIDES)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), np.zeros((1, 32, 32, 3), np.uint8), np.zeros((1, 12), np.int32)
    )
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)
    save_pretrained(folder, model, variables, compare_features=False)
    return folder, model, variables


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "copy")


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def rewrite(folder, change):
    """Change the tensors of a folder in place."""
    tensors = {name: np.array(array) for name, array in read_tensors(folder / WEIGHTS).items()}
    change(tensors)
    write_tensors(folder / WEIGHTS, tensors)


@pytest.mark.parametrize("key", np.load(GOLDEN / "open_clip_positions.npz").files[::2])
def test_position_embeddings_are_resized_as_in_open_clip(key):
    tables, (tower, _, new, _) = np.load(GOLDEN / "open_clip_positions.npz"), key.split("/")
    before, after = tables[key], tables[key.replace("before", "after")]
    got = resize_grid(before, 1 + int(new) ** 2, prefix=1) if tower == "image" else resize_sequence(before, int(new))
    np.testing.assert_allclose(got, after, atol=2e-6)


def test_other_sizes_resize_the_position_embeddings_only(saved):
    model, variables = load(saved[0], image_size=48, context_length=20)
    assert (model.visual.image_size, model.text.context_length) == (48, 20)
    assert variables["params"]["visual"]["positional_embedding"].shape == (37, 16)
    assert variables["params"]["text"]["positional_embedding"].shape == (20, 16)
    for tower in ("visual", "text"):
        got, expected = (dict(v["params"][tower]) for v in (variables, saved[2]))
        got.pop("positional_embedding"), expected.pop("positional_embedding")
        assert_same(got, expected)


def test_dtypes_are_kept_or_cast_as_asked(saved, folder):
    dtype = "bfloat16"
    _, cast = load(folder, param_dtype=dtype)
    save_pretrained(folder, create_model("tiny", **OVERRIDES, param_dtype=dtype), cast, compare_features=False)
    model, kept = load(folder)
    assert model.text.config.param_dtype == dtype
    assert kept["params"]["visual"]["proj"]["kernel"].dtype == dtype
    assert kept["params"]["logit_scale"].dtype == np.float32
    assert_same(kept, cast)
    assert_same(load(folder, param_dtype="float32")[1], jax.tree.map(np.float32, cast))


def test_shards_are_read_through_their_index(saved, folder):
    tensors, names = read_tensors(folder / WEIGHTS), {}
    for i, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        write_tensors(folder / f"part-{i}.safetensors", {name: tensors[name] for name in part})
        names |= dict.fromkeys(part, f"part-{i}.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / WEIGHTS).unlink()
    assert_same(load(folder)[1], saved[2])
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected part-1.safetensors in .*index.json names"):
        load(folder)


def test_a_checkpoint_of_pytorch_is_read_without_pytorch():
    expected, got = np.load(GOLDEN / "torch_checkpoint.npz"), read_tensors(GOLDEN / "torch_checkpoint.pt")
    assert got.keys() == set(expected.files)
    assert got["bfloat16"].dtype == jnp.bfloat16
    for name, array in got.items():
        np.testing.assert_array_equal(array.astype(expected[name].dtype), expected[name])


def test_a_checkpoint_of_pytorch_with_other_classes_is_refused():
    with pytest.raises(
        ValueError, match=r"got the class fractions.Fraction in .*; save its state_dict with safetensors"
    ):
        read_tensors(GOLDEN / "torch_checkpoint_code.pt")


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"PK\x03\x04"])
def test_another_file_than_a_checkpoint_of_pytorch_is_refused(tmp_path, content):
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"expected a zip file of torch.save"):
        read_tensors(tmp_path / "model.bin")


@pytest.mark.parametrize("size", [0, 4, 9, 2000, -1])
def test_a_truncated_safetensors_file_is_refused(folder, size):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"download it again$"):
        load(folder)


def safetensors_file(header, data=bytes(4)):
    text = header if isinstance(header, str) else json.dumps(header)
    return len(text).to_bytes(8, "little") + text.encode() + data


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        *("[]", "null", "{", "[" * 10_000, '{"a": {"dtype": "F32", "dtype": "F32"}}', {"a": None}, {"a": []}),
        *({"a": ENTRY | {name: wrong}} for name in ENTRY for wrong in (None, "x", -1, [-1], [2**64], [0, 1, 2], {})),
        *({"a": ENTRY | {"shape": shape}} for shape in ([2**62, 2**62], [2], [1.0], ["1"], [1] * 70)),
        *({"a": {k: v for k, v in ENTRY.items() if k != name}} for name in ENTRY),
        {"a": ["F32", [1], [0, 4]]},
        {"a": ENTRY | {"dtype": {"F32": None}}},
        {"a": ENTRY | {"dtype": "F8_E4M3", "shape": [4]}},
        {"a": ENTRY, "b": ENTRY},
        {"a\n\u001b[2J" * 100: ENTRY | {"shape": [1] * 70}},
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_damaged_header_of_safetensors_is_refused(tmp_path, header):
    (tmp_path / "x.safetensors").write_bytes(safetensors_file(header))
    with pytest.raises(ValueError, match=r"^expected [^\n\x1b]*x.safetensors[^\n\x1b]*$") as error:
        read_tensors(tmp_path / "x.safetensors")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool"])
def test_tensors_of_safetensors_are_mapped_into_memory(tmp_path, dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)
    write_tensors(tmp_path / "x.safetensors", {"a": array, "empty": array[:0], "scalar": array[0, 1]})
    got = read_tensors(tmp_path / "x.safetensors")
    for name, expected in (("a", array), ("empty", array[:0]), ("scalar", array[0, 1])):
        assert got[name].dtype == dtype and not np.any(got[name] != expected) and got[name].shape == expected.shape
    base = got["a"]
    while not isinstance(base, np.memmap):
        base = base.base
    assert not got["a"].flags.writeable


@pytest.mark.parametrize(
    "shard",
    [
        *("/etc/passwd", "../x.safetensors", "a/b.safetensors", "a\\b.safetensors", ".", "..", "", "a\0.bin", "x.txt"),
        *("x\x1b[2J.safetensors", "x\n.bin", "x\u2028.bin", "x\ud800.bin"),
        *(None, 3, [], {}, ["x.safetensors"], f"{WEIGHTS}.index.json"),
    ],
)
def test_shards_are_files_of_the_folder(folder, shard):
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"^expected shards to be files .* in the folder of .*index.json, got "):
        load(folder)


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": null}', b"[" * 100_000])
def test_another_file_than_an_index_is_refused(folder, index):
    (folder / f"{WEIGHTS}.index.json").write_bytes(index)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"^expected .*index.json, got [^\n]*$"):
        load(folder)


def test_a_long_configuration_is_not_parsed(folder):
    (folder / "open_clip_config.json").write_text("[" + "[]," * (6 * 2**20) + "[]]")
    with pytest.raises(ValueError, match=r"^expected at most 16 MiB of JSON in .*open_clip_config.json, got more$"):
        load(folder)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_fifo_is_not_read(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"^expected a file of tensors, got "):
        read_tensors(tmp_path / name)


def add(tensors):
    tensors |= {f"extra.{i}": np.zeros(1, np.float32) for i in range(6)}


def remove(tensors):
    del tensors["visual.proj"]


def reshape(tensors):
    tensors["visual.proj"] = tensors["visual.proj"][:, :4]


MISTAKES = {
    "unknown tensors": (add, r"got one with extra.0, extra.1, extra.2, extra.3, ... \(6 in all\)"),
    "missing tensor": (remove, r"got one without visual.proj$"),
    "another shape": (reshape, r"visual.proj \[\[16, 4\]\] for params/visual/proj/kernel \[16, 8\]"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_names_and_shapes_are_checked_both_ways(folder, case):
    change, message = MISTAKES[case]
    rewrite(folder, change)
    with pytest.raises(ValueError, match=f"^expected [^\n]*{message}"):
        load(folder)


def test_buffers_are_listed_in_the_log(folder, caplog):
    rewrite(folder, lambda tensors: tensors.update(attn_mask=np.zeros((12, 12), np.float32)))
    with caplog.at_level("INFO", "infcl_jax"):
        load(folder)
    assert "unused: attn_mask; converted back they are equal" in caplog.text


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("nowhere", FileNotFoundError, "got 'nowhere', which does not exist; give its folder"),
        (str(GOLDEN), FileNotFoundError, "expected open_clip_config.json or config.json in"),
        ("hf-hub:name", ValueError, "expected hf-hub:OWNER/NAME"),
    ],
)
def test_another_path_is_an_error(path, error, message):
    with pytest.raises(error, match=message):
        load(path)


def test_a_model_that_the_format_lacks_is_refused(saved, tmp_path):
    _, model, variables = saved
    biased = model.clone(init_logit_bias=-10.0)
    variables = {"params": variables["params"] | {"logit_bias": np.float32(-10)}}
    with pytest.raises(ValueError, match="expected a model that transformers' CLIP or SigLIP"):
        save_pretrained(tmp_path, biased, variables, "hf", compare_features=False)
    with pytest.raises(ValueError, match=r"expected format to be one of .*got 'onnx'"):
        save_pretrained(tmp_path, model, variables, "onnx")


@pytest.mark.parametrize(
    ("format", "mode", "interpolation"),
    [("open_clip", "squash", "bilinear"), ("hf", "squash", "bicubic"), ("hf", "shortest", "bilinear")],
)
def test_a_loaded_model_is_saved_with_its_resize(saved, tmp_path, format, mode, interpolation):
    model = saved[1].clone(resize_mode=mode, interpolation=interpolation)
    save_pretrained(tmp_path / "before", model, saved[2], format, compare_features=False)
    save_pretrained(tmp_path / "after", *load(tmp_path / "before"), format, compare_features=False)
    loaded, _ = load(tmp_path / "after")
    assert (loaded.resize_mode, loaded.interpolation) == (mode, interpolation) and config_of(loaded).resize_mode == mode
    for file in ("open_clip_config.json", "preprocessor_config.json"):
        if (tmp_path / "before" / file).is_file():
            assert (tmp_path / "before" / file).read_text() == (tmp_path / "after" / file).read_text()


def test_padding_to_squares_is_refused_for_transformers(saved, tmp_path):
    model = saved[1].clone(resize_mode="longest")
    with pytest.raises(ValueError, match="expected a model that transformers' CLIP or SigLIP"):
        save_pretrained(tmp_path, model, saved[2], "hf", compare_features=False)


OPENAI = {name: np.array(7, np.int64) for name in ("input_resolution", "context_length", "vocab_size")}


@pytest.mark.parametrize(
    ("file", "tensors", "activation", "warned"),
    [
        ("weights", OPENAI, "gelu", "it has the tensors input_resolution, context_length, vocab_size of OpenAI"),
        ("weights", OPENAI, "quick_gelu", None),
        ("rn50-quickgelu-yfcc15m-455df137", {}, "gelu", "its name says so"),
        ("vit_b_32.openai", {}, "gelu", "its name says so"),
        ("vit_b_32.openai", {}, "quick_gelu", None),
        ("weights", {}, "gelu", None),
    ],
)
def test_weights_of_openai_without_quick_gelu_are_a_warning(saved, tmp_path, caplog, file, tensors, activation, warned):
    content = json.loads((saved[0] / "open_clip_config.json").read_text())
    content["model_cfg"]["quick_gelu"] = activation == "quick_gelu"
    (tmp_path / "model.json").write_text(json.dumps(content))
    path = tmp_path / f"{file}.safetensors"
    write_tensors(path, read_tensors(saved[0] / WEIGHTS) | tensors)
    load(path, model=str(tmp_path / "model.json"))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (warned is not None)
    if warned:
        assert warned in warnings[0] and "choose its name with -quickgelu" in warnings[0]
        load(path, model=str(tmp_path / "model.json"), activation="quick_gelu")
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
