"""Random-access sources of captioned images."""

from infcl_jax.data.sources.api import SOURCES, load_source
from infcl_jax.data.sources.base import (
    BadRecordError,
    BatchedSource,
    Classes,
    Example,
    Source,
    classes,
    is_captioned,
    record_key,
)
from infcl_jax.data.sources.builtin import DIGITS
from infcl_jax.data.sources.tfds import BUILT_IN

__all__ = [
    "BUILT_IN",
    "DIGITS",
    "SOURCES",
    "BadRecordError",
    "BatchedSource",
    "Classes",
    "Example",
    "Source",
    "classes",
    "is_captioned",
    "load_source",
    "record_key",
]
