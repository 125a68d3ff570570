"""Linear probe by clip_benchmark's protocol, with AdamW."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from infcl_jax.evaluation.labeled import LabeledFeatures, check_strength, labeled_samples
from infcl_jax.evaluation.linear_probe import LinearProbe, binary_search
from infcl_jax.evaluation.logistic_regression import PADDING, LinearClassifier, cross_entropy
from infcl_jax.evaluation.metrics import classification_metrics
from infcl_jax.inference.features import l2_normalize
from infcl_jax.runtime.mesh import data_mesh, replicate

# Constants of clip_benchmark 1.6.2: metrics/linear_probe.py and the defaults of its command line.
EPOCHS = 10
WEIGHT_DECAYS = tuple(float(decay) for decay in np.logspace(-6, 2, 97))
_LEARNING_RATE = 0.1
_BATCH_SIZE = 64


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

    The protocol is that of clip_benchmark: normalized features, batches of 64, and a learning rate of 0.1 with cosine
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

        def score(decay: float) -> float:
            ranks = fit(decay).ranks(*validation_set, mesh)
            return classification_metrics(ranks, validation_set.labels)["top1"]

        # In descending order, because the smaller weight decay wins a tie in clip_benchmark.
        weight_decay, tried = binary_search(score, WEIGHT_DECAYS[::-1])
    if validation_set is not None:
        train = train.join(validation_set)
    model = _train_classifier(train, epochs, seed, mesh, weight_decay or 0.0)
    return LinearProbe(classification_metrics(model.ranks(*test, mesh), test.labels), model, tried)


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
