"""Common code of the commands: flags, configurations, devices and one-line error messages."""

import ast
import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import saved
from experiments import command_line
from infcl_jax.run import sample_source
from infcl_jax.runtime.exit_codes import RESUME, USER_ERRORS, Interrupted, ignore_stop
from infcl_jax.runtime.printable import printable
from infcl_jax.runtime.process_watch import failures
from infcl_jax.settings import (
    SETTINGS,
    RunConfig,
    as_integer,
    closest_setting,
    format_entry,
    format_help,
    format_python,
    make_config,
    type_name,
    with_total_steps,
)
from infcl_jax.training import load_config
from infcl_jax.training.compiled_step import OutOfMemory

# ml_collections parses the other types, bool and tuple.
_PARSERS: dict[Any, Any] = {str: flags.ArgumentParser(), int: flags.IntegerParser(), float: flags.FloatParser()}


class _SettingParser(flags.ArgumentParser):
    """Flag parser of single settings of one type, or of groups, that reads "None" as None."""

    def __init__(self, kind: type):
        self._kind = kind

    def parse(self, argument: Any) -> Any:
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
        return self._kind.__name__


for _kind in {setting.base_type for setting in SETTINGS.values()} & _PARSERS.keys() | {ConfigDict}:
    config_flags.register_flag_parser_for_type(_kind, _SettingParser(_kind))
_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file, such as configs/quickstart.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: checkpoints, metrics and plots.")
_PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Print the settings as a configuration file, and exit.")

_EXIT_SECONDS = 20  # for the exit handlers of an interrupted command
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")
_HELP = frozenset(("--help", "-help", "-h"))
_NO_WORKDIR = "expected --workdir, the directory of the run, got none"


def chosen_config() -> RunConfig:
    """Return the configuration of `--config` with its overrides."""
    if _CONFIG.value is None:
        raise ValueError("expected --config, a configuration such as configs/quickstart.py, got none")
    return make_config(_CONFIG.value.to_dict())  # raises the error of a file that cannot be loaded


def resolved_config() -> RunConfig:
    """Return the configuration of `--config` with the length of the run in `total_steps`."""
    config = chosen_config()
    return with_total_steps(config, sample_source(config))


def given_workdir() -> str:
    """Return the directory given as `--workdir`."""
    if not WORKDIR.value:
        raise ValueError(_NO_WORKDIR)
    return WORKDIR.value


def run(
    command: Callable[[], Any], *, saved_config: bool = False, config: Callable[[], RunConfig] = chosen_config
) -> None:
    """Parse the flags and call `command()`.

    User errors exit with status 1 and one line on stderr.

    Args:
      command: function without arguments.
      saved_config: use the run's saved configuration as the default of `--config`.
      config: function that returns the configuration for `--print_config`.
    """

    def report() -> None:
        with failures():
            print(format_python(config())) if _PRINT_CONFIG.value else _resumable(command)

    parser = functools.partial(_parse_flags, saved_config)
    command_line.run(report, parser=parser, user_errors=(*USER_ERRORS, OutOfMemory), message=_message)


def _resumable(command: Callable[[], Any]) -> None:
    """Call `command()` and print why it was interrupted; the exit status says that it can be resumed."""
    try:
        command()
    except Interrupted as interrupted:
        ignore_stop()  # a scheduler and a wrapper script may both deliver the same request
        print(printable(str(interrupted)), file=sys.stderr)
        # Exit handlers of JAX and orbax may wait for other processes and for file systems.
        timer = threading.Timer(_EXIT_SECONDS, os._exit, (RESUME,))
        timer.daemon = True
        timer.start()
        raise


def chosen_file_and_changes() -> tuple[str | None, dict[str, Any]]:
    """Return `--config=FILE`, None for the saved configuration, and the overrides `--config.NAME=VALUE`."""
    chosen_config()
    flag: Any = flags.FLAGS["config"]
    is_saved = str(flag.config_filename).startswith(f"{saved.__file__}:")
    return None if is_saved else flag.config_filename, dict(flag.override_values)


