"""Few-shot classification of frozen features."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from infcl_jax.evaluation.labeled import LabeledFeatures, check_strength, draw_order, labeled_samples
from infcl_jax.evaluation.linear_probe import METRICS, REGULARIZATIONS, search_strength
from infcl_jax.evaluation.logistic_regression import LogisticRegressionSolver
from infcl_jax.evaluation.metrics import classification_metrics
from infcl_jax.runtime.mesh import data_mesh

SHOTS = (1, 2, 4, 8, 16)  # CLIP, arXiv:2103.00020, figure 6
CLASSIFIERS = ("logistic", "ridge")

_MAX_VALIDATION = 4  # validation samples per class, as CoOp (Zhou et al. 2022, arXiv:2109.01134, section 4.1)
# Constants of big_vision's few-shot evaluator (evaluators/fewshot_lsr.py and its configs).
_RIDGE_REGULARIZATION = 1024.0
_RIDGE_BIAS = 100.0
_RIDGE_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class FewShot:
    """Result of few-shot classification.

    Examples:
      >>> result = FewShot(metrics={"1_shot": 0.31, "1_shot_std": 0.02}, draws={1: (0.29, 0.33)})
      >>> result.draws[1]
      (0.29, 0.33)

    Attributes:
      metrics: mean and standard deviation of the test results over the draws, as fractions, such as
        {"1_shot": 0.31, "1_shot_std": 0.02}. The deviation is the population's (ddof = 0).
      draws: test result of each draw, by number of shots.
    """

    metrics: Mapping[str, float]
    draws: Mapping[int, tuple[float, ...]]


def few_shot(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    *,
    shots: Sequence[int] = SHOTS,
    repeats: int = 3,
    classifier: str = "logistic",
    regularization: float | None = None,
    validation: tuple[np.ndarray, np.ndarray] | None = None,
    metric: str = "top1",
    seed: int = 0,
    mesh: Mesh | None = None,
) -> FewShot:
    """Train classifiers on k samples per class and test them.

    `logistic` is the linear probe of CLIP (Radford et al. 2021, arXiv:2103.00020, section 3.1.5). Without a given
    regularization, every classifier searches it as `linear_probe`. The search uses the validation set, or up to
    min(k, 4) other training samples of each class, which the classifier is not trained on.

    `ridge` is the closed-form least squares of big_vision (Beyer et al. 2022): features are standardized with the
    statistics of the k samples, targets are -1 and 1. It takes milliseconds, so that it can run during training.

    Draws are balanced and nested: the samples of k shots are among the samples of more shots in the same draw.

    Examples:
      >>> features, labels = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0), np.repeat(np.arange(3), 4)
      >>> result = few_shot(features, labels, features, labels, shots=(1, 2), repeats=2, classifier="ridge")
      >>> result.metrics["1_shot"]
      1.0

    Args:
      train_features: [N, D], any float dtype, the same on every process.
      train_labels: int [N]; samples with the label -1 are ignored.
      test_features: [n, D].
      test_labels: int [n], as `train_labels`. A class without training samples counts as a miss.
      shots: numbers of samples per class.
      repeats: number of draws, with the seeds `seed`, `seed + 1`, ...
      classifier: one of `CLASSIFIERS`.
      regularization: L2 strength lambda; None: searched for `logistic`, 1024 for `ridge`.
      validation: features and labels for the search of `logistic`.
      metric: test result and metric of the search, one of `linear_probe.METRICS`.
      seed: seed of the first draw.
      mesh: mesh with an axis "data"; None: all devices.

    Returns:
      Means, deviations and the result of each draw, the same on every process.

    Raises:
      ValueError: the shapes do not match, features are not finite, there are fewer than two classes, or a class has
        fewer samples than a number of shots; no samples are left for the search, or an argument is out of range.
    """
    mesh = data_mesh() if mesh is None else mesh
    samples = labeled_samples(train_features, train_labels, test_features, test_labels, validation)
    train, test, validation_set = samples
    check_strength(regularization, "regularization", positive=classifier == "ridge")
    check_options(shots, repeats, classifier)
    classes, counts = np.unique(train.labels, return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"expected training samples of two or more classes, got {len(classes)} class")
    if counts.min() < max(shots):
        raise ValueError(
            f"expected {max(shots)} training samples of every class, got {counts.min()} of class"
            f" {classes[counts.argmin()]}; use fewer shots"
        )
    if metric not in METRICS:
        raise ValueError(f"expected a metric of {', '.join(METRICS)}, got {metric!r}")
    if classifier == "ridge" and validation is not None:
        raise ValueError("expected no validation set for ridge, which searches no regularization; leave it out")

    def test_result(k: int, draw: int) -> float:
        position, _ = draw_order(train.labels, draw)
        drawn = train.take(position < k)
        strength = regularization
        if classifier == "ridge":
            ranks = _ridge_ranks(drawn, test, _RIDGE_REGULARIZATION if strength is None else strength)
            return classification_metrics(ranks, test.labels)[metric]
        solver = LogisticRegressionSolver(*drawn, mesh)
        if strength is None:
            others = (position >= k) & (position < k + min(k, _MAX_VALIDATION))
            if validation_set is None and not others.any():
                raise ValueError(
                    f"expected more than {k} samples of a class to search the regularization, got {k}; give a"
                    " regularization or a validation set"
                )
            held_out = train.take(others) if validation_set is None else validation_set
            strength, _ = search_strength(solver.fit, held_out, mesh, metric, REGULARIZATIONS)
        return classification_metrics(solver.fit(strength).ranks(*test, mesh), test.labels)[metric]

    draws = {k: tuple(test_result(k, seed + i) for i in range(repeats)) for k in shots}
    metrics: dict[str, float] = {}
    for k, results in draws.items():
        metrics |= {f"{k}_shot": float(np.mean(results)), f"{k}_shot_std": float(np.std(results))}
    return FewShot(metrics, draws)


def _ridge_ranks(train: LabeledFeatures, test: LabeledFeatures, strength: float) -> np.ndarray:
    """Rank the true classes of test samples by ridge regression to -1 and 1; see `LinearClassifier.ranks`."""
    mean, std = train.features.mean(axis=0, dtype=np.float64), train.features.std(axis=0, dtype=np.float64)

    def standardize(features: np.ndarray) -> np.ndarray:
        return np.pad((features - mean) / (std + _RIDGE_EPSILON), ((0, 0), (0, 1)), constant_values=_RIDGE_BIAS)

    classes, index = np.unique(train.labels, return_inverse=True)
    x, y = standardize(train.features), 2.0 * np.eye(len(classes))[index] - 1.0
    # The smaller of the two normal equations: N is at most 16 samples per class.
    if len(x) < x.shape[1]:
        weights = x.T @ np.linalg.solve(x @ x.T + strength * np.eye(len(x)), y)
    else:
        weights = np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y)
    scores = standardize(test.features) @ weights
    own_index = np.searchsorted(classes, test.labels).clip(max=len(classes) - 1)
    own = np.take_along_axis(scores, own_index[:, None], axis=1)
    return np.where(classes[own_index] == test.labels, (~(scores < own)).sum(axis=1) - 1, np.iinfo(np.int32).max)


def check_options(shots: Sequence[int], repeats: int, classifier: str) -> None:
    """Check options of `few_shot`."""
    if classifier not in CLASSIFIERS:
        raise ValueError(f"expected a classifier of {', '.join(CLASSIFIERS)}, got {classifier!r}")
    if not shots or min(shots) < 1 or repeats < 1:
        raise ValueError(f"expected shots >= 1 and repeats >= 1, got {tuple(shots)} and {repeats}")
