"""Examples of predictions for a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from infcl_jax.data import Classes, Source
from infcl_jax.data.decode import decode_example
from infcl_jax.data.transforms import resize_center_crop
from infcl_jax.evaluation.features import Features, l2_normalize
from infcl_jax.evaluation.results import ExamplePrediction

_EXAMPLES = 12
_PREDICTED = 3  # texts of each example
_CANDIDATES = 512  # images among which mistakes are searched


def classification_examples(
    source: Source, features: Features, classes: Classes, classifier: np.ndarray, image_size: int
) -> tuple[ExamplePrediction, ...]:
    """Choose images with their most similar classes, mistakes first.

    Args:
      source: dataset of the images.
      features: features of the images.
      classes: class names.
      classifier: [C, D], classifier vectors.
      image_size: side of the shown images, in pixels.

    Returns:
      At most 12 examples: up to 6 mistakes, then correct predictions.
    """
    labeled = np.flatnonzero(features.label >= 0)
    rows = labeled[np.linspace(0, len(labeled) - 1, min(_CANDIDATES, len(labeled))).astype(int)]
    similarity = l2_normalize(features.image[rows]) @ classifier.T
    correct = similarity.argmax(axis=1) == features.label[rows]
    mistakes = np.flatnonzero(~correct)[: _EXAMPLES // 2]
    chosen = [*mistakes, *np.flatnonzero(correct)[: _EXAMPLES - len(mistakes)]]
    return tuple(
        _example(
            source,
            int(features.index[rows[i]]),
            (classes.names[features.label[rows[i]]],),
            similarity[i],
            classes.names.__getitem__,
            image_size,
        )
        for i in chosen
    )


def retrieval_examples(source: Source, features: Features, image_size: int) -> tuple[ExamplePrediction, ...]:
    """Choose images with their most similar captions.

    Args:
      source: dataset of the images and captions.
      features: features of the images and captions.
      image_size: side of the shown images, in pixels.

    Returns:
      At most 12 examples, evenly spaced over the dataset.
    """
    first = np.searchsorted(features.text_image, np.arange(len(features)))

    def caption(text: int) -> str:
        image = int(features.text_image[text])
        return source[int(features.index[image])]["captions"][text - first[image]]

    text = l2_normalize(features.text)
    chosen = np.unique(np.linspace(0, len(features) - 1, min(_EXAMPLES, len(features))).astype(int))
    return tuple(
        _example(
            source,
            int(features.index[row]),
            source[int(features.index[row])]["captions"],
            text @ l2_normalize(features.image[row]),
            caption,
            image_size,
        )
        for row in chosen
    )


def _example(
    source: Source,
    index: int,
    expected: Sequence[str],
    similarity: np.ndarray,
    text_of: Callable[[int], str],
    image_size: int,
) -> ExamplePrediction:
    best = np.argsort(-similarity, kind="stable")[:_PREDICTED]
    predicted = tuple(text_of(int(row)) for row in best)
    image = resize_center_crop(decode_example(source, index)["image"], image_size)
    scores = tuple(float(similarity[row]) for row in best)
    return ExamplePrediction(image, tuple(expected), predicted, scores, predicted[0] in expected)
