"""Work directory of a run: requirements and saved configuration."""

import json
import os
from pathlib import Path
from typing import Any

from infcl_jax.runtime.file_io import make_writable, read_json, replace_text

CONFIG_FILE = "config.json"


def prepare_workdir(workdir: str | os.PathLike[str]) -> Path:
    """Create the directory of the run and check that it is writable.

    Examples:
      >>> prepare_workdir("runs/new").is_dir()
      True

    Raises:
      ValueError: the directory is not writable; the message gives the reason.
    """
    try:
        return make_writable(Path(workdir))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"cannot write to workdir {workdir} ({reason}); choose another --workdir") from error


def save_config(workdir: Path, config: dict[str, Any]) -> None:
    """Write the configuration of a run to `workdir/config.json`.

    An atomic rename replaces an earlier file. `experiments.evaluate` reads the configuration from there.

    Examples:
      >>> save_config(prepare_workdir("runs/saved"), {"dataset": "digits"})
      >>> load_config("runs/saved")
      {'dataset': 'digits'}
    """
    replace_text(workdir / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the configuration that `save_config` wrote.

    Examples:
      >>> load_config("runs/digits")["model"]
      'tiny'

    Raises:
      FileNotFoundError: `workdir` contains no run.
      ValueError: the file is damaged.
    """
    try:
        return read_json(Path(workdir, CONFIG_FILE))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"no run in {workdir} ({CONFIG_FILE} is missing); train one with this --workdir first"
        ) from error
    except ValueError as error:
        raise ValueError(f"expected the configuration of a run in {workdir}: {error}; train again") from error
