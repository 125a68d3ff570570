"""Metrics of a run on Weights & Biases."""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infcl_jax.runtime.file_io import replace_text
from infcl_jax.runtime.outputs import Outputs

_ID_FILE = Path("wandb", "run_id")  # in the work directory, so that a resumed run continues the same W&B run
_PROJECT = "infcl_jax"
_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")  # values of WANDB_MODE


class WandbRun:
    """Run on Weights & Biases, with the settings of the run as its configuration.

    A resumed run continues it. W&B never drops the steps that a resumed run repeats: it keeps the first value of a
    step. The repeated values are the same bit for bit, unless `config.resume` goes back to an earlier step. Such a run
    becomes a new run in the same group.

    W&B reads its environment variables: `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE=offline` and others. If it cannot
    be reached at the start, the run is recorded offline, for `wandb sync`.
    """

    def __init__(self, workdir: str | os.PathLike[str], settings: Mapping[str, Any], outputs: Outputs) -> None:
        """Start or continue the W&B run; its folder `wandb` in the work directory has W&B's files.

        Raises:
          ImportError: wandb is not installed.
          ValueError: W&B asks for a login.
        """
        wandb = _import_wandb()
        self._outputs, self._failed = outputs, False
        folder = Path(workdir).absolute()
        id_file = folder / _ID_FILE
        known = id_file.is_file() and settings.get("resume", "latest") == "latest"
        run_id = id_file.read_text(errors="replace").strip() if known else secrets.token_hex(4)
        arguments = {
            "project": os.environ.get("WANDB_PROJECT", _PROJECT),
            "group": folder.name,
            "name": folder.name,
            "id": run_id,
            "dir": str(folder),
            "config": dict(settings),
            "resume": "allow",
        }
        try:
            self._run = wandb.init(**arguments)
        except wandb.errors.UsageError as error:  # such as no API key
            raise _no_login(error) from error
        except wandb.errors.Error as error:  # such as an unreachable server
            outputs.say(f"warning: W&B: {_line(error)}; the run is recorded offline, upload it with wandb sync")
            wandb.teardown()  # forgets the failed attempt, which would still use the run's ID
            self._run = wandb.init(**arguments, mode="offline")

        def write_id() -> None:
            id_file.parent.mkdir(exist_ok=True)
            replace_text(id_file, run_id)

        outputs.attempt(id_file, write_id)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step."""

        def log() -> None:
            if step >= self._run.step:  # W&B would warn of each repeated step
                self._run.log(dict(scalars), step=step)

        self._attempt(log)

    def close(self, failed: bool = False) -> None:
        """Upload what waits and end the W&B run, which shows whether an error ends it."""
        self._attempt(lambda: self._run.finish(exit_code=int(failed)))

    def _attempt(self, call: Callable[[], object]) -> None:
        """Call W&B; the first error gives one line."""
        try:
            call()
        except Exception as error:  # a network, disk or W&B error must not end the training run
            if not self._failed:
                self._failed = True
                self._outputs.say(f"warning: W&B: {_line(error)}; the run continues")


def check_login() -> None:
    """Check that W&B has a login, unless it records offline.

    A terminal is asked for the API key. An unreachable server is no error, see `WandbRun`. Raises `ImportError` without
    wandb, and `ValueError` without a login.
    """
    wandb = _import_wandb()
    if os.environ.get("WANDB_MODE", "online") in _WITHOUT_LOGIN:
        return
    try:
        wandb.login()
    except (wandb.errors.UsageError, ValueError) as error:  # no API key, or a malformed one
        raise _no_login(error) from error
    except wandb.errors.Error:
        pass


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "expected wandb for the writer 'wandb', found none; pip install wandb, or remove it from writers"
        ) from error
    return wandb


def _no_login(error: Exception) -> ValueError:
    return ValueError(
        f"expected a login for the writer 'wandb', got: {_line(error)}; wandb login, or set WANDB_MODE=offline"
    )


def _line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())
