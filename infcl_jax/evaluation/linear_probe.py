"""Linear probes of frozen features by the protocols of CLIP and of clip_benchmark."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from infcl_jax.evaluation.labeled import LabeledFeatures, check_strength, draw_order, labeled_samples
from infcl_jax.evaluation.logistic_regression import (
    MAX_ITERATIONS,
    PADDING,
    TOLERANCE,
    LinearClassifier,
    LogisticRegressionSolver,
    cross_entropy,
)
from infcl_jax.evaluation.metrics import classification_metrics
from infcl_jax.inference.features import l2_normalize
from infcl_jax.runtime.mesh import data_mesh, replicate
from infcl_jax.runtime.processes import is_lead

METRICS = ("top1", "mean_per_class_recall")
# L2 strengths of CLIP (arXiv:2103.00020, appendix A.3): 8 steps per decade from 1e-6 to 1e6.
REGULARIZATIONS = tuple(np.logspace(-6, 6, 97).tolist())

# Constants of clip_benchmark 1.6.2's AdamW: metrics/linear_probe.py and the defaults of its command line.
EPOCHS = 10
WEIGHT_DECAYS = tuple(np.logspace(-6, 2, 97).tolist())
_LEARNING_RATE = 0.1
_BATCH_SIZE = 64

_FIRST_STRIDE = 16  # the search starts two decades apart
_HELD_OUT = 0.2  # share of the training set for validation; CLIP does not state one

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearProbe:
    """Result of a linear probe.

    Examples:
      >>> features, labels = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0), np.repeat(np.arange(3), 4)
      >>> probe = linear_probe(features, labels, features, labels, regularization=1e-2)
      >>> type(probe.model).__name__, probe.validation
      ('LogisticRegression', {})

    Attributes:
      metrics: test results as fractions: `top1`, `top5` and `mean_per_class_recall`.
      model: the fitted classifier.
      validation: validation result by L2 strength that the search tried; empty if the strength was given.
    """

    metrics: Mapping[str, float]
    model: LinearClassifier
    validation: Mapping[float, float]


def linear_probe(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    *,
    regularization: float | None = None,
    validation: tuple[np.ndarray, np.ndarray] | None = None,
    metric: str = "top1",
    max_iterations: int = MAX_ITERATIONS,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> LinearProbe:
    """Train a logistic regression on frozen features and test it.

    The protocol is CLIP's (Radford et al. 2021, arXiv:2103.00020, appendix A.3): L-BFGS with at most 1000
    iterations, and an L2 strength that is searched on a validation set, see `search_strength`. The final
    classifier is trained on training and validation set together. Features are used as given: CLIP probes features
    before the projection, clip_benchmark probes normalized embeddings.

    Examples:
      >>> features, labels = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0), np.repeat(np.arange(3), 4)
      >>> linear_probe(features, labels, features, labels, regularization=1e-2).metrics["top1"]
      1.0

    Args:
      train_features: [N, D], any float dtype, the same on every process.
      train_labels: int [N]; samples with the label -1 are ignored.
      test_features: [n, D].
      test_labels: int [n], as `train_labels`. A class without training samples counts as a miss.
      regularization: L2 strength lambda, the inverse of scikit-learn's C; None: search.
      validation: features and labels of a validation set; None: hold out a fifth of each training class.
      metric: metric of the search, one of `METRICS`.
      max_iterations: maximum number of L-BFGS iterations of each fit.
      tolerance: L-BFGS stops when no entry of the gradient of the mean loss is larger.
      seed: seed of the held-out samples.
      mesh: mesh with an axis "data"; None: all devices.

    Returns:
      Metrics, the classifier and the search, the same on every process.

    Raises:
      ValueError: the shapes do not match, features are not finite, there are fewer than two classes, or no test sample
        is labeled; an option is out of range, or no class has a second sample to hold out.
    """
    mesh = data_mesh() if mesh is None else mesh
    if metric not in METRICS:
        raise ValueError(f"expected a metric of {', '.join(METRICS)}, got {metric!r}")
    samples = labeled_samples(train_features, train_labels, test_features, test_labels, validation)
    train, test, validation_set = samples
    options: dict[str, Any] = {"max_iterations": max_iterations, "tolerance": tolerance}
    check_strength(regularization, "regularization")
    tried: dict[float, float] = {}
    if regularization is None:
        fit_set, held_out = hold_out(train, seed) if validation_set is None else (train, validation_set)
        fit = LogisticRegressionSolver(*fit_set, mesh, **options).fit
        regularization, tried = search_strength(fit, held_out, mesh, metric, REGULARIZATIONS)
    if validation_set is not None:
        train = train.join(validation_set)
    model = LogisticRegressionSolver(*train, mesh, **options).fit(regularization)
    if not model.converged and is_lead():
        _logger.warning("The linear probe stopped after max_iterations=%d before it converged.", max_iterations)
    return LinearProbe(classification_metrics(model.ranks(*test, mesh), test.labels), model, tried)


def adamw_probe(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    *,
    weight_decay: float | None = None,
    validation: tuple[np.ndarray, np.ndarray] | None = None,
    epochs: int = EPOCHS,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> LinearProbe:
    """Train a linear classifier on frozen features with AdamW and test it.

    The protocol is clip_benchmark's: normalized features, batches of 64, and a learning rate of 0.1 with cosine
    decay. A validation set chooses the weight decay from 1e-6 to 1e2 by the search of `linear_probe`. The final
    classifier is trained on training and validation set together. Initial weights and the order of the samples are
    random, so results agree with clip_benchmark's up to the noise of its seeds.

    Examples:
      >>> features, labels = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0), np.repeat(np.arange(3), 4)
      >>> adamw_probe(features, labels, features, labels, weight_decay=1e-4).metrics["top1"]
      1.0

    Args:
      train_features: [N, D], any float dtype, the same on every process.
      train_labels: int [N]; samples with the label -1 are ignored.
      test_features: [n, D].
      test_labels: int [n], as `train_labels`. A class without training samples counts as a miss.
      weight_decay: weight decay of AdamW; None: search with a validation set, 0 without, as clip_benchmark.
      validation: features and labels of a validation set.
      epochs: number of epochs of each training.
      seed: seed of initial weights and order.
      mesh: mesh with an axis "data"; None: all devices. Each device trains the same classifier.

    Returns:
      Metrics, the classifier and the search, the same on every process.

    Raises:
      ValueError: the shapes do not match, features are not finite, no test sample is labeled, or the weight decay or
        the number of epochs is out of range.
    """
    mesh = data_mesh() if mesh is None else mesh
    if epochs < 1:
        raise ValueError(f"expected epochs >= 1, got {epochs}")
    train, test, validation_set = (
        samples and samples._replace(features=l2_normalize(samples.features))
        for samples in labeled_samples(train_features, train_labels, test_features, test_labels, validation)
    )
    check_strength(weight_decay, "weight_decay")
    tried: dict[float, float] = {}
    if weight_decay is None and validation_set is not None:
        fit = functools.partial(_train_classifier, train, epochs, seed, mesh)
        # In descending order, because the smaller weight decay wins a tie in clip_benchmark.
        weight_decay, tried = search_strength(fit, validation_set, mesh, "top1", WEIGHT_DECAYS[::-1])
    if validation_set is not None:
        train = train.join(validation_set)
    model = _train_classifier(train, epochs, seed, mesh, weight_decay or 0.0)
    return LinearProbe(classification_metrics(model.ranks(*test, mesh), test.labels), model, tried)


def search_strength(
    fit: Callable[[float], LinearClassifier],
    validation: LabeledFeatures,
    mesh: Mesh,
    metric: str,
    grid: Sequence[float],
) -> tuple[float, dict[float, float]]:
    """Search the penalty with the best validation result in a grid.

    CLIP's parametric binary search (arXiv:2103.00020, appendix A.3) starts with every 16th of the 97 strengths and
    halves the interval around the peak. Of equal results, the later one of the grid wins.

    Returns:
      The best strength, and the validation result of every strength that was tried.
    """

    def score(strength: float) -> float:
        ranks = fit(strength).ranks(*validation, mesh)
        return classification_metrics(ranks, validation.labels)[metric]

    return binary_search(score, grid)


def binary_search(score: Callable[[float], float], grid: Sequence[float]) -> tuple[float, dict[float, float]]:
    """Maximize a unimodal function over 97 strengths by CLIP's parametric binary search.

    Returns:
      The best strength of those tried, the later one of equal scores, and the score of each.
    """
    scores: dict[int, float] = {}

    def best_of(candidates: range | tuple[int, ...]) -> int:
        for index in candidates:
            if index not in scores:
                scores[index] = score(grid[index])
        return max(candidates, key=lambda index: (scores[index], index))

    peak = best_of(range(0, len(grid), _FIRST_STRIDE))
    stride = _FIRST_STRIDE // 2
    while stride:
        peak = best_of((max(peak - stride, 0), peak, min(peak + stride, len(grid) - 1)))
        stride //= 2
    return grid[peak], {grid[index]: scores[index] for index in sorted(scores)}


def hold_out(samples: LabeledFeatures, seed: int) -> tuple[LabeledFeatures, LabeledFeatures]:
    """Split samples into training and validation: a fifth of each class, at least one of two or more samples."""
    position, size = draw_order(samples.labels, seed)
    held_out = position < np.maximum((_HELD_OUT * size).astype(np.int64), size > 1)
    if not held_out.any():
        raise ValueError(
            "expected a class with two or more samples to hold one out, got one sample per class; give a regularization"
        )
    return samples.take(~held_out), samples.take(held_out)


def _train_classifier(
    train: LabeledFeatures, epochs: int, seed: int, mesh: Mesh, weight_decay: float
) -> LinearClassifier:
    """Train with the initial weights and batches of a seed."""
    rng = np.random.default_rng(seed)
    classes, index = np.unique(train.labels, return_inverse=True)
    width = train.features.shape[1]
    bound = width**-0.5  # `torch.nn.Linear`
    start = {
        "weights": rng.uniform(-bound, bound, (width, len(classes))).astype(np.float32),
        "bias": rng.uniform(-bound, bound, len(classes)).astype(np.float32),
    }
    orders = np.stack([rng.permutation(len(index)) for _ in range(epochs)]).astype(np.int32)
    data = replicate(mesh, (start, train.features, index.astype(np.int32), orders))
    params = jax.device_get(train_adamw(*data, np.float32(weight_decay)))
    return LinearClassifier(params["weights"], params["bias"], classes, weight_decay)


@jax.jit
def train_adamw(
    start: dict[str, jax.Array], x: jax.Array, index: jax.Array, orders: jax.Array, weight_decay: jax.Array
) -> dict[str, jax.Array]:
    """Train a linear classifier with AdamW and cosine decay.

    Args:
      start: initial `weights` float32 [D, K] and `bias` float32 [K].
      x: float32 [N, D].
      index: int32 [N], class in [0, K).
      orders: int32 [epochs, N], order of the samples in each epoch.
      weight_decay: float32 scalar, applied to weights and bias.
    """
    padding = -orders.shape[1] % _BATCH_SIZE  # the last batch of an epoch is smaller
    batches = jnp.pad(orders, ((0, 0), (0, padding)), constant_values=PADDING).reshape(-1, _BATCH_SIZE)
    optimizer = optax.adamw(optax.cosine_decay_schedule(_LEARNING_RATE, len(batches)), weight_decay=weight_decay)

    def mean_loss(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
        labels = jnp.where(rows == PADDING, PADDING, index[rows])
        return cross_entropy(params, x[rows], labels) / jnp.sum(rows != PADDING).astype(jnp.float32)

    def step(carry: Any, rows: jax.Array) -> tuple[Any, None]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(mean_loss)(params, rows), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), batches)
    return params
