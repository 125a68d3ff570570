"""`infcl_jax.load`: features, classifiers and probabilities equal the model's own, from every kind of input."""

import dataclasses
import functools
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from PIL import Image

import infcl_jax
from infcl_jax.data import ByteTokenizer
from infcl_jax.data.transforms import Resize, resize_center_crop
from infcl_jax.models import save_pretrained
from infcl_jax.runtime.mesh import data_mesh


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def states(workdir):
    """Train states of the checkpoints of a run, by step."""
    return runs.save(workdir, {3: 1.0, 5: 1.5})


@pytest.fixture(scope="module")
def encoder(workdir, states):
    return infcl_jax.load(workdir, batch_size=8)


@pytest.fixture(scope="module")
def images():
    """Arrays of different sizes, two of them gray."""
    rng = np.random.default_rng(0)
    sizes = [(16, 16, 3), (20, 31, 3), (40, 17, 3), (18, 18, 1), (18, 25)] + [(16, 20, 3)] * 8
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def rgb(image):
    image = image.reshape(*image.shape[:2], -1)
    return image if image.shape[2] == 3 else np.repeat(image, 3, axis=2)


def unit(features):
    return features / np.linalg.norm(features, axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnums=0)
def apply(method, variables, inputs):
    return runs.model().apply(variables, inputs, method=method)


def expected_images(state, images):
    pixels = np.stack([resize_center_crop(rgb(image), runs.SIDE) for image in images])
    return apply("encode_image", state.variables, jnp.asarray(pixels))


@pytest.mark.parametrize(("step", "restored"), [(None, 5), (3, 3)])
def test_variables_are_those_of_the_checkpoint(workdir, states, step, restored):
    encoder = infcl_jax.load(workdir, step=step)
    assert runs.equal_bits(encoder.variables, states[restored].variables)
    assert encoder.tokenizer(["a b"]).shape == (1, runs.CONTEXT)


@pytest.mark.parametrize(("count", "devices"), [(1, 8), (8, 1), (13, 8)])
def test_image_features_are_those_of_the_model(workdir, states, images, devices, count):
    encoder = infcl_jax.load(workdir, mesh=data_mesh(jax.devices()[:devices]), batch_size=8)
    features = encoder.encode_images(images[:count])
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected_images(states[5], images[:count]), atol=1e-5)


def test_texts_and_empty_lists(encoder, states):
    texts = [f"caption {i}" for i in range(11)]
    tokens = encoder.tokenizer(texts)
    expected = apply("encode_text", states[5].variables, jnp.asarray(tokens))
    np.testing.assert_allclose(encoder.encode_texts(texts), expected, atol=1e-5)
    assert encoder.encode_texts([]).shape == encoder.encode_images([]).shape == (0, 16)


def test_every_kind_of_image_gives_the_same_features(encoder, images, tmp_path):
    array = images[1]
    Image.fromarray(array).save(tmp_path / "image.png")
    content = (tmp_path / "image.png").read_bytes()
    kinds = [array, jnp.asarray(array), Image.fromarray(array), tmp_path / "image.png", str(tmp_path / "image.png")]
    features = encoder.encode_images([*kinds, content, Image.open(io.BytesIO(content))])
    np.testing.assert_array_equal(features, np.repeat(features[:1], len(features), axis=0))


def test_classifier_and_probabilities(encoder, images):
    classes, templates = ["cat", "sea lion", "dog"], ["a {}", "the {}."]
    prompts = [template.replace("{}", name) for name in classes for template in templates]
    vectors = unit(unit(encoder.encode_texts(prompts)).reshape(3, 2, -1).mean(axis=1))
    np.testing.assert_allclose(encoder.classifier(classes, templates), vectors, atol=1e-5)
    logits = encoder.logit_scale * encoder.encode_images(images) @ vectors.T
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    probabilities = encoder.zero_shot(images, classes, templates)
    assert probabilities.shape == (len(images), 3) and probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, expected, rtol=1e-3)
    np.testing.assert_array_equal(encoder.classifier(classes), encoder.classifier(classes, ["a photo of a {}."]))


