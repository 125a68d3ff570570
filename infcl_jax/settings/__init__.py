"""Settings of a run: one table, from which defaults, checks, help and documentation come."""

from infcl_jax.settings.config import (
    changed_settings,
    check_config,
    check_fixed,
    default_config,
    flattened,
    format_changes,
    make_config,
    name_changes,
    scaled_learning_rate,
    with_changes,
)
from infcl_jax.settings.length import total_steps, with_total_steps
from infcl_jax.settings.overrides import check_model_overrides, parse_overrides
from infcl_jax.settings.setting import Range, Setting, type_name
from infcl_jax.settings.table import SECTIONS, SETTINGS
from infcl_jax.settings.text import format_entry, format_help, format_markdown, format_python

__all__ = [
    "SECTIONS",
    "SETTINGS",
    "Range",
    "Setting",
    "changed_settings",
    "check_config",
    "check_fixed",
    "check_model_overrides",
    "default_config",
    "flattened",
    "format_changes",
    "format_entry",
    "format_help",
    "format_markdown",
    "format_python",
    "make_config",
    "name_changes",
    "parse_overrides",
    "scaled_learning_rate",
    "total_steps",
    "type_name",
    "with_changes",
    "with_total_steps",
]
