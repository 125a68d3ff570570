"""Parsing of settings given as `--config.NAME=VALUE`."""

from typing import Any

from absl import flags
from ml_collections import ConfigDict

_PARSERS: dict[type, Any] = {str: flags.ArgumentParser(), int: flags.IntegerParser(), float: flags.FloatParser()}


class SettingParser(flags.ArgumentParser):
    """Flag parser of single settings, in which "None" means None."""

    def __init__(self, kind: type):
        """Takes the type of the settings: str, int, float or ConfigDict."""
        self._kind = kind

    def parse(self, argument: Any) -> Any:
        """The value of a command-line argument, or of a default.

        Raises:
          ValueError: text of another type, or a group.
        """
        if self._kind is not ConfigDict:
            return None if argument == "None" else _PARSERS[self._kind].parse(argument)
        if not isinstance(argument, ConfigDict):
            raise ValueError("expected single settings such as --config.optimizer.name=adamw, got a group of them")
        return argument

    def flag_type(self) -> str:
        """Name of the type, for the help text."""
        return self._kind.__name__