def test_one_program_serves_all_batches(encoder, images, monkeypatch):
    shapes = set()
    apply = type(encoder.model).apply

    def recorded(self, variables, inputs, **options):
        shapes.add(inputs.shape)
        return apply(self, variables, inputs, **options)

    monkeypatch.setattr(type(encoder.model), "apply", recorded)
    jax.clear_caches()
    for count in (13, 8, 9):
        encoder.encode_images(images[:count])
    assert shapes == {(8, runs.SIDE, runs.SIDE, 3)}


def test_dtype_changes_activations_and_not_parameters(workdir, encoder, images):
    half = infcl_jax.load(workdir, dtype="bfloat16", batch_size=8)
    assert runs.equal_bits(half.variables, encoder.variables)
    features = half.encode_images(images)
    np.testing.assert_array_equal(features, features.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_allclose(features, encoder.encode_images(images), atol=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda encoder: encoder.encode_images("cat.jpg"), "expected images to be a list, got str"),
        (lambda encoder: encoder.encode_texts("cat"), "expected texts to be a list, got str"),
        (lambda encoder: encoder.encode_images(["missing.jpg"]), r"image 0 \(missing.jpg\) cannot be decoded"),
        (lambda encoder: encoder.encode_images([np.zeros((4, 4, 3))]), "image 0 cannot be decoded: .*uint8"),
        (lambda encoder: encoder.encode_images([b"text"]), "image 0 cannot be decoded: .*JPEG"),
        (lambda encoder: encoder.classifier([]), "classes and templates"),
        (lambda encoder: encoder.zero_shot([], "cat"), "got a single string; put it in a list"),
    ],
)
def test_bad_inputs_are_named(encoder, call, message):
    with pytest.raises(ValueError, match=message):
        call(encoder)


@pytest.mark.parametrize("format", ["open_clip", "hf"])
def test_exported_models_give_the_same_features(encoder, images, tmp_path, format):
    assert f"({format}): " in (checked := encoder.save(tmp_path, format)) and "are equal" in checked
    exported = infcl_jax.load(tmp_path, batch_size=8)
    assert exported.image_size == runs.SIDE and exported.tokenizer.kind == "bytes"
    np.testing.assert_allclose(exported.encode_images(images), encoder.encode_images(images), atol=1e-6)
    np.testing.assert_allclose(exported.encode_texts(["a cat"]), encoder.encode_texts(["a cat"]), atol=1e-6)
    half = infcl_jax.load(tmp_path, dtype="bfloat16").encode_images(images)
    np.testing.assert_array_equal(half, half.astype(jnp.bfloat16).astype(np.float32))
    with pytest.raises(ValueError, match="step=None for a pretrained model"):
        infcl_jax.load(tmp_path, step=1)
    with pytest.raises(ValueError, match="at most 259 ids and 36 tokens, got 'bytes' of 259 ids and 77 tokens"):
        infcl_jax.load(tmp_path, tokenizer=ByteTokenizer(77))


