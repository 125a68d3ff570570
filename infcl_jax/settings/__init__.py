"""Settings of a run: one tree, from which defaults, checks, help and documentation come."""

from infcl_jax.schema import Range, Setting, as_integer, type_name
from infcl_jax.settings.config import (
    AnyConfig,
    changed_settings,
    check_config,
    check_fixed,
    config_dict,
    default_config,
    flattened,
    format_changes,
    keep_recorded,
    make_config,
    name_changes,
    scaled_learning_rate,
    with_changes,
)
from infcl_jax.settings.consistency import total_steps, with_total_steps
from infcl_jax.settings.model_overrides import (
    check_model_overrides,
    model_changes,
    parse_overrides,
    precision_of_overrides,
    resolved_precision,
)
from infcl_jax.settings.names import closest_setting
from infcl_jax.settings.run_config import SETTINGS, InitConfig, RunConfig
from infcl_jax.settings.text import SECTIONS, format_entry, format_help, format_markdown, format_python

__all__ = [
    "SECTIONS",
    "SETTINGS",
    "AnyConfig",
    "InitConfig",
    "Range",
    "RunConfig",
    "Setting",
    "as_integer",
    "changed_settings",
    "check_config",
    "check_fixed",
    "check_model_overrides",
    "closest_setting",
    "config_dict",
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
    "precision_of_overrides",
    "resolved_precision",
    "scaled_learning_rate",
    "total_steps",
    "type_name",
    "with_changes",
    "with_total_steps",
]
