"""Prompt ensembles and top-k accuracy against plain NumPy."""

import jax
import numpy as np
import pytest

from infcl_jax.evaluation import class_embeddings, zero_shot_accuracy
from infcl_jax.runtime.mesh import data_mesh, replicate

LENGTH, DIM = 40, 6
TEMPLATES = ("a photo of a {}", "{}: the {}", lambda name: f"many {name}s")


def tokenize(texts):
    ids = np.zeros((len(texts), LENGTH), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    return ids


def encode_text(params, ids):
    return params[ids].sum(axis=1)


def reference_embeddings(params, names):
    classes = []
    for name in names:
        prompts = [f"a photo of a {name}", f"{name}: the {name}", f"many {name}s"]
        features = params[tokenize(prompts)].astype(np.float64).sum(axis=1)
        mean = (features / np.linalg.norm(features, axis=1, keepdims=True)).mean(axis=0)
        classes.append(mean / np.linalg.norm(mean))
    return np.array(classes)


@pytest.mark.parametrize(("devices", "batch_size", "classes"), [(1, 1, 7), (8, 10, 7), (8, 512, 1)])
def test_the_ensemble_is_the_normalized_mean_of_normalized_prompts(devices, batch_size, classes):
    params = np.random.default_rng(0).normal(size=(256, DIM)).astype(np.float32)
    names = ["cat", "dog", "red circle", "{x}", "owl", "ant", "emu"][:classes]
    mesh = data_mesh(jax.devices()[:devices])
    embeddings = class_embeddings(
        encode_text, replicate(mesh, params), tokenize, names, TEMPLATES, mesh, batch_size=batch_size
    )
    assert (embeddings.shape, embeddings.dtype) == ((classes, DIM), np.float32)
    np.testing.assert_allclose(embeddings, reference_embeddings(params, names), atol=1e-5)


def test_samples_without_a_class_are_left_out():
    embeddings = np.eye(4, dtype=np.float32)
    labels = np.array([0, -1, 1, -1, 3])
    image = embeddings[[0, 2, 2, 2, 3]]
    assert zero_shot_accuracy(image, labels, embeddings, data_mesh(), topk=(1,)) == {"top1": pytest.approx(2 / 3)}


@pytest.mark.parametrize(("value", "top1", "top5"), [(0.0, 0.1, 0.5), (1.0, 0.1, 0.5), (np.nan, 0.0, 0.0)])
def test_collapsed_embeddings_score_the_share_of_the_first_classes(value, top1, top5):
    embeddings = np.full((10, 64), value, np.float32)
    image = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    assert zero_shot_accuracy(image, np.arange(20) % 10, embeddings, data_mesh()) == {"top1": top1, "top5": top5}


@pytest.mark.parametrize("devices", [1, 8])
def test_accuracy_equals_sorting_and_the_first_of_equal_classes_wins(devices):
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(12, DIM)).astype(np.float32)
    embeddings[[3, 7, 11]], embeddings[5] = embeddings[0], embeddings[4]
    image, labels = rng.normal(size=(500, DIM)).astype(np.float32), rng.integers(0, 12, 500)
    unit = embeddings.astype(np.float64) / np.linalg.norm(embeddings.astype(np.float64), axis=1, keepdims=True)
    ranking = np.argsort(-(image @ unit.T), axis=1, kind="stable")
    accuracy = zero_shot_accuracy(image, labels, embeddings, data_mesh(jax.devices()[:devices]), topk=(1, 3, 20))
    assert accuracy == {f"top{k}": np.mean((ranking[:, :k] == labels[:, None]).any(axis=1)) for k in (1, 3, 20)}


def embed(names, templates):
    params = np.random.default_rng(0).normal(size=(256, DIM)).astype(np.float32)
    return class_embeddings(encode_text, replicate(data_mesh(), params), tokenize, names, templates, data_mesh())


def test_equal_names_give_one_warning(caplog):
    for _ in range(2):
        embed(["crane", "owl", "crane", "emu", "emu"], ["a {}"])
    (message,) = caplog.messages
    assert message.startswith("equal names of 4 of 5 classes: 'crane' (2), 'emu' (2); the first of equal classes is")


def test_prompts_of_each_class_are_averaged(caplog):
    prompts = {"sea_lion": ["a {c} that barks", "whiskers", "{}"], "owl": "an owl at night", "yeti": ["a yeti"]}
    found = embed(["owl", "sea lion"], prompts)
    np.testing.assert_allclose(found[0], embed(["owl"], "an {} at night")[0], atol=1e-6)
    templates = ["a {} that barks", lambda name: "whiskers", "{}"]
    np.testing.assert_allclose(found[1], embed(["sea lion"], templates)[0], atol=1e-6)
    assert caplog.messages == ["templates: prompts without a class are not used: 'yeti'"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_names": []}, "classes and templates"),
        ({"templates": []}, "classes and templates"),
        ({"class_names": "cat"}, "put it in a list"),
        ({"templates": {"cta": ["a cat"]}}, "expected prompts of all 1 classes, got none of 'cat'; no class .* 'cta'"),
        ({"templates": {"cat": []}}, "templates, class 'cat': expected texts, none of them empty"),
        ({"templates": {"cat": [3]}}, "templates, class 'cat': expected texts, none of them empty"),
        ({"templates": ["{} {0}"]}, "for the class name and no other braces"),
        ({"templates": ["a photo"]}, "for the class name and no other braces"),
        ({"batch_size": 0}, "batch_size >= 1"),
    ],
)
def test_bad_prompts_are_named(change, message):
    mesh = data_mesh()
    arguments = {"class_names": ["cat"], "templates": ["a {}"]} | change
    with pytest.raises(ValueError, match=message):
        class_embeddings(encode_text, np.zeros((256, DIM), np.float32), tokenize, mesh=mesh, **arguments)


@pytest.mark.parametrize(
    ("labels", "topk", "message"),
    [
        (np.array([0, 1, 4]), (1,), "class names of this source"),
        (np.array([0, 1, -2]), (1,), "class names of this source"),
        (np.array([-1, -1, -1]), (1,), "none among 3"),
        (np.array([0, 1]), (1,), "integer labels"),
        (np.array([0.0, 1.0, 2.0]), (1,), "integer labels"),
        (np.array([0, 1, 2]), (0,), "topk >= 1"),
    ],
)
def test_bad_labels_are_named(labels, topk, message):
    with pytest.raises(ValueError, match=message):
        zero_shot_accuracy(np.zeros((3, 4)), labels, np.zeros((4, 4)), data_mesh(), topk=topk)
