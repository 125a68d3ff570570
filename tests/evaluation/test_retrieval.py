"""Recall against a brute-force ranking, with ties, NaN and repeated captions."""

import logging

import jax
import numpy as np
import pytest

from infcl_jax.evaluation import retrieval, retrieval_recall
from infcl_jax.inference import search
from infcl_jax.inference.features import shard_rows
from infcl_jax.runtime import console
from infcl_jax.runtime.mesh import data_mesh, replicate


def brute_force(image, text, owner, ks):
    """Sorts every gallery in float64, one query at a time."""
    image, text = image.astype(np.float64), text.astype(np.float64)
    image /= np.linalg.norm(image, axis=1, keepdims=True)
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    similarity = image @ text.T
    first_caption = [int(np.flatnonzero(owner[np.argsort(-row)] == i)[0]) for i, row in enumerate(similarity)]
    image_rank = [int(np.flatnonzero(np.argsort(-column) == owner[j])[0]) for j, column in enumerate(similarity.T)]
    ranks = {"image_to_text": first_caption, "text_to_image": image_rank}
    return {f"{name}_r{k}": float(np.mean(np.array(rank) < k)) for name, rank in ranks.items() for k in ks}


def correlated(rng, images, owner, dim=8, noise=1.0):
    image = rng.normal(size=(images, dim)).astype(np.float32)
    text = image[owner] + noise * rng.normal(size=(len(owner), dim)).astype(np.float32)
    return image, text.astype(np.float32)


@pytest.mark.parametrize(("devices", "blocks", "samples"), [(1, None, 13), (8, (7, 3), 101), (8, None, 1)])
def test_equals_brute_force_with_one_caption_an_image(monkeypatch, devices, blocks, samples):
    if blocks:
        monkeypatch.setattr(search, "_QUERY_ROWS", blocks[0])
        monkeypatch.setattr(search, "_GALLERY_ROWS", blocks[1])
    rng = np.random.default_rng(samples)
    owner = np.arange(samples)
    image, text = correlated(rng, samples, owner)
    recall = retrieval_recall(image, text, data_mesh(jax.devices()[:devices]))
    assert recall == brute_force(image, text, owner, (1, 5, 10))
    assert samples == 1 or 0 < recall["image_to_text_r1"] < recall["image_to_text_r10"]


def pessimistic_ranks(image, text, owner, ks):
    """Recall with ties as misses, from the whole matrix in float64."""
    unit = [x / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in (image, text)]
    similarity = unit[0] @ unit[1].T
    own = owner[None, :] == np.arange(len(image))[:, None]
    best = np.where(own, similarity, -np.inf).max(axis=1, keepdims=True)
    to_text = (~own & (similarity > best - 1e-6)).sum(axis=1)
    to_image = (~own & (similarity > similarity[owner, np.arange(len(text))] - 1e-6)).sum(axis=0)
    ranks = {"image_to_text": to_text, "text_to_image": to_image}
    return {f"{name}_r{k}": float(np.mean(rank < k)) for name, rank in ranks.items() for k in ks}


@pytest.mark.parametrize(("devices", "blocks"), [(1, (7, 3)), (8, None)])
def test_ties_between_ragged_captions_and_duplicate_images_equal_numpy(monkeypatch, devices, blocks):
    if blocks:
        monkeypatch.setattr(search, "_QUERY_ROWS", blocks[0])
        monkeypatch.setattr(search, "_GALLERY_ROWS", blocks[1])
    rng = np.random.default_rng(11)
    owner = rng.permutation(np.repeat(np.arange(60), rng.integers(1, 6, 60)))  # captions of an image are no neighbors
    image, text = correlated(rng, 60, owner, noise=1.2)
    image[rng.integers(0, 60, 8)] = image[rng.integers(0, 60, 8)]  # duplicate images
    repeated = rng.integers(0, len(text), (2, 30))
    text[repeated[0]] = text[repeated[1]]  # captions of the same image and of others
    mesh = data_mesh(jax.devices()[:devices])
    recall = retrieval_recall(image, text, mesh, ks=(1, 2, 5), text_image=owner)
    assert recall == pessimistic_ranks(image, text, owner, (1, 2, 5))
    assert recall != brute_force(image, text, owner, (1, 2, 5))


@pytest.mark.parametrize("dim", [3, 4096])
def test_collapsed_features_score_zero(dim):
    point = np.random.default_rng(dim).normal(size=(1, dim)).astype(np.float32)
    features = np.repeat(point, 37, axis=0)
    recall = retrieval_recall(features, features, data_mesh(), ks=(1, 10, 36, 37))
    assert {k: v for k, v in recall.items() if not k.endswith("37")} == dict.fromkeys(
        (f"{way}_r{k}" for way in ("image_to_text", "text_to_image") for k in (1, 10, 36)), 0.0
    )
    assert recall["image_to_text_r37"] == recall["text_to_image_r37"] == 1.0


def test_zero_and_nan_features_score_zero():
    for value in (0.0, np.nan, np.inf):
        bad = np.full((20, 4), value, np.float32)
        assert set(retrieval_recall(bad, bad, data_mesh(), ks=(1, 10)).values()) == {0.0}


