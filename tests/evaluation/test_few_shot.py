"""Balanced draws, closed-form ridge regression and means over draws."""

import sys

import numpy as np
import pytest

from infcl_jax.evaluation import few_shot, linear_probe
from infcl_jax.evaluation.few_shot import _ridge_ranks
from infcl_jax.evaluation.labeled import LabeledFeatures, draw_order

CLASSES, WIDTH = 3, 6


def samples(count, seed, noise=0.5):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    centers = np.random.default_rng(0).normal(size=(CLASSES, WIDTH))
    return (centers[labels] + noise * rng.normal(size=(count, WIDTH))).astype(np.float32), labels


def test_draws_are_balanced_nested_and_random():
    labels = np.random.default_rng(0).integers(0, 4, 80) * 7
    position, size = draw_order(labels, seed=0)
    for k in (1, 2, 5):
        assert np.bincount(labels[position < k])[::7].tolist() == [k] * 4
    assert np.all(size == np.bincount(labels)[labels])
    assert not np.array_equal(position, draw_order(labels, seed=1)[0])
    first = [np.flatnonzero((draw_order(labels, seed)[0] == 0) & (labels == 7))[0] for seed in range(40)]
    assert len(set(first)) > 10


@pytest.mark.parametrize("count", [6, 60])  # fewer and more samples than dimensions
def test_ridge_solves_the_normal_equations(count):
    train, test = samples(count, 1, noise=2), samples(50, 2, noise=2)
    mean, std = train[0].mean(axis=0), train[0].std(axis=0) + 1e-5
    x, x_test = (np.c_[(features - mean) / std, np.full(len(features), 100.0)] for features, _ in (train, test))
    y = np.where(train[1][:, None] == np.arange(CLASSES), 1.0, -1.0)
    weights = np.linalg.solve(x.T @ x + 10 * np.eye(WIDTH + 1), x.T @ y)
    order = np.argsort(-(x_test @ weights), axis=1)
    expected = np.argmax(order == test[1][:, None], axis=1)
    assert set(expected) == {0, 1, 2}
    ranks = _ridge_ranks(LabeledFeatures(*train), LabeledFeatures(*test), 10.0)
    np.testing.assert_array_equal(ranks, expected)


@pytest.mark.parametrize("classifier", ["logistic", "ridge"])
def test_metrics_are_means_over_draws(classifier):
    train, test = samples(60, 1, noise=1.5), samples(60, 2, noise=1.5)
    result = few_shot(*train, *test, shots=(1, 4), repeats=2, classifier=classifier, regularization=1.0)
    assert set(result.metrics) == {"1_shot", "1_shot_std", "4_shot", "4_shot_std"}
    for k, draws in result.draws.items():
        assert len(draws) == 2
        assert result.metrics[f"{k}_shot"] == np.mean(draws)
        assert result.metrics[f"{k}_shot_std"] == np.std(draws)
    assert result.metrics["1_shot"] < result.metrics["4_shot"]
    second = few_shot(*train, *test, shots=(1,), repeats=1, seed=1, classifier=classifier, regularization=1.0)
    assert second.draws[1] == (result.draws[1][1],)


def test_all_samples_are_the_linear_probe():
    train, test = samples(12, 1, noise=1.5), samples(60, 2, noise=1.5)
    result = few_shot(*train, *test, shots=(4,), repeats=1, regularization=1.0, metric="mean_per_class_recall")
    probe = linear_probe(*train, *test, regularization=1.0)
    assert result.draws[4] == (probe.metrics["mean_per_class_recall"],)


def test_search_uses_the_validation_set(monkeypatch):
    calls = []

    def search(fit, validation, mesh, metric, grid):
        calls.append((fit.__self__._samples, np.bincount(validation.labels).tolist()))
        return 1.0, {}

    monkeypatch.setattr(sys.modules["infcl_jax.evaluation.few_shot"], "search_strength", search)
    train, test = samples(60, 1), samples(12, 2)
    few_shot(*train, *test, shots=(2, 8), repeats=1)
    few_shot(*train, *test, shots=(2,), repeats=1, validation=test)
    assert calls == [(6, [2, 2, 2]), (24, [4, 4, 4]), (6, [4, 4, 4])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shots": (21,)}, "expected 21 training samples of every class, got 20 of class 0"),
        ({"shots": (0,)}, "shots >= 1"),
        ({"repeats": 0}, "repeats >= 1"),
        ({"classifier": "svm"}, "got 'svm'"),
        ({"shots": (20,)}, "more than 20 samples of a class"),
        ({"classifier": "ridge", "validation": samples(12, 2)}, "expected no validation set for ridge"),
        ({"regularization": -1.0}, "expected a finite regularization >= 0"),
        ({"classifier": "ridge", "regularization": 0.0}, "expected a finite regularization > 0"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        few_shot(*samples(60, 1), *samples(12, 2), **changes)