def _parse_flags(saved_config: bool, argv: list[str]) -> list[str]:
    """Parse the flags, with a one-line error for misspelled settings."""
    if not _HELP.isdisjoint(argv):
        print(_help())
        sys.exit(0)
    try:
        return flags.FLAGS(_with_saved_config(argv) if saved_config else argv)
    except (flags.Error, LookupError, AttributeError, TypeError, ValueError, OSError, ImportError) as error:
        sys.exit(_message(_name_error(argv) or error))


def _help() -> str:
    """Format the command's docstring, its flags and the table of settings."""
    entries = []
    for module in (sys.argv[0], __name__, command_line.__name__):  # absl names the main module by its path
        for flag in flags.FLAGS.get_flags_for_module(module):
            entries += format_entry(f"--{flag.name}", flag.default, flag.help)
    return "\n".join([(sys.modules["__main__"].__doc__ or "").strip(), "", "Flags:", *entries, "", format_help()])


def _with_saved_config(argv: list[str]) -> list[str]:
    """Add the run's saved configuration as the default of `--config`.

    Reads `--workdir` with a parser of its own, because parsing `--config` loads the file.
    """
    given = flags.FlagValues()
    for name in ("config", "workdir"):
        flags.DEFINE_string(name, None, "", flag_values=given)
    given(argv, known_only=True)
    workdir = given["workdir"].value
    if given["config"].value is not None or not (workdir or any(map(_OVERRIDE.match, argv))):
        return argv
    if not workdir:
        raise ValueError(_NO_WORKDIR)
    load_config(workdir)  # raises here, since ml_collections would wrap the error in its own
    return [argv[0], f"--config={saved.__file__}:{workdir}", *argv[1:]]


def _name_error(argv: list[str]) -> ValueError | None:
    """Return the error of an override that names no setting, if there is one.

    In `--config.seed.key`, `seed` is a single value, not a group. ml_collections would index it and report Python's
    error.
    """
    groups = {name.rpartition(".")[0] for name in SETTINGS}
    for name in [match[1] for match in map(_OVERRIDE.match, argv) if match]:
        parent = next((parent for parent in SETTINGS if name.startswith(f"{parent}.")), None)
        if parent is not None:
            return ValueError(f"no such setting: {name}; {parent} is a single value, set as --config.{parent}=...")
        if name not in SETTINGS and name not in groups and (close := closest_setting(name)):
            return ValueError(f"no such setting: {name}; did you mean --config.{close}? --help lists the settings")
    return None


def _message(error: Exception) -> str:
    """Format an error for the user: one line, except for a memory table."""
    text = str(error)
    if isinstance(error, OutOfMemory):
        return "\n".join(map(printable, f"error: {text}".split("\n")))  # keeps the lines of its memory table
    if isinstance(error, AttributeError | KeyError):
        name = _unquoted(text).removeprefix("no such setting: ")
        error = ValueError(f"no such setting: {name}{' ' if name.endswith('?') else '; '}--help lists the settings")
    elif "command line flag 'config." in text:  # absl defines config.* flags only after --config
        error = ValueError(f"{text}; give --config too, such as --config=configs/quickstart.py")
    elif isinstance(error.__cause__, OSError) and text.startswith("Configuration is not available"):
        reason = str(error.__cause__).splitlines()[-1]
        advice = "give a Python file with get_config(), such as those in configs/"
        error = ValueError(f"cannot load the --config file: {reason}; {advice}")
    elif "Error whilst parsing config file" in text:
        error = ValueError(f"cannot load the --config file: {text.splitlines()[-1]}")
    return command_line.one_line(error)


def _unquoted(text: str) -> str:
    """Strip the quotes of a `KeyError` message: a repr, or a repr of reprs."""
    while text[:1] in ("'", '"'):
        try:
            text = ast.literal_eval(text)
        except SyntaxError:
            break
    return text
