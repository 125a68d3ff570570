"""Settings of a run: one table, from which defaults, checks, help and documentation come."""

from infcl_jax.settings.config import (
    changed_settings,
    check_config,
    check_fixed,
    default_config,
    flattened,
    format_changes,
    keep_recorded,
    make_config,
    name_changes,
    scaled_learning_rate,
    with_changes,
)
from infcl_jax.settings.length import total_steps, with_total_steps
from infcl_jax.settings.names import closest_setting
from infcl_jax.settings.overrides import check_model_overrides, parse_overrides
from infcl_jax.settings.precision import model_changes, resolved_precision, without_contradiction
from infcl_jax.settings.setting import Range, Setting, as_integer, type_name
from infcl_jax.settings.table import SECTIONS, SETTINGS
from infcl_jax.settings.text import format_entry, format_help, format_markdown, format_python

__all__ = [
    "SECTIONS",
    "SETTINGS",
    "Range",
    "Setting",
    "as_integer",
    "changed_settings",
    "check_config",
    "check_fixed",
    "check_model_overrides",
    "closest_setting",
    "default_config",
    "flattened",
    "format_changes",
    "format_entry",
    "format_help",
    "format_markdown",
    "format_python",
    "keep_recorded",
    "make_config",
    "model_changes",
    "name_changes",
    "parse_overrides",
    "resolved_precision",
    "scaled_learning_rate",
    "total_steps",
    "type_name",
    "with_changes",
    "with_total_steps",
    "without_contradiction",
]
