"""Zero-shot classification."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from infcl_jax.evaluation.metrics import accuracies
from infcl_jax.evaluation.retrieval import count_rivals, paired_similarity
from infcl_jax.inference.features import l2_normalize


def zero_shot_accuracy(
    image_features: np.ndarray,
    labels: np.ndarray,
    class_embeddings: np.ndarray,
    mesh: Mesh,
    topk: Sequence[int] = (1, 5),
) -> dict[str, float]:
    """Compute the top-k accuracy of zero-shot classification.

    Classes are ranked by the cosine similarity of their embeddings to the image (CLIP, arXiv:2103.00020, section 3.1).
    The first of tied classes wins, as in `argmax`: similarities within `TIE_TOLERANCE` are tied. Collapsed features
    therefore score the share of the first class, and non-finite features 0. A k that is at least the number of classes
    always gives 1.

    Examples:
      >>> features, classifier = np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)
      >>> zero_shot_accuracy(features, np.array([0, 1, 2, 0]), classifier, mesh, topk=(1,))
      {'top1': 0.75}

    Args:
        image_features: [N, D], any float dtype, the same on every process; need not be normalized.
        labels: int [N], classes in [0, C), or -1 for samples without a class, which are ignored.
        class_embeddings: [C, D], classifier vectors from `class_embeddings`.
        mesh: mesh with an axis "data".
        topk: cutoffs k, each >= 1.

    Returns:
        `{"top1": ..., "top5": ...}`, fractions in [0, 1] of the labeled samples.

    Raises:
        ValueError: the shapes do not match, a label is >= C or < -1, no sample is labeled, or a k is < 1.
    """
    if not topk or min(topk) < 1:
        raise ValueError(f"expected cutoffs topk >= 1, got {tuple(topk)}")
    return accuracies(class_ranks(image_features, labels, class_embeddings, mesh), topk)


def class_ranks(image_features: np.ndarray, labels: np.ndarray, class_embeddings: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Rank the class of each labeled image by cosine similarity.

    Args:
        image_features: [N, D], see `zero_shot_accuracy`.
        labels: int [N], classes in [0, C), or -1 for samples without a class, which are left out.
        class_embeddings: [C, D], classifier vectors from `class_embeddings`.
        mesh: mesh with an axis "data".

    Returns:
        int32 [labeled images], zero-based ranks: the number of other classes that are more similar to the image, or
        as similar with a lower label.

    Raises:
        ValueError: the shapes do not match, a label is >= C or < -1, or no sample is labeled.
    """
    labels = np.asarray(labels)
    _check(image_features, labels, class_embeddings)
    labeled = labels >= 0
    label = labels[labeled].astype(np.int32)
    image, classes = l2_normalize(image_features[labeled]), l2_normalize(class_embeddings)
    positive = paired_similarity(image, classes[label])
    rows = np.arange(len(classes), dtype=np.int32)
    return count_rivals(image, label, positive, classes, rows, mesh, first_wins=True)


def _check(image: np.ndarray, labels: np.ndarray, classes: np.ndarray) -> None:
    """Validate the arguments of `class_ranks`."""
    if image.ndim != 2 or classes.ndim != 2 or image.shape[1] != classes.shape[1] or 0 in classes.shape:
        raise ValueError(f"expected features [N, D] and class embeddings [C, D], got {image.shape} and {classes.shape}")
    if labels.shape != (len(image),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"expected integer labels of shape ({len(image)},), got {labels.dtype} {labels.shape}")
    if not np.any(labels >= 0):
        raise ValueError(f"expected labeled samples, got none among {len(labels)}; use a split that has classes")
    if labels.min() < -1 or labels.max() >= len(classes):
        raise ValueError(
            f"expected labels in [-1, {len(classes)}), got values in [{labels.min()}, {labels.max()}]; "
            "pass the class names of this source"
        )