def test_one_nan_caption_counts_against_every_image():
    features = np.eye(12, dtype=np.float32)
    text = features.copy()
    text[4] = np.nan
    recall = retrieval_recall(features, text, data_mesh(), ks=(1, 2))
    assert recall["text_to_image_r1"] == pytest.approx(11 / 12)
    assert recall["image_to_text_r1"] == 0.0
    assert recall["image_to_text_r2"] == pytest.approx(11 / 12)


@pytest.fixture
def warned(caplog):
    """The log of a process that has not warned yet."""
    console.warn_once.cache_clear()
    caplog.set_level(logging.WARNING, console.__name__)
    return caplog


def test_repeated_captions_are_reported_once(warned):
    image = np.eye(9, dtype=np.float32)
    text = image.copy()
    text[3] = text[2] = image[2] + image[3]
    for _ in range(2):
        retrieval_recall(image, text, data_mesh())
    assert len(warned.messages) == 1
    assert warned.messages[0].startswith(
        "2 of 9 captions have the features of another image's caption and tie with it: R@1 is at most 77.8 % image to"
        " text and 88.9 % text to image"
    )
    text[5] = text[4]  # another gallery
    retrieval_recall(image, text, data_mesh())
    assert len(warned.messages) == 2 and warned.messages[1].startswith("4 of 9 captions")


def test_other_processes_and_distinct_captions_report_nothing(warned, monkeypatch):
    image = np.eye(9, dtype=np.float32)
    retrieval_recall(image, np.repeat(image, 2, axis=0), data_mesh(), text_image=np.arange(18) // 2)
    monkeypatch.setattr(retrieval, "is_lead", lambda: False)
    retrieval_recall(np.eye(4), np.ones((4, 4)), data_mesh())
    assert not warned.messages


@pytest.mark.parametrize(
    ("caption", "owner"),
    [
        ([0, 0, 1, 2], [0, 1, 2, 3]),
        ([0, 0, 0, 0], [0, 1, 2, 3]),
        ([0, 1, 0, 2, 2, 3], [0, 0, 1, 1, 2, 2]),
        ([0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 2, 3]),
    ],
)
def test_recall_ceiling_is_the_best_recall(caption, owner):
    caption, owner = np.array(caption), np.array(owner)
    count, *ceiling = retrieval.recall_ceiling(np.eye(4, dtype=np.float32)[caption], owner)
    assert count == sum(len(set(owner[caption == c])) > 1 for c in caption)
    rng, best = np.random.default_rng(0), np.zeros(2)
    for _ in range(1000):  # no model is above the ceiling, and one reaches it
        text = rng.normal(size=(4, 8))[caption]
        weight = rng.random(len(text)) * (owner == np.arange(owner.max() + 1)[:, None])
        recall = recall_at_1(weight @ text + 0.1 * rng.normal(size=(len(weight), 8)), text, owner)
        assert (recall <= ceiling).all()
        best = np.maximum(best, recall)
    np.testing.assert_array_equal(best, ceiling)


def recall_at_1(image, text, owner):
    """R@1 in both directions; a tie is a miss."""
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (image, text)]
    similarity = unit[0] @ unit[1].T
    own = owner[None, :] == np.arange(len(image))[:, None]
    right, wrong = np.where(own, similarity, -np.inf), np.where(own, -np.inf, similarity)
    to_text = right.max(axis=1) > wrong.max(axis=1) + retrieval.TIE_TOLERANCE
    to_image = right.max(axis=0) > wrong.max(axis=0) + retrieval.TIE_TOLERANCE
    return np.array([to_text.mean(), to_image.mean()])


def test_no_device_holds_more_than_a_tile_of_the_similarities(monkeypatch):
    monkeypatch.setattr(search, "_GALLERY_ROWS", 16)
    mesh, samples, block = data_mesh(), 4096, 32
    gallery = shard_rows(mesh, np.zeros((samples, 2), np.float32))
    group = shard_rows(mesh, np.zeros(samples, np.int32))
    queries = replicate(
        mesh, (np.zeros((block, 2), np.float32), np.zeros(block, np.int32), np.zeros(block, np.float32))
    )
    lowered = retrieval._count_replicated.lower(queries, gallery, group, mesh=mesh, tile_rows=16, first_wins=False)
    compiled = lowered.compile()
    # Counts of each tile are int32 [tiles, block] on a device; the similarities would be float32 [samples / 8, block].
    tiles = samples // mesh.size // 16
    similarities = samples // mesh.size * block * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * (tiles * block * 4 + 16 * block * 4) < similarities


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": np.zeros((4, 3))}, "none empty"),
        ({"text": np.zeros((5, 2))}, "pass text_image"),
        ({"image": np.zeros((0, 2)), "text": np.zeros((0, 2))}, "none empty"),
        ({"ks": (0, 1)}, "ks >= 1"),
        ({"ks": ()}, "ks >= 1"),
        ({"text_image": np.array([0, 1, 2])}, "integer text_image"),
        ({"text_image": np.array([0.0, 1, 2, 3])}, "integer text_image"),
        ({"text_image": np.array([0, 1, 2, 4])}, r"\[0, 4\)"),
        ({"text_image": np.array([0, 1, 2, 2])}, "caption for every image"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    defaults = {"image": np.zeros((4, 2)), "text": np.zeros((4, 2))}
    with pytest.raises(ValueError, match=message):
        retrieval_recall(mesh=data_mesh(), **(defaults | arguments))
