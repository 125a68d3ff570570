"""Logistic regression against scikit-learn, CLIP's search of the L2 strength, and AdamW against PyTorch."""

from pathlib import Path

import jax
import numpy as np
import pytest

from infcl_jax.evaluation import adamw_probe, linear_probe
from infcl_jax.evaluation.labeled import LabeledFeatures
from infcl_jax.evaluation.linear_probe import REGULARIZATIONS, WEIGHT_DECAYS, binary_search, hold_out, train_adamw
from infcl_jax.evaluation.logistic_regression import LinearClassifier, LogisticRegressionSolver
from infcl_jax.evaluation.metrics import classification_metrics
from infcl_jax.runtime.mesh import data_mesh

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "linear_probe.npz"))
TRAIN = 150  # first samples of the golden file


def split(name):
    features, labels = GOLDEN[f"{name}/features"], GOLDEN[f"{name}/labels"]
    return features[:TRAIN], labels[:TRAIN], features[TRAIN:], labels[TRAIN:]


@pytest.mark.parametrize(("name", "devices"), [("binary", 1), ("multinomial", 8)])
def test_optimum_equals_scikit_learn(name, devices, monkeypatch):
    # Several tiles on each device, the last with padding.
    monkeypatch.setattr("infcl_jax.evaluation.logistic_regression._CHUNK_ROWS", 8)
    mesh = data_mesh(jax.devices()[:devices])
    features, labels, test_features, test_labels = split(name)
    solver = LogisticRegressionSolver(features, labels, mesh, tolerance=1e-6)
    for strength in (0.1, 100.0):
        golden = {key: GOLDEN[f"{name}/{strength}/{key}"] for key in ("loss", "coef", "intercept", "accuracy")}
        fit = solver.fit(strength)
        assert fit.converged
        np.testing.assert_allclose(fit.loss, golden["loss"], rtol=1e-6)
        if name == "binary":  # scikit-learn has one vector, the difference of the softmax weights
            weights, bias = (fit.weights[:, 1] - fit.weights[:, 0])[None], fit.bias[1:] - fit.bias[:1]
        else:
            weights, bias = fit.weights.T, fit.bias - fit.bias.mean() + golden["intercept"].mean()
        np.testing.assert_allclose(weights, golden["coef"], atol=3e-3)
        np.testing.assert_allclose(bias, golden["intercept"], atol=1e-2)
        ranks = fit.ranks(test_features, test_labels, mesh)
        assert classification_metrics(ranks, test_labels)["top1"] == golden["accuracy"]


def test_ranks_equal_those_of_sorted_logits():
    mesh = data_mesh()
    features, labels, test_features, test_labels = split("multinomial")
    fit = LogisticRegressionSolver(features, 10 * labels + 3, mesh).fit(1.0)
    order = np.argsort(-(test_features @ fit.weights + fit.bias), axis=1)
    expected = np.argmax(fit.classes[order] == (10 * test_labels + 3)[:, None], axis=1)
    np.testing.assert_array_equal(fit.ranks(test_features, 10 * test_labels + 3, mesh), expected)
    assert np.all(fit.ranks(test_features, 10 * test_labels + 4, mesh) > len(fit.classes))


def test_diverged_classifier_scores_zero():
    weights = np.full((4, 3), np.nan, np.float32)
    classifier = LinearClassifier(weights, np.zeros(3, np.float32), np.arange(3), regularization=1.0)
    ranks = classifier.ranks(np.ones((5, 4)), np.array([0, 1, 2, 0, 1]), data_mesh(jax.devices()[:1]))
    assert ranks.tolist() == [2] * 5


def test_probe_searches_on_the_validation_set_and_trains_on_all():
    features, labels, test_features, test_labels = split("multinomial")
    mesh = data_mesh(jax.devices()[:1])
    first, last = (features[:100], labels[:100]), (features[100:], labels[100:])
    probe = linear_probe(*first, test_features, test_labels, validation=last, max_iterations=8, mesh=mesh)
    best = max(probe.validation.values())
    assert probe.validation[probe.model.regularization] == best > 0.6
    assert len(probe.validation) >= 7
    strength = probe.model.regularization
    options = {"regularization": strength, "max_iterations": 8, "mesh": mesh}
    whole = linear_probe(features, labels, test_features, test_labels, **options)
    assert probe.metrics == whole.metrics and whole.validation == {}
    np.testing.assert_allclose(probe.model.weights, whole.model.weights, atol=1e-3)


def test_unlabeled_samples_are_ignored():
    features, labels, test_features, test_labels = split("multinomial")
    expected = linear_probe(features, labels, test_features, test_labels, regularization=1.0)
    more = np.concatenate([features, np.ones((5, features.shape[1]), np.float32)])
    probe = linear_probe(more, np.append(labels, [-1] * 5), test_features, test_labels, regularization=1.0)
    np.testing.assert_allclose(probe.model.weights, expected.model.weights, atol=1e-4)


def test_classification_metrics():
    ranks, labels = np.array([0, 0, 0, 1, 6]), np.array([2, 2, 2, 2, 7])
    assert classification_metrics(ranks, labels) == {"top1": 0.6, "top5": 0.8, "mean_per_class_recall": 0.375}


