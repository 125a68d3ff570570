"""Declaration of settings as fields of dataclasses: type, range, meaning and what may change them.

The layer below all configurations; it knows none of them.
"""

from infcl_jax.schema.setting import Range, Section, Setting, as_integer, is_a, setting, settings_of, type_name

__all__ = ["Range", "Section", "Setting", "as_integer", "is_a", "setting", "settings_of", "type_name"]
