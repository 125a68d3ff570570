"""Metrics against clip_benchmark's on the same features (tests/golden/make_clip_benchmark.py)."""

from pathlib import Path

import numpy as np
import pytest

from infcl_jax.data import Classes
from infcl_jax.evaluation import class_embeddings, retrieval_recall
from infcl_jax.evaluation.metrics import (
    classification_metrics,
    mean_average_precision,
    worst_group_accuracy,
)
from infcl_jax.evaluation.retrieval import class_ranks, retrieval_map
from infcl_jax.inference.features import l2_normalize
from infcl_jax.runtime.mesh import data_mesh

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "clip_benchmark.npz")
LABELS, TEXT_IMAGE = GOLDEN["label"], GOLDEN["text_image"]
CLASSES = Classes(tuple(map(str, range(9))), ("{} 0", "{} 1", "{} 2"))


@pytest.fixture(scope="module")
def classifier():
    """Classifier vectors of the golden features of the prompts, one row per prompt."""

    def tokenizer(texts):
        return np.array([[int(text[0]) * 3 + int(text[2])] for text in texts], np.int32)

    prompts = GOLDEN["prompts"].reshape(27, -1)
    return class_embeddings(lambda table, ids: table[ids[:, 0]], prompts, tokenizer, *CLASSES, data_mesh())


def test_classification_equals_clip_benchmark(classifier):
    ranks = class_ranks(GOLDEN["image"], LABELS, classifier, data_mesh())
    found = [*classification_metrics(ranks, LABELS).values()]
    expected = [GOLDEN[f"single/{name}"] for name in ("acc1", "acc5", "mean_per_class_recall")]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert 0.2 < expected[0] < expected[1] < 1 and abs(expected[0] - expected[2]) > 0.01  # not the same by chance


def test_multilabel_precision_equals_clip_benchmark(classifier):
    scores = l2_normalize(GOLDEN["image"]) @ classifier.T
    value = mean_average_precision(scores, GOLDEN["targets"])
    np.testing.assert_allclose(value, GOLDEN["multi/mean_average_precision"], rtol=0, atol=1e-6)


def test_recall_equals_clip_benchmark():
    recall = retrieval_recall(GOLDEN["image"], GOLDEN["text"], data_mesh(), text_image=TEXT_IMAGE)
    names = {"image_to_text": "text_retrieval_recall", "text_to_image": "image_retrieval_recall"}
    for way, name in names.items():
        for k in (1, 5, 10):
            assert recall[f"{way}_r{k}"] == pytest.approx(GOLDEN[f"retrieval/{name}@{k}"].item(), abs=1e-6)


def test_average_precision_of_retrieval_is_that_of_the_sorted_matches():
    found = retrieval_map(GOLDEN["image"], GOLDEN["text"], data_mesh(), TEXT_IMAGE)
    similarity = l2_normalize(GOLDEN["image"]).astype(np.float64) @ l2_normalize(GOLDEN["text"]).T
    own = np.arange(len(similarity))[:, None] == TEXT_IMAGE
    # The average precision of a query does not change if queries take the role of classes.
    expected = {
        "image_to_text_map": mean_average_precision(similarity.T, own.T),
        "text_to_image_map": mean_average_precision(similarity, own),
    }
    assert found == pytest.approx(expected, abs=1e-6)


def test_ties_are_misses_in_average_precision():
    collapsed = np.ones((4, 3), np.float32)
    found = retrieval_map(collapsed, collapsed, data_mesh())
    assert found == pytest.approx({"image_to_text_map": 0.25, "text_to_image_map": 0.25})
    assert mean_average_precision(np.zeros((4, 1)), np.array([[True], [False], [False], [False]])) == 0.25


def test_ignored_groups_must_leave_some():
    hits, groups = np.array([True, False, True]), np.array([3, 3, 5])
    assert worst_group_accuracy(hits, groups, ignored=(3,)) == 1
    with pytest.raises(ValueError, match=r"expected images outside the groups \[3, 5\]"):
        worst_group_accuracy(hits, groups, ignored=(3, 5))
