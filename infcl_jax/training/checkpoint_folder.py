"""Folder of checkpoints: listing, choice of an intact one, and deletion of old ones."""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping

import orbax.checkpoint as ocp
from etils import epath

from infcl_jax.runtime.outputs import print_line
from infcl_jax.runtime.processes import is_lead, union
from infcl_jax.training.manifest import Verification, read_results, verify

CHECKPOINTS = "checkpoints"  # folder in the work directory
LATEST = "latest"  # resume from the newest intact checkpoint

Say = Callable[[str], None]


def print_on_lead(line: str) -> None:
    """Print a line, on the leading process only."""
    if is_lead():
        print_line(line)


@dataclasses.dataclass(frozen=True)
class Retention:
    """Checkpoints to keep.

    Attributes:
      latest: number of latest checkpoints.
      every: also keep steps that are multiples of this number; 0: none.
      best: also keep the step with the best value of this metric; None: none. Losses, whose names end in "loss", are
        best when low, all other metrics when high. NaN is never best.
    """

    latest: int = 2
    every: int = 0
    best: str | None = None

    def kept(self, results: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Select the steps to keep, from the evaluation results of all steps."""
        steps = sorted(results)
        kept = set(steps[-self.latest :]) | {step for step in steps if self.every and step % self.every == 0}
        values = {step: results[step].get(self.best, math.nan) for step in steps}
        values = {step: value for step, value in values.items() if not math.isnan(value)}
        if values:
            sign = -1 if self.best.endswith("loss") else 1
            kept.add(max(values, key=lambda step: (sign * values[step], step)))
        return kept


class CheckpointFolder:
    """Checkpoints `STEP/` of a run, on a file system or in an object store.

    All processes must call the methods `steps` and `intact_step` together.
    """

    def __init__(self, path: epath.PathLike, say: Say):
        """Open a folder, which may not exist yet; `say` prints a line about a damaged checkpoint."""
        text = os.fspath(path)
        self.path = epath.Path(text) if "://" in text else epath.Path(text).absolute()
        self._say = say
        self._verified: dict[int, Verification] = {}

    def steps(self) -> list[int]:
        """List the steps of all checkpoints, damaged ones included, in ascending order."""
        return union(self._local_steps())

    def intact_step(self, step: int | None = None) -> int | None:
        """Choose the newest intact checkpoint, or check the given step; None without any checkpoint.

        Prints a line for each damaged checkpoint. Raises `ValueError` if all are damaged, but returns None for a single
        incomplete one: old ones are deleted after newer saves have ended, so the run was killed during its first save.
        """
        steps = self.steps() if step is None else [step]
        for number in reversed(steps):
            known = number in self._verified
            verification = self._verified[number] = self._verified.get(number) or verify(self.path / str(number))
            if verification.damage is None:
                if not verification.checked and not known:
                    self._say(f"checkpoint {number} in {self.path} is of an earlier version and has no checksums")
                return number
            if not known:
                self._say(f"checkpoint {number} in {self.path} is damaged: {verification.damage}")
        if not steps or (step is None and len(steps) == 1 and not self._verified[steps[0]].complete):
            return None
        damages = "; ".join(f"{number}: {self._verified[number].damage}" for number in reversed(steps))
        raise ValueError(
            f"expected an intact checkpoint in {self.path}, got damaged ones ({damages}); restore a copy, resume from "
            "another step, or choose another --workdir"
        )

    def trust(self, step: int) -> None:
        """Count a checkpoint of this process as intact."""
        self._verified[step] = Verification(None, True)

    def prepare(self, restored: int | None) -> None:
        """Prepare the folder for the first save, after a restore of `restored`. Only one process may call this.

        Deletes what interrupted saves left. Renames damaged checkpoints and those of an abandoned future, so that they
        neither block later saves nor count as the latest. Also renames files in the place of a checkpoint.
        """
        for path in self.path.iterdir():
            if ocp.utils.TMP_DIR_SUFFIX in path.name:
                _delete(path)
            elif (step := step_of(path.name)) is not None and not path.is_dir():
                self._set_aside(step, "foreign")
        for step in self._local_steps():
            verification = self._verified.get(step)
            if verification is not None and verification.damage:
                self._set_aside(step, "damaged")
            elif restored is not None and step > restored:
                self._set_aside(step, "superseded")

    def delete_failed(self, step: int) -> None:
        """Delete the incomplete checkpoint of a failed save. Only one process may call this."""
        for path in self.path.iterdir():
            if path.name == str(step) or path.name.startswith(f"{step}{ocp.utils.TMP_DIR_SUFFIX}"):
                _delete(path)

    def delete_old(self, retention: Retention) -> None:
        """Delete the checkpoints that `retention` does not keep. Only one process may call this."""
        results = {step: read_results(self.path / str(step)) for step in self._local_steps()}
        for step in results.keys() - retention.kept(results):
            _delete(self.path / str(step))

    def _set_aside(self, step: int, suffix: str) -> None:
        """Rename a checkpoint to `STEP.suffix`, with a number if that exists."""
        names = (f"{step}.{suffix}{number or ''}" for number in itertools.count())
        (self.path / str(step)).rename(next(target for name in names if not (target := self.path / name).exists()))

    def _local_steps(self) -> list[int]:
        if not self.path.exists():
            return []
        steps = ((path, step_of(path.name)) for path in self.path.iterdir())
        return sorted(step for path, step in steps if step is not None and path.is_dir())


def _delete(path: epath.Path) -> None:
    """Delete a folder, a file, or a link but not its target."""
    if path.is_dir() and not os.path.islink(path):
        path.rmtree()
    else:
        path.unlink()


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder; None for other names, such as "007"."""
    if name.isascii() and name.isdecimal() and str(int(name)) == name and int(name) < 2**63:
        return int(name)
    return None


def split_checkpoint(path: epath.PathLike) -> tuple[epath.Path, int | None]:
    """Split a path into a folder of checkpoints and a step; None: the latest.

    The path is a work directory, its folder of checkpoints, or one checkpoint.
    """
    given = epath.Path(path)
    step = step_of(given.name)
    if step is not None:
        return given.parent, step
    return (given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given), None