@pytest.mark.parametrize(
    ("file", "preprocess", "resize"),
    [
        ("open_clip_config.json", {"resize_mode": "squash", "interpolation": "bilinear"}, ("squash", "bilinear")),
        ("preprocessor_config.json", {"size": {"height": 16, "width": 16}, "resample": 2}, ("squash", "bilinear")),
        ("preprocessor_config.json", {"size": {"shortest_edge": 16}, "resample": 3}, ("shortest", "bicubic")),
        ("preprocessor_config.json", {"size": 16, "do_center_crop": True}, ("shortest", "bicubic")),
    ],
)
def test_images_are_resized_as_the_model_says(encoder, images, tmp_path, file, preprocess, resize):
    format = "hf" if file.startswith("pre") else "open_clip"
    save_pretrained(tmp_path, encoder.model, encoder.variables, format, compare_features=False)
    content = {"preprocess_cfg": preprocess} if format == "open_clip" else preprocess
    saved = json.loads((tmp_path / file).read_text()) if format == "open_clip" else {}
    (tmp_path / file).write_text(json.dumps(saved | content))
    loaded = infcl_jax.load(tmp_path, batch_size=8)
    assert loaded.resize == resize
    if resize[0] == "squash":
        squashed = np.asarray(Image.fromarray(images[1]).resize((runs.SIDE, runs.SIDE), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(loaded.encode_images([images[1]]), loaded.encode_images([squashed]))


@pytest.mark.parametrize("format", ["open_clip", "hf"])
def test_saved_models_bring_their_tokenizer_and_resize(encoder, images, tmp_path, format):
    tokenizer = ByteTokenizer(runs.CONTEXT, clean="lower")
    other = dataclasses.replace(encoder, tokenizer=tokenizer, resize=Resize("squash", "bilinear"))
    other.save(tmp_path, format)
    loaded = infcl_jax.load(tmp_path, batch_size=8)
    np.testing.assert_array_equal(loaded.tokenizer(["A Cat"]), tokenizer(["a cat"]))
    np.testing.assert_allclose(loaded.encode_images(images), other.encode_images(images), atol=1e-6)
    assert np.abs(loaded.encode_images(images) - encoder.encode_images(images)).max() > 1e-3


def test_an_encoder_is_shown_in_a_line(encoder):
    count = sum(leaf.size for leaf in jax.tree.leaves(encoder.variables["params"]))
    images, texts = f"images of {runs.SIDE} pixels", f"texts of at most {runs.CONTEXT} tokens of 259 ids"
    assert repr(encoder) == f"Encoder({count:,} parameters, {images}, {texts}, features of 16 dimensions, 8 device(s))"


def test_fingerprint_changes_with_parameters_and_dtype(workdir, encoder):
    same = infcl_jax.load(workdir, mesh=data_mesh(jax.devices()[:1]))
    assert same.fingerprint() == encoder.fingerprint()
    others = [infcl_jax.load(workdir, step=3), infcl_jax.load(workdir, dtype="bfloat16")]
    assert len({encoder.fingerprint(), *(other.fingerprint() for other in others)}) == 3


def test_bad_paths_and_arguments_are_named(workdir, states, tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=r"work directory of a run .*, a folder with open_clip_config.json or"):
            infcl_jax.load(path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4 in .*; its steps are 3, 5"):
        infcl_jax.load(workdir, step=4)
    with pytest.raises(ValueError, match="batch_size >= 1"):
        infcl_jax.load(workdir, batch_size=0)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("3.orbax-checkpoint-tmp-1", "no checkpoint in .*; its steps are none yet"),
        ("3", "expected a complete checkpoint in .*, got only one whose save was interrupted"),
        ("3/state", "expected a complete checkpoint in .*, got only one whose save was interrupted"),
    ],
)
def test_a_run_that_was_killed_in_its_first_save_is_refused(workdir, states, tmp_path, folder, message):
    shutil.copy(workdir / "config.json", tmp_path)
    (tmp_path / "checkpoints" / folder).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=f"^{message}$"):
        infcl_jax.load(tmp_path)


@pytest.mark.parametrize("dim", [5, 16])
def test_a_prefix_is_the_normalized_cut(workdir, encoder, images, dim, tmp_path):
    prefix = infcl_jax.load(workdir, batch_size=8, dim=dim)
    assert prefix.embed_dim == dim
    for method, inputs in (("encode_images", images[:3]), ("encode_texts", ["a b", "c"])):
        whole = getattr(encoder, method)(inputs)
        np.testing.assert_allclose(getattr(prefix, method)(inputs), unit(whole[:, :dim]), atol=1e-5)
    assert prefix.fingerprint() != encoder.fingerprint()
    prefix.save(tmp_path)
    saved = infcl_jax.load(tmp_path, batch_size=8)
    np.testing.assert_allclose(saved.encode_texts(["a b"]), prefix.encode_texts(["a b"]), atol=1e-5)


@pytest.mark.parametrize("dim", [0, 17])
def test_a_prefix_longer_than_the_features_is_an_error(encoder, dim):
    with pytest.raises(ValueError, match=f"^expected dim between 1 and 16, the size of the features, got {dim}"):
        encoder.prefix(dim)
