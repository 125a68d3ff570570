"""Flag parser of settings given as `--config.NAME=VALUE`."""

from typing import Any

from absl import flags
from ml_collections import ConfigDict

_PARSERS: dict[type, Any] = {str: flags.ArgumentParser(), int: flags.IntegerParser(), float: flags.FloatParser()}


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
        if self._kind is not ConfigDict:
            return None if argument == "None" else _PARSERS[self._kind].parse(argument)
        if not isinstance(argument, ConfigDict):
            raise ValueError("expected single settings such as --config.optimizer.name=adamw, got a group of them")
        return argument

    def flag_type(self) -> str:
        """Return the type's name, for the help text."""
        return self._kind.__name__
