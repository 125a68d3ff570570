"""`infcl_jax.load`: features, classifiers and probabilities equal the model's own, from every kind of input."""

import io
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from PIL import Image

import infcl_jax
from infcl_jax import run
from infcl_jax.data.transforms import resize_center_crop
from infcl_jax.distributed import data_mesh
from infcl_jax.training import Checkpointer, save_config


class Position:
    """Data iterator without data."""

    def get_state(self):
        return {}


@pytest.fixture(scope="module")
def states():
    """Parameters at steps 3 and 5."""
    initial = run.initial_state(runs.config(), data_mesh())
    return {3: initial, 5: initial.replace(params=jax.tree.map(lambda x: x * 1.5, initial.params))}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, states):
    """A run with two checkpoints."""
    workdir = tmp_path_factory.mktemp("run")
    save_config(workdir, runs.config().to_dict())
    with Checkpointer(workdir) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, Position())
    return workdir


@pytest.fixture(scope="module")
def encoder(workdir):
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


def expected_images(state, images):
    pixels = np.stack([resize_center_crop(rgb(image), runs.SIDE) for image in images])
    return runs.model().apply(state.variables, jnp.asarray(pixels), method="encode_image")


@pytest.mark.parametrize(("step", "restored"), [(None, 5), (3, 3)])
def test_variables_are_those_of_the_checkpoint(workdir, states, step, restored):
    encoder = infcl_jax.load(workdir, step=step)
    assert runs.equal_bits(encoder.variables, states[restored].variables)
    assert encoder.tokenizer(["a b"]).shape == (1, runs.CONTEXT)


@pytest.mark.parametrize("count", [1, 8, 13])
@pytest.mark.parametrize("devices", [1, 8])
def test_image_features_are_those_of_the_model(workdir, states, images, devices, count):
    encoder = infcl_jax.load(workdir, mesh=data_mesh(jax.devices()[:devices]), batch_size=8)
    features = encoder.encode_images(images[:count])
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected_images(states[5], images[:count]), atol=1e-5)


def test_texts_and_empty_lists(encoder, states):
    texts = [f"caption {i}" for i in range(11)]
    tokens = encoder.tokenizer(texts)
    expected = runs.model().apply(states[5].variables, jnp.asarray(tokens), method="encode_text")
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
    ],
)
def test_bad_inputs_are_named(encoder, call, message):
    with pytest.raises(ValueError, match=message):
        call(encoder)


def test_bad_paths_and_arguments_are_named(workdir, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give the work directory of a run"):
        infcl_jax.load(tmp_path / "missing")
    with pytest.raises(ValueError, match="expected the work directory of a run"):
        infcl_jax.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4 in .*; its steps are 3, 5"):
        infcl_jax.load(workdir, step=4)
    with pytest.raises(ValueError, match="batch_size >= 1"):
        infcl_jax.load(workdir, batch_size=0)


def test_the_losses_do_not_import_the_encoder():
    code = "import infcl_jax, sys; assert 'infcl_jax.data' not in sys.modules; infcl_jax.Encoder"
    subprocess.run([sys.executable, "-c", code], cwd=runs.ROOT, check=True)
