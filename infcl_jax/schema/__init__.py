"""Declaration of settings as fields of dataclasses: type, range, meaning and what may change them.

The layer below all configurations; it knows none of them.
"""

from infcl_jax.schema.setting import Range as Range
from infcl_jax.schema.setting import Section as Section
from infcl_jax.schema.setting import Setting as Setting
from infcl_jax.schema.setting import as_integer as as_integer
from infcl_jax.schema.setting import is_a as is_a
from infcl_jax.schema.setting import setting as setting
from infcl_jax.schema.setting import settings_of as settings_of
from infcl_jax.schema.setting import type_name as type_name
