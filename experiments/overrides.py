"""Flag parser of settings given as `--config.NAME=VALUE`."""

from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from infcl_jax.settings import SETTINGS, as_integer, type_name

# ml_collections parses the other types, bool and tuple.
_PARSERS: dict[Any, Any] = {str: flags.ArgumentParser(), int: flags.IntegerParser(), float: flags.FloatParser()}


class SettingParser(flags.ArgumentParser):
    """Flag parser of single settings that reads "None" as None."""

    def __init__(self, kind: type):
        """Create a parser of settings of type str, int, float or ConfigDict."""
        self._kind = kind

    def parse(self, argument: Any) -> Any:
        """Parse a command-line argument or a default.

        Raises:
          ValueError: the text has another type, or the setting is a group.
        """
        if self._kind is ConfigDict:
            if not isinstance(argument, ConfigDict):
                raise ValueError("expected single settings such as --config.optimizer.name=adamw, got a group of them")
            return argument
        if argument == "None":
            return None
        try:
            if self._kind is int and "e" in str(argument).lower():
                argument = str(as_integer(float(argument)))  # 12.8e9
            return _PARSERS[self._kind].parse(argument)
        except ValueError as error:
            raise ValueError(f"expected {type_name(self._kind)}, got {argument!r}") from error

    def flag_type(self) -> str:
        """Return the type's name, for the help text."""
        return self._kind.__name__


def register_parsers() -> None:
    """Register the parsers of all types in the table of settings, and of groups."""
    for kind in {setting.base_type for setting in SETTINGS.values()} & _PARSERS.keys() | {ConfigDict}:
        config_flags.register_flag_parser_for_type(kind, SettingParser(kind))
