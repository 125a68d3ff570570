"""Labeled features for linear and few-shot classification."""

from typing import NamedTuple

import numpy as np


class LabeledFeatures(NamedTuple):
    """Features float32 [n, D] with their labels int64 [n]."""

    features: np.ndarray
    labels: np.ndarray

    def take(self, rows: np.ndarray) -> "LabeledFeatures":
        """Select rows by index or mask."""
        return LabeledFeatures(self.features[rows], self.labels[rows])

    def join(self, other: "LabeledFeatures") -> "LabeledFeatures":
        """Append other samples."""
        return LabeledFeatures(*map(np.concatenate, zip(self, other, strict=True)))


def labeled_samples(
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    validation: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[LabeledFeatures, LabeledFeatures, LabeledFeatures | None]:
    """Check the samples of a probe and drop those without a label.

    Returns:
      Training, test and validation samples; None without a validation set.

    Raises:
      ValueError: shapes or widths do not match, features are not finite, or no sample of a set is labeled.
    """
    train, test = _labeled(train_features, train_labels, "training"), _labeled(test_features, test_labels, "test")
    held_out = None if validation is None else _labeled(*validation, "validation")
    widths = [given.features.shape[1] for given in (train, test, held_out) if given is not None]
    if len(set(widths)) > 1:
        raise ValueError(f"expected features of one width, got {widths}; encode all splits with the same model")
    return train, test, held_out


def _labeled(features: np.ndarray, labels: np.ndarray, name: str) -> LabeledFeatures:
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


def check_strength(strength: float | None, name: str, *, positive: bool = False) -> None:
    """Check that a regularization strength, if it is given, is finite and >= 0, or > 0."""
    if strength is not None and not (0 <= strength < np.inf and (strength or not positive)):
        raise ValueError(f"expected a finite {name} {'> 0' if positive else '>= 0'}, got {strength}")


def draw_order(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the random position of each sample within its class, from 0, and the size of its class, int64 [n]."""
    order = np.random.default_rng(seed).permutation(len(labels))
    _, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    by_class = order[np.argsort(index[order], kind="stable")]
    position = np.empty(len(labels), np.int64)
    position[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return position, counts[index]
