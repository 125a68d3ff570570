"""What the sources of files share: examples, messages and classes."""

import abc
import logging
from collections.abc import Callable, Mapping, Sequence

from infcl_jax.data.sources import captions
from infcl_jax.data.sources.base import Classes, Example, bad_record, check_index, format_counts
from infcl_jax.data.sources.files import check_size
from infcl_jax.data.sources.labels import prompts

_logger = logging.getLogger(__name__)


class FileSource(abc.ABC):
    """Base class of the sources that read files."""

    name: str  # of the dataset
    split: str
    captioned = True  # whether the captions are the data's own; otherwise they are prompts of the classes
    images_only = False  # whether the samples are images alone, without captions
    dropped: Mapping[str, int] = {}  # number of samples that are left out, by reason
    _classes: Classes | str  # or why there are none

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def _read(self, index: int) -> tuple[bytes, Sequence[str] | None, int]:
        """Read an encoded image, its captions, or None for the prompts of its class, and its label.

        It may raise any exception.
        """

    @abc.abstractmethod
    def _place(self, index: int) -> str:
        """Name the file and the key of a record."""

    def __getitem__(self, index: int) -> Example:
        check_index(index, len(self))
        try:
            image, texts, label = self._read(index)
            if texts is None and not self.images_only:
                texts = prompts(self.classes(), label)
            kept = () if self.images_only else tuple(filter(None, texts or ()))
            check_size(max(map(len, kept), default=0), captions.LARGEST, "a caption")
            if not (kept or self.images_only):
                raise ValueError("no caption")
            if not image:
                raise ValueError("the image is empty")
            return {"image": image, "caption": kept[0] if kept else "", "captions": kept, "label": label}
        except Exception as error:  # file systems and parsers raise any exception
            raise bad_record(self.describe(index), error) from error

    def describe(self, index: int) -> str:
        """Name a record by dataset, split, index, file and key."""
        return f"record {index} of {self.name}, split {self.split} ({self._place(index)})"

    def source_name(self, index: int) -> str:
        """Name the dataset of a record."""
        return self.name

    def classes(self) -> Classes:
        """Return the classes; raise `ValueError` if there are none, or they are damaged, saying what to add."""
        if isinstance(self._classes, str):
            raise ValueError(self._classes)
        return self._classes

    def _find_classes(self, find: Callable[[], Classes]) -> None:
        """Store the classes, or why there are none: training on captions does not need them."""
        try:
            if self.images_only:
                raise ValueError(f"{self.name} was opened without classes; leave out caption={captions.NONE}")
            self._classes = find()
        except ValueError as error:
            if not (self.captioned or self.images_only):
                raise
            self._classes = str(error)

    def _warn_dropped(self, hint: str = "") -> None:
        """Log how many samples there are and how many are left out, if any, followed by a hint."""
        if self.dropped:
            counts = format_counts(self.dropped)
            _logger.warning("%s: %d samples, dropped: %s%s", self.name, len(self), counts, hint)
