"""Work directory of a run: requirements and saved configuration."""

import json
import os
from pathlib import Path
from typing import Any

import jax

CONFIG_FILE = "config.json"


def prepare_workdir(workdir: str | os.PathLike[str]) -> Path:
    """Create the directory of the run and check that it is writable.

    Examples:
      >>> prepare_workdir("runs/new").is_dir()
      True

    Raises:
      ValueError: the directory is not writable; the message gives the reason.
    """
    workdir = Path(workdir)
    probe = workdir / f".writable-{jax.process_index()}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"cannot write to workdir {workdir} ({reason}); choose another --workdir") from error
    return workdir


def save_config(workdir: Path, config: dict[str, Any]) -> None:
    """Write the configuration of a run to `workdir/config.json`.

    An atomic rename replaces an earlier file. `experiments.evaluate` reads the configuration from there.

    Examples:
      >>> save_config(prepare_workdir("runs/saved"), {"dataset": "digits"})
      >>> load_config("runs/saved")
      {'dataset': 'digits'}
    """
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    temporary = workdir / f"{CONFIG_FILE}.new"
    temporary.write_text(text)
    temporary.replace(workdir / CONFIG_FILE)


def load_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the configuration that `save_config` wrote.

    Examples:
      >>> load_config("runs/digits")["model"]
      'tiny'

    Raises:
      FileNotFoundError: `workdir` contains no run.
      ValueError: the file is not JSON.
    """
    path = Path(workdir) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no run in {workdir} ({CONFIG_FILE} is missing); train one with this --workdir first")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"expected the configuration of a run in {path}, got no JSON ({error}); train again"
        ) from error
