"""Sources with the samples of other sources: ranges, and images with all their captions."""

import abc

import numpy as np

from infcl_jax.data.sources.base import (
    Classes,
    Example,
    Source,
    check_index,
    classes,
    describe,
    dropped_samples,
    image_numbers,
    is_captioned,
    record_key,
    shard_name,
    source_name,
)


class SourceView(abc.ABC):
    """Base class of sources with the samples and names of other sources."""

    name: str
    split: str

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def locate(self, index: int) -> tuple[Source, int]:
        """Return the source of a sample and the index within it; raise `IndexError` if there is no such sample."""

    def __getitem__(self, index: int) -> Example:
        source, row = self.locate(index)
        return source[row]

    def key(self, index: int) -> str:
        """Return the name of a record in its source."""
        return record_key(*self.locate(index))

    def describe(self, index: int) -> str:
        """Name a record by its source's description."""
        return describe(*self.locate(index))

    def shard(self, index: int) -> str:
        """Name the file of a record."""
        return shard_name(*self.locate(index))

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return source_name(*self.locate(index))


class SampleRange(SourceView):
    """Samples [start, stop) of a source, as the split `split`.

    Attributes:
      dropped: number of samples that the whole source leaves out, by reason.
    """

    def __init__(self, source: Source, start: int, stop: int, split: str):
        self.name, self.split = source.name, split
        self.captioned, self.dropped = is_captioned(source), dropped_samples(source)
        self._source, self._start, self._size = source, start, stop - start

    def __len__(self) -> int:
        return self._size

    def locate(self, index: int) -> tuple[Source, int]:
        """Return the underlying source and the index within it."""
        check_index(index, len(self))
        return self._source, self._start + index

    def image_numbers(self) -> np.ndarray:
        """Number the different images of the samples."""
        return image_numbers(self._source)[self._start : self._start + self._size]

    def classes(self) -> Classes:
        """Return the classes of the underlying source."""
        return classes(self._source)


class CaptionedImages(SampleRange):
    """Images of a source, each with the captions of all its samples.

    An image has the name and label of its first sample. It is a bad record if any of its samples is. `images` has the
    number of the image of each sample, int [len(source)].
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

    def locate(self, index: int) -> tuple[Source, int]:
        """Return the underlying source and the first sample of an image."""
        check_index(index, len(self))
        return self._source, int(self._rows[index][0])


def by_image(source: Source) -> Source:
    """Join the samples of each image; returns the source itself if no image repeats."""
    images = image_numbers(source)
    return source if len(np.unique(images)) == len(images) else CaptionedImages(source, images)