@pytest.mark.parametrize("peak", [0, 3, 41, 48, 96])
def test_binary_search_finds_the_peak_of_a_unimodal_function(peak):
    best, scores = binary_search(lambda strength: -abs(np.log10(strength) - (peak / 8 - 6)), REGULARIZATIONS)
    assert best == REGULARIZATIONS[peak]
    assert {1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6} <= set(np.round(list(scores), 12))
    assert len(scores) <= 7 + 4 * 2


def test_binary_search_prefers_the_later_of_equal_strengths():
    best, _ = binary_search(lambda strength: float(strength <= REGULARIZATIONS[50]), REGULARIZATIONS)
    assert best == REGULARIZATIONS[50]


def test_hold_out_takes_a_fifth_of_each_class():
    labels = np.repeat([0, 1, 2, 5], [20, 3, 1, 12])
    samples = LabeledFeatures(np.arange(len(labels), dtype=np.float32)[:, None], labels)
    train, validation = hold_out(samples, seed=0)
    assert np.bincount(validation.labels, minlength=6).tolist() == [4, 1, 0, 0, 0, 2]
    assert sorted([*train.features[:, 0], *validation.features[:, 0]]) == list(range(len(labels)))
    assert not np.array_equal(hold_out(samples, seed=1)[1].features, validation.features)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.zeros(8, np.int32)}, "two or more classes, got 1 class"),
        ({"train_labels": np.zeros(7, np.int32)}, "expected training features"),
        ({"test_labels": np.full(4, -1)}, "expected labeled test samples, got none among 4"),
        ({"test_features": np.full((4, 3), np.nan)}, "expected finite test features"),
        ({"test_features": np.ones((4, 2))}, "expected features of one width"),
        ({"validation": (np.ones((1, 2)), np.zeros(1, np.int32))}, "expected features of one width"),
        ({"metric": "map"}, "expected a metric of top1, mean_per_class_recall"),
        ({"max_iterations": 0}, "max_iterations >= 1"),
        ({"regularization": -1.0}, "expected a finite regularization >= 0"),
        ({"train_labels": np.arange(8), "regularization": None}, "two or more samples to hold one out"),
    ],
)
def test_bad_arguments(changes, message):
    arguments = {
        "train_features": np.ones((8, 3)),
        "train_labels": np.arange(8) % 2,
        "test_features": np.ones((4, 3)),
        "test_labels": np.zeros(4, np.int32),
        "regularization": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        linear_probe(**(arguments | changes))


FEATURES, LABELS = GOLDEN["multinomial/features"], GOLDEN["multinomial/labels"]
ADAMW_SPLITS = [slice(0, 150), slice(150, 190), slice(190, 240)]
ADAMW_TRAIN, VALIDATION, TEST = ((FEATURES[rows], LABELS[rows]) for rows in ADAMW_SPLITS)


@pytest.fixture
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax divides by beta ** step, an integer
        yield


@pytest.mark.usefixtures("promotion")
def test_training_equals_pytorch():
    start = {"weights": GOLDEN["adamw/start/weight"].T, "bias": GOLDEN["adamw/start/bias"]}
    decay = np.float32(GOLDEN["adamw/weight_decay"])
    params = train_adamw(start, ADAMW_TRAIN[0], ADAMW_TRAIN[1].astype(np.int32), GOLDEN["adamw/orders"], decay)
    np.testing.assert_allclose(params["weights"].T, GOLDEN["adamw/after/weight"], atol=1e-5)
    np.testing.assert_allclose(params["bias"], GOLDEN["adamw/after/bias"], atol=1e-5)


@pytest.mark.usefixtures("promotion")
def test_probe_searches_with_a_validation_set_only():
    mesh = data_mesh(jax.devices()[:2])
    probe = adamw_probe(*ADAMW_TRAIN, *TEST, validation=VALIDATION, epochs=1, mesh=mesh)
    best = max(probe.validation.values())
    assert probe.validation[probe.model.regularization] == best
    assert set(WEIGHT_DECAYS[::16]) <= set(probe.validation) <= set(WEIGHT_DECAYS)
    assert probe.metrics["top1"] > 0.5
    assert adamw_probe(*ADAMW_TRAIN, *TEST, epochs=1, mesh=mesh).model.regularization == 0


@pytest.mark.usefixtures("promotion")
def test_features_are_normalized_and_seeds_matter():
    mesh = data_mesh(jax.devices()[:1])
    probes = [
        adamw_probe(factor * ADAMW_TRAIN[0], ADAMW_TRAIN[1], *TEST, weight_decay=0.1, seed=seed, mesh=mesh)
        for factor, seed in [(1, 0), (4, 0), (1, 1)]
    ]
    first, scaled, other = (probe.model.weights for probe in probes)
    np.testing.assert_array_equal(scaled, first)
    assert np.abs(other - first).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"), [({"epochs": 0}, "epochs >= 1"), ({"weight_decay": -1.0}, "finite weight_decay >= 0")]
)
def test_bad_arguments_of_adamw(changes, message):
    with pytest.raises(ValueError, match=message):
        adamw_probe(*ADAMW_TRAIN, *TEST, **changes)
