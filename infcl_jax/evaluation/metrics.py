"""Metrics of classification, from the ranks or scores of the classes."""

from collections.abc import Collection, Sequence

import numpy as np


def accuracies(ranks: np.ndarray, topk: Sequence[int] = (1, 5)) -> dict[str, float]:
    """Compute `top1`, `top5` and so on, fractions in [0, 1], from the zero-based ranks of the true classes."""
    return {f"top{k}": float(np.mean(ranks < k)) for k in topk}


def classification_metrics(ranks: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Compute `top1`, `top5` and `mean_per_class_recall` from the zero-based ranks [N] of the true classes.

    The recall of a class is the fraction of its samples whose rank is 0. Classes without samples are left out of the
    mean, which equals scikit-learn's `balanced_accuracy_score`.
    """
    counts, hits = np.bincount(labels), np.bincount(labels, weights=ranks < 1)
    return accuracies(ranks) | {"mean_per_class_recall": float(np.mean(hits[counts > 0] / counts[counts > 0]))}


def macro_f1(hits: np.ndarray, predicted: np.ndarray, labels: np.ndarray) -> float:
    """Compute the mean F1 score of the classes that have images.

    This is the metric of iWildCam in WILDS (arXiv:2012.07421, section 4.1.1). All arguments are [N].
    """
    size = int(max(predicted.max(), labels.max())) + 1
    support = np.bincount(labels, minlength=size)
    hit_counts = np.bincount(labels, weights=hits, minlength=size)
    f1 = 2 * hit_counts / np.maximum(support + np.bincount(predicted, minlength=size), 1)
    return float(np.mean(f1[support > 0]))


def worst_group_accuracy(hits: np.ndarray, groups: np.ndarray, ignored: Collection[int] = ()) -> float:
    """Compute the lowest accuracy over the groups of images.

    This is the metric of FMoW in WILDS (arXiv:2012.07421, section 4.2.1) and of DataComp's fairness tasks.

    Args:
        hits: bool [N], whether an image is classified correctly.
        groups: int [N], group of each image, >= 0.
        ignored: groups that are left out.
    """
    counts = np.bincount(groups)
    kept = [group for group in np.flatnonzero(counts) if group not in ignored]
    if not kept:
        raise ValueError(f"expected images outside the groups {sorted(ignored)}, got none")
    hit_counts = np.bincount(groups, weights=hits)
    return float(min(hit_counts[group] / counts[group] for group in kept))


def mean_average_precision(scores: np.ndarray, targets: np.ndarray) -> float:
    """Compute the mean over the classes of the average precision of multi-label classification.

    The average precision of a class is the mean precision at the ranks of its images, all images sorted by score. This
    is the metric of Pascal VOC (Everingham et al. 2010, section 4.2) without interpolation, as in clip_benchmark. A
    class without images has the value 0. At equal scores, images without the class come first.

    Args:
        scores: float [N, C], similarity of image and class.
        targets: bool [N, C], whether an image has a class.
    """
    values = []
    for score, target in zip(scores.T, targets.T.astype(bool), strict=True):
        positive = target[np.lexsort((target, -score))]
        precision = np.cumsum(positive) / np.arange(1, len(positive) + 1)
        values.append(precision[positive].sum() / max(positive.sum(), 1))
    return float(np.mean(values))
