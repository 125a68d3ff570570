"""What every command shares: configurations, devices, and mistakes reported in one line."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from ml_collections import ConfigDict, config_flags

from infcl_jax import distributed
from infcl_jax.planner import OutOfMemory

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file, such as configs/quickstart.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: checkpoints, metrics and pictures.")
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Show where an error comes from, not only what it says.")

# What a user can mend. Everything else is a defect and keeps its traceback.
_MISTAKES = (ValueError, OSError, ImportError, FloatingPointError, OutOfMemory)


def run(command: Callable[[str], Any]) -> None:
    """Parses the flags and calls `command(workdir)`; a mistake becomes one line on stderr and exit status 1."""

    def with_workdir() -> None:
        if not WORKDIR.value:
            raise ValueError("expected --workdir, the directory of the run, got none")
        command(WORKDIR.value)

    run_without_workdir(with_workdir)


def run_without_workdir(command: Callable[[], Any]) -> None:
    """As `run`, for a command that leaves nothing behind."""

    def main(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        try:
            if len(argv) > 1:
                raise ValueError(f"expected flags only (--name=value), got {' '.join(argv[1:])}")
            command()
        except _MISTAKES as error:
            if _TRACEBACK.value:
                raise
            sys.exit(_one_line(error))

    app.run(main, flags_parser=_parse_flags)


def chosen_config() -> ConfigDict:
    """The configuration of `--config`, with the changes of the command line.

    Raises:
      ValueError: there is none.
    """
    if _CONFIG.value is None:
        raise ValueError("expected --config, a configuration such as configs/quickstart.py, got none")
    return _CONFIG.value


def _parse_flags(argv: list[str]) -> list[str]:
    """absl's parser, with a misspelt configuration key reported as the usage error it is."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, ImportError) as error:
        sys.exit(_one_line(error))


def _one_line(error: Exception) -> str:
    """What a mistake says, in one line, with what to do where the library that noticed it does not know."""
    text, hint = str(error), ""
    if isinstance(error, OutOfMemory):
        return f"error: {text}"  # with a table
    if isinstance(error, AttributeError | KeyError):
        text, hint = f"no such setting: {_unquoted(text)}", "; the keys are in configs/base.py"
    elif "command line flag 'config." in text:  # absl knows these only after --config
        hint = "; give --config too, such as --config=configs/quickstart.py"
    elif isinstance(error.__cause__, OSError) and text.startswith("Configuration is not available"):
        text = f"cannot load the --config file: {str(error.__cause__).splitlines()[-1]}"
        hint = "; give a Python file with get_config(), such as those in configs/"
    return f"error: {' '.join(text.split())}{hint}"


def _unquoted(text: str) -> str:
    """The text of a KeyError, whose `str()` is a repr, or the repr of one."""
    while text[:1] in ("'", '"'):
        try:
            text = ast.literal_eval(text)
        except SyntaxError:
            break
    return text


def start_devices(config: ConfigDict) -> Mesh:
    """Joins the other processes, if any, and returns the mesh of all devices.

    Raises:
      ValueError: the batch size does not suit the devices, the cluster settings are incomplete, or JAX has started
        with another number of simulated devices.
      OSError: the folder of compiled programs cannot be made.
    """
    if config.cpu_devices > 1:
        _simulate_devices(config.cpu_devices)
    if folder := config.get("compilation_cache"):  # runs saved before it existed do not have it
        _keep_compiled(Path(folder).expanduser())
    distributed.initialize()
    mesh = distributed.data_mesh()
    for name, size in (("batch_size", config.batch_size), ("evaluation.batch_size", config.evaluation.batch_size)):
        if size < 1 or size % mesh.size:
            raise ValueError(f"expected {name} to be a multiple of the {mesh.size} devices, got {size}")
    return mesh


def _simulate_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ValueError(
            f"expected to set cpu_devices={count} before JAX is first used; restart this Python process (or notebook)"
        ) from error


def _keep_compiled(folder: Path) -> None:
    """Programs that took a second or more to compile are read from the folder from now on, or else written to it."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # without it, what JAX found at its first compilation would stand


def say(line: str) -> None:
    """Prints a line, on the leading process only."""
    if distributed.is_lead():
        print(line, flush=True)
