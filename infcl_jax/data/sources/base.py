"""Interface of the sources of captioned images, and their errors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypedDict, runtime_checkable

import grain
import numpy as np

_LONGEST_NAME = 300  # characters of a record's description in an error message


class Example(TypedDict):
    """Captioned image.

    Examples:
      >>> example = load_source("digits", "train")[0]
      >>> example["image"].dtype, example["caption"] in example["captions"]
      (dtype('uint8'), True)

    Attributes:
      image: encoded image file, or uint8 [H, W, 3]; see `infcl_jax.data.decode`.
      caption: first of `captions`, for the validation loss.
      captions: all captions, at least one, but none with the option "caption=none"; retrieval uses all of them.
      label: class index, -1 without class.
    """

    image: bytes | np.ndarray
    caption: str
    captions: tuple[str, ...]
    label: int


class Source(Protocol):
    """Random-access examples of one split, picklable for worker processes.

    The index of a sample never changes while the files of the source are the same. Optional members are

    - `describe(index) -> str` names a record by dataset, split, index, file and key, for messages;
    - `key(index) -> str` returns the name of a record, such as its path;
    - `shard(index) -> str` names the file of a record without reading it, since the disk may hang;
    - `source_name(index) -> str` names the dataset of a record, for counters and metrics;
    - `image_numbers() -> np.ndarray` numbers the different images of the samples, int64 [len], where several samples
      can have one image; it may read all images;
    - `dropped: Mapping[str, int]` counts the samples that are left out, by reason;
    - the members of `ClassifiedSource`, `BatchedSource` and `OrderedSource`.

    Examples:
      >>> class Squares:
      ...     name, split = "squares", "train"
      ...
      ...     def __len__(self):
      ...         return 10
      ...
      ...     def __getitem__(self, index):
      ...         pixels, caption = np.full((8, 8, 3), 20 * index, np.uint8), f"gray level {index}"
      ...         return {"image": pixels, "caption": caption, "captions": (caption,), "label": -1}
      >>> source: Source = Squares()
      >>> source[3]["caption"]
      'gray level 3'
    """

    name: str
    split: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example:
        """Read an example; raise `BadRecordError` if it cannot be read."""
        ...


@runtime_checkable
class BatchedSource(Source, Protocol):
    """Source that reads several examples at lower cost in one call."""

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Read examples; raise `BadRecordError` if any cannot be read."""
        ...


@runtime_checkable
class OrderedSource(Source, Protocol):
    """Source with its own training order."""

    def order(self, seed: int) -> grain.MapDataset:
        """Return the sample index of every global row, in an endless order."""
        ...

    def fingerprint(self) -> int:
        """Return a number that changes with the order."""
        ...


class Classes(NamedTuple):
    """Class names in label order and prompt templates for zero-shot classification.

    Each template contains one `{}` for the class name. Instead of templates, there can be the prompts of each class.

    Examples:
      >>> birds = Classes(names=("robin", "wren"), templates=("a photo of a {}, a bird.",))
      >>> birds.templates[0].format(birds.names[0])
      'a photo of a robin, a bird.'
      >>> own = Classes(names=("robin", "wren"), templates=(("a bird with a red breast",), ("a brown bird", "a wren")))
    """

    names: tuple[str, ...]
    templates: tuple[str, ...] | tuple[tuple[str, ...], ...]


class ClassifiedSource(Source, Protocol):
    """Source that can have classes.

    Attributes:
      captioned: whether the captions are the data's own; otherwise they are prompts of the classes.
    """

    captioned: bool

    def classes(self) -> Classes:
        """Return the classes; raise `ValueError` without any, saying what to add."""
        ...


class BadRecordError(ValueError):
    """Error for a record that cannot be read or decoded.

    The message names the dataset, the split and the index.

    Examples:
      >>> source = load_source("lost.csv", "train")  # a table whose second image is missing
      >>> try:
      ...     example = source[1]
      ... except BadRecordError as error:
      ...     print("left out:", error)
      left out: bad record 1 of lost.csv, split train (lost.csv, lost.jpg): FileNotFoundError: ...
    """


def describe(source: Source, index: int) -> str:
    """Name a record of a source for an error message."""
    own = getattr(source, "describe", None)
    return own(index) if own else f"record {index} of {source.name}, split {source.split}"


def record_key(source: Source, index: int) -> str:
    """Return the name of a record, or its index without names."""
    own = getattr(source, "key", None)
    return own(index) if own else str(index)


def shard_name(source: Source, index: int) -> str:
    """Name the file of a record without reading it; "" if the source does not know it."""
    own = getattr(source, "shard", None)
    return own(index) if own else ""


def source_name(source: Source, index: int) -> str:
    """Name the dataset of a record; components of a mixture have their own."""
    own = getattr(source, "source_name", None)
    return own(index) if own else source.name


def image_numbers(source: Source) -> np.ndarray:
    """Number the different images of a source; without numbers of its own, every sample has another image."""
    own = getattr(source, "image_numbers", None)
    return own() if own else np.arange(len(source))


def dropped_samples(source: Source) -> dict[str, int]:
    """Return the number of samples that a source leaves out, by reason."""
    return dict(getattr(source, "dropped", {}))


def classes(source: Source) -> Classes:
    """Get the classes of a source for zero-shot classification.

    Examples:
      >>> classes(load_source("digits", "zero_shot")).names[:3]
      ('zero', 'one', 'two')

    Raises:
      ValueError: the source has no classes; the message says what to add.
    """
    own = getattr(source, "classes", None)
    if own is None:
        raise ValueError(f"expected a dataset with classes, got {source.name}")
    return own()


def is_captioned(source: Source) -> bool:
    """Tell if a source has captions that are not prompts of its classes."""
    return getattr(source, "captioned", True)


def bad_record(record: str, error: Exception | str) -> BadRecordError:
    """Create the error of a record from its description and the reason."""
    if isinstance(error, Exception):
        error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return BadRecordError(f"bad {record[:_LONGEST_NAME]}: {error}")


def starts_of(sizes: Iterable[int]) -> np.ndarray:
    """Return the first index of each of n concatenated sequences of given sizes, then the total size: int64 [n + 1]."""
    return np.cumsum([0, *sizes])


def locate(starts: np.ndarray, index: int) -> tuple[int, int]:
    """Find the number of the sequence of an index, and the index within it; see `starts_of`."""
    number = int(np.searchsorted(starts, index, side="right")) - 1
    return number, index - int(starts[number])


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts, such as "3 no image, 1 no caption"."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def check_index(index: int, size: int) -> None:
    """Check that a sample index is in range; raise `IndexError` otherwise."""
    if not 0 <= index < size:
        raise IndexError(f"index must be in [0, {size}), got {index}")


def check_split(name: str, split: str, known: Sequence[str]) -> None:
    """Check that a dataset has a split."""
    if split not in known:
        raise ValueError(f"split of {name} must be one of {', '.join(known)}, got {split!r}")
