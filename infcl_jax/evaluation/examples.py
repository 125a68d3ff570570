"""Examples of predictions for a report."""

import collections
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from infcl_jax.data import Source
from infcl_jax.data.decode import decode_example
from infcl_jax.data.decode.api import ToImage
from infcl_jax.evaluation.results import Confusion, ExamplePrediction
from infcl_jax.inference.features import Features
from infcl_jax.inference.search import top_k

_EXAMPLES = 12
_PREDICTED = 3  # texts of each example
_CONFUSIONS = 10  # pairs of classes
_CANDIDATES = 512  # images among which mistakes are searched


def classification_examples(
    source: Source, features: Features, names: Sequence[str], classifier: np.ndarray, mesh: Mesh, show: ToImage
) -> tuple[tuple[ExamplePrediction, ...], tuple[Confusion, ...]]:
    """Choose images with their most similar classes, and count the most frequent confusions.

    Returns:
      At most 12 examples, mistakes first, and as many correct predictions if there are enough of both. At most 10 pairs
      of true and predicted class, the most frequent first.
    """
    rows = np.flatnonzero(features.label >= 0)
    similarity, nearest = top_k(features.image[rows], classifier, min(_PREDICTED, len(classifier)), mesh)
    label, wrong = features.label[rows], features.label[rows] != nearest[:, 0]
    pairs = collections.Counter(zip(label[wrong].tolist(), nearest[wrong, 0].tolist(), strict=True))
    candidates = spread(len(rows), _CANDIDATES)
    mistakes, hits = candidates[wrong[candidates]], candidates[~wrong[candidates]]
    hits = hits[: max(_EXAMPLES // 2, _EXAMPLES - len(mistakes))]
    examples = tuple(
        ExamplePrediction(
            image=_image(source, features, rows[i], show),
            expected=(names[label[i]],),
            predicted=tuple(names[row] for row in nearest[i]),
            similarity=tuple(similarity[i].tolist()),
            correct=not wrong[i],
        )
        for i in (*mistakes[: _EXAMPLES - len(hits)], *hits)
    )
    return examples, tuple(Confusion(names[a], names[b], n) for (a, b), n in pairs.most_common(_CONFUSIONS))


def retrieval_examples(source: Source, features: Features, mesh: Mesh, show: ToImage) -> tuple[ExamplePrediction, ...]:
    """Choose at most 12 images, evenly spaced over a dataset, with their most similar captions."""
    rows = spread(len(features), _EXAMPLES)
    similarity, nearest = top_k(features.image[rows], features.text, min(_PREDICTED, len(features.text)), mesh)
    owner, first = features.text_image, np.searchsorted(features.text_image, np.arange(len(features)))

    def captions(row: int) -> tuple[str, ...]:
        return source[int(features.index[row])]["captions"]

    return tuple(
        ExamplePrediction(
            image=_image(source, features, row, show),
            expected=captions(row),
            predicted=tuple(captions(owner[text])[text - first[owner[text]]] for text in nearest[i]),
            similarity=tuple(similarity[i].tolist()),
            correct=bool(owner[nearest[i, 0]] == row),
        )
        for i, row in enumerate(rows)
    )


def spread(count: int, chosen: int) -> np.ndarray:
    """Choose evenly spaced rows among `count`."""
    return np.linspace(0, count - 1, min(chosen, count)).astype(int)


def _image(source: Source, features: Features, row: int, show: ToImage) -> np.ndarray:
    return decode_example(source, int(features.index[row]), to_image=show)["image"]
