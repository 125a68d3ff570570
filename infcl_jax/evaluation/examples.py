"""Examples of predictions for a report."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh

from infcl_jax.data import Classes, Source
from infcl_jax.data.decode import decode_example
from infcl_jax.data.sources import Example
from infcl_jax.evaluation.results import Confusion, ExamplePrediction
from infcl_jax.inference.features import Features
from infcl_jax.inference.search import top_k

Show = Callable[[Example], np.ndarray]  # from an example of a source to uint8 [S, S, 3]

_EXAMPLES = 12
_PREDICTED = 3  # texts of each example
_CONFUSIONS = 10  # pairs of classes
_CANDIDATES = 512  # images among which mistakes are searched


def classification_examples(
    source: Source, features: Features, classes: Classes, classifier: np.ndarray, mesh: Mesh, show: Show
) -> tuple[ExamplePrediction, ...]:
    """Choose images with their most similar classes, mistakes first.

    Args:
      source: dataset of the images.
      features: features of the images.
      classes: class names.
      classifier: [C, D], classifier vectors.
      mesh: mesh with an axis "data".
      show: decoder and transform of the images.

    Returns:
      At most 12 examples, mistakes first, and as many correct predictions if there are enough of both.
    """
    labeled = np.flatnonzero(features.label >= 0)
    rows = labeled[_spread(len(labeled), _CANDIDATES)]
    similarity, nearest = top_k(features.image[rows], classifier, min(_PREDICTED, len(classifier)), mesh)
    label = features.label[rows]
    correct = nearest[:, 0] == label
    mistakes, hits = np.flatnonzero(~correct), np.flatnonzero(correct)
    hits = hits[: max(_EXAMPLES // 2, _EXAMPLES - len(mistakes))]
    return tuple(
        ExamplePrediction(
            image=_image(source, features, rows[i], show),
            expected=(classes.names[label[i]],),
            predicted=tuple(classes.names[row] for row in nearest[i]),
            similarity=tuple(similarity[i].tolist()),
            correct=bool(correct[i]),
        )
        for i in (*mistakes[: _EXAMPLES - len(hits)], *hits)
    )


def most_confused(features: Features, classes: Classes, classifier: np.ndarray, mesh: Mesh) -> tuple[Confusion, ...]:
    """Count the most frequent pairs of true and predicted class.

    Args:
      features: features of the images.
      classes: class names.
      classifier: [C, D], classifier vectors.
      mesh: mesh with an axis "data".

    Returns:
      At most 10 pairs of different classes, the most frequent first.
    """
    labeled = features.label >= 0
    label, predicted = features.label[labeled], top_k(features.image[labeled], classifier, 1, mesh)[1][:, 0]
    wrong = label != predicted
    pairs = collections.Counter(zip(label[wrong].tolist(), predicted[wrong].tolist(), strict=True))
    return tuple(Confusion(classes.names[a], classes.names[b], n) for (a, b), n in pairs.most_common(_CONFUSIONS))


def retrieval_examples(source: Source, features: Features, mesh: Mesh, show: Show) -> tuple[ExamplePrediction, ...]:
    """Choose images with their most similar captions.

    Args:
      source: dataset of the images and captions.
      features: features of the images and captions.
      mesh: mesh with an axis "data".
      show: decoder and transform of the images.

    Returns:
      At most 12 examples, evenly spaced over the dataset.
    """
    rows = _spread(len(features), _EXAMPLES)
    similarity, nearest = top_k(features.image[rows], features.text, min(_PREDICTED, len(features.text)), mesh)
    first = np.searchsorted(features.text_image, np.arange(len(features)))

    def captions(row: int) -> tuple[str, ...]:
        return source[int(features.index[row])]["captions"]

    def caption(text: int) -> str:
        row = int(features.text_image[text])
        return captions(row)[text - int(first[row])]

    return tuple(
        ExamplePrediction(
            image=_image(source, features, row, show),
            expected=captions(row),
            predicted=tuple(caption(int(text)) for text in nearest[i]),
            similarity=tuple(similarity[i].tolist()),
            correct=bool(features.text_image[nearest[i, 0]] == row),
        )
        for i, row in enumerate(rows)
    )


def _spread(count: int, chosen: int) -> np.ndarray:
    """Choose evenly spaced rows among `count`."""
    return np.linspace(0, count - 1, min(chosen, count)).astype(int)


def _image(source: Source, features: Features, row: int, show: Show) -> np.ndarray:
    return decode_example(source, int(features.index[row]), to_image=show)["image"]
