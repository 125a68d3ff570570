"""Random-access sources of captioned images."""

from infcl_jax.data.sources.api import SOURCES as SOURCES
from infcl_jax.data.sources.api import load_source as load_source
from infcl_jax.data.sources.base import BadRecordError as BadRecordError
from infcl_jax.data.sources.base import Classes as Classes
from infcl_jax.data.sources.base import Example as Example
from infcl_jax.data.sources.base import Source as Source
from infcl_jax.data.sources.base import classes as classes
from infcl_jax.data.sources.base import is_captioned as is_captioned
from infcl_jax.data.sources.base import record_key as record_key
from infcl_jax.data.sources.builtin import DIGITS as DIGITS
