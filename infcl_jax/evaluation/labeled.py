"""Labeled features for linear and few-shot classification."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infcl_jax.evaluation.metrics import accuracies, mean_per_class_recall


class LabeledFeatures(NamedTuple):
    """Features with labels.

    Attributes:
      features: float32 [n, D].
      labels: int64 [n].
    """

    features: np.ndarray
    labels: np.ndarray

    def take(self, rows: np.ndarray) -> LabeledFeatures:
        """Select rows by index or mask."""
        return LabeledFeatures(self.features[rows], self.labels[rows])

    def join(self, other: LabeledFeatures) -> LabeledFeatures:
        """Append other samples."""
        pairs = zip(self, other, strict=True)
        return LabeledFeatures(*(np.concatenate(pair) for pair in pairs))


def labeled_features(features: np.ndarray, labels: np.ndarray, name: str) -> LabeledFeatures:
    """Check samples and drop those without a label.

    Args:
      features: [n, D], any float dtype.
      labels: int [n], -1 without label.
      name: name of the samples, for messages.

    Returns:
      The labeled samples.

    Raises:
      ValueError: the shapes do not match, features are not finite, or no sample is labeled.
    """
    features, labels = np.asarray(features, np.float32), np.asarray(labels)
    if features.ndim != 2 or labels.shape != features.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"expected {name} features [n, D] and integer labels [n], got {features.shape} and {labels.dtype}"
            f" {labels.shape}"
        )
    if not np.isfinite(features).all():
        raise ValueError(f"expected finite {name} features, got NaN or infinity; check the encoder")
    if not (labels >= 0).any():
        raise ValueError(f"expected labeled {name} samples, got none among {len(labels)}; use a split with classes")
    return LabeledFeatures(features, labels.astype(np.int64)).take(labels >= 0)


def check_widths(*samples: LabeledFeatures | None) -> None:
    """Check that the features of all samples have one width.

    Raises:
      ValueError: they differ.
    """
    widths = [given.features.shape[1] for given in samples if given is not None]
    if len(set(widths)) > 1:
        raise ValueError(f"expected features of one width, got {widths}; encode all splits with the same model")


def check_strength(strength: float | None, name: str, *, positive: bool = False) -> None:
    """Check a regularization strength, if it is given.

    Raises:
      ValueError: the strength is negative or not finite, or zero where it must be positive.
    """
    if strength is not None and not (0 <= strength < np.inf and (strength or not positive)):
        raise ValueError(f"expected a finite {name} {'> 0' if positive else '>= 0'}, got {strength}")


def draw_order(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle the samples of each class.

    Args:
      labels: int [n].
      seed: seed of the order.

    Returns:
      int64 [n], random position of each sample within its class, from 0; and int64 [n], the size of its class.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    _, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    by_class = order[np.argsort(index[order], kind="stable")]
    position = np.empty(len(labels), np.int64)
    position[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return position, counts[index]


def classification_metrics(ranks: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Compute the metrics of a classifier from the ranks of the true classes.

    Args:
      ranks: int [n], rank of the true class; 0 is a correct prediction.
      labels: int [n].

    Returns:
      `top1`, `top5` and `mean_per_class_recall`, as fractions.
    """
    return accuracies(ranks) | {"mean_per_class_recall": mean_per_class_recall(ranks < 1, labels)}
