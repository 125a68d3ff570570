"""Ranges of the samples of a source, and images with all their captions."""

from __future__ import annotations

import numpy as np

from infcl_jax.data.sources.base import (
    Classes,
    DroppingSource,
    Example,
    RepeatingSource,
    Source,
    check_index,
    classes,
    describe,
    is_captioned,
    record_key,
    shard_name,
    source_name,
)


class SampleRange:
    """Samples [start, stop) of a source.

    Args:
      source: source of the samples.
      start: first sample.
      stop: sample after the last one.
      split: name of the range.
    """

    def __init__(self, source: Source, start: int, stop: int, split: str):
        self.name, self.split = source.name, split
        self.captioned = is_captioned(source)
        self._source, self._start, self._size = source, start, stop - start

    @property
    def dropped(self) -> dict[str, int]:
        """Number of samples that the whole source leaves out, by reason."""
        return dict(self._source.dropped) if isinstance(self._source, DroppingSource) else {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        return self._source[self._row(index)]

    def _row(self, index: int) -> int:
        """Return the index in the underlying source."""
        check_index(index, len(self))
        return self._start + index

    def image_numbers(self) -> np.ndarray:
        """Number the different images of the samples, see `RepeatingSource`."""
        return image_numbers(self._source)[self._start : self._start + self._size]

    def classes(self) -> Classes:
        """Return the classes of the underlying source."""
        return classes(self._source)

    def key(self, index: int) -> str:
        """Return the name of a record in the underlying source."""
        return record_key(self._source, self._row(index))

    def describe(self, index: int) -> str:
        """Name a record of the underlying source."""
        return describe(self._source, self._row(index))

    def shard(self, index: int) -> str:
        """Name the file of a record."""
        return shard_name(self._source, self._row(index))

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return source_name(self._source, self._row(index))


class CaptionedImages(SampleRange):
    """Images of a source, each with the captions of all its samples.

    An image has the name and label of its first sample. It is a bad record if any of its samples is.

    Args:
      source: source of the samples.
      images: int [len(source)], number of the image of each sample.
    """

    def __init__(self, source: Source, images: np.ndarray):
        _, first, number = np.unique(images, return_index=True, return_inverse=True)
        super().__init__(source, 0, len(first), source.split)
        order = np.argsort(first[number], kind="stable")  # by the first sample of each image
        self._rows = np.split(order, np.cumsum(np.bincount(number)[np.argsort(first)])[:-1])

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        samples = [self._source[row] for row in self._rows[index].tolist()]
        return {**samples[0], "captions": tuple(caption for sample in samples for caption in sample["captions"])}

    def _row(self, index: int) -> int:
        check_index(index, len(self))
        return int(self._rows[index][0])


def image_numbers(source: Source) -> np.ndarray:
    """Number the different images of a source.

    Every sample of another source than `RepeatingSource` is a different image.
    """
    return source.image_numbers() if isinstance(source, RepeatingSource) else np.arange(len(source))


def by_image(source: Source) -> Source:
    """Join the samples of each image; returns the source itself if no image repeats."""
    images = image_numbers(source)
    return source if len(np.unique(images)) == len(images) else CaptionedImages(source, images)
