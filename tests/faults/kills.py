"""Kill training runs at random moments, and compare their ends bit for bit.

    python -m tests.faults.kills --count=50 [--seed=0]

Every run is killed with SIGKILL several times on its way. Half of the moments are uniform over the life of an
undisturbed run. The others follow the begin of a random phase, since restore and data indexing are short. At the end,
metrics, state and data position equal those of the undisturbed run. Of several processes, one random rank is killed
first, and the others up to two seconds later, as a scheduler does. No worker may outlive its process.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from infcl_jax import run
from infcl_jax.runtime.mesh import data_mesh
from infcl_jax.training import Checkpointer
from tests import captioned, runs
from tests.faults import phases

STEPS, CHECKPOINT_EVERY, EVAL_EVERY = 60, 5, 20
MOST_KILLS = 6  # of one run, so that every run ends
LIMIT = 300  # seconds of one process, on a busy machine
ORPHAN_SECONDS = 30.0  # a worker may be starting, on a busy machine
MARKER = "INFCL_KILLS_RUN"  # environment variable that the descendants of a process inherit
AFRESH = {"JAX_ENABLE_COMPILATION_CACHE": "0"}


class Scenario(NamedTuple):
    """Kind of run: changed settings, number of processes, whether it reads tar files."""

    changes: dict
    processes: int = 1
    tar: bool = False


SCENARIOS = {
    "digits": Scenario({}),
    "2 processes": Scenario({}, processes=2),
    "tar, 2 workers": Scenario({"num_workers": 2}, tar=True),
    "sample state": Scenario({"loss": "fastclip_v2"}),
    "2 processes, sample state, tar, 1 worker": Scenario(
        {"loss": "fastclip_v2", "num_workers": 1}, processes=2, tar=True
    ),
}


class Outcome(NamedTuple):
    """Final metrics, arrays and data position of a run."""

    history: tuple[list[dict], list[dict]]
    state: dict
    position: dict


class Position:
    """Data iterator that keeps a restored position."""

    def set_state(self, state):
        self.state = state


class Runs:
    """Runs of one scenario in a folder, with an undisturbed one as reference."""

    def __init__(self, name: str, folder: Path):
        self.name, self.scenario, self.folder = name, SCENARIOS[name], folder
        folder.mkdir()
        sizes = {"total_steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "eval_every": EVAL_EVERY}
        self.config = runs.config(**(sizes | {"cpu_devices": 2 // self.scenario.processes} | self.scenario.changes))
        if self.scenario.tar:
            samples = captioned.samples(1000)
            self.config.dataset = str(captioned.write_tar(folder / "a.tar", captioned.members(samples)))
        started = time.monotonic()
        workdir = folder / "undisturbed"
        finished = self.finish(self.start(workdir, "undisturbed"))
        if failed(finished):
            raise RuntimeError(f"the undisturbed run failed: {finished}")
        self.seconds = time.monotonic() - started
        self.reference = self.outcome(workdir)

    def start(self, workdir: Path, marker: str, **environ: str) -> list[subprocess.Popen]:
        for rank in range(self.scenario.processes):
            phases.phase_file(self.folder, rank).unlink(missing_ok=True)
        command = (str(self.folder), "experiments.train", f"--workdir={workdir}", *runs.flags(self.config))
        environ[MARKER] = marker
        return runs.start_cluster(self.scenario.processes, "tests.faults.phases", *command, **environ)

    def finish(self, processes: list[subprocess.Popen]) -> list[runs.Finished]:
        return runs.finish(*processes, seconds=LIMIT)

    def outcome(self, workdir: Path) -> Outcome:
        mesh, source, position = data_mesh(jax.devices()[:1]), run.training_source(self.config), Position()
        with Checkpointer(workdir) as checkpoints:
            state = checkpoints.restore_latest(run.initial_state(self.config, mesh, source), position)
        arrays = {name: getattr(state, name) for name in ("step", "params", "opt_state", "samples")}
        return Outcome(runs.history(workdir), arrays, position.state)

    def forget_index(self) -> None:
        for path in self.folder.glob(".tar_index*"):
            path.unlink()

    def targets(self, workdir: Path) -> list[str]:
        """Phases that the next start may reach."""
        reached = [phases.COMPILATION, phases.STEPS, phases.CHECKPOINT, phases.EVALUATION, phases.END]
        restores = [phases.RESTORE] * any((workdir / "checkpoints").glob("[0-9]*"))
        indexes = [phases.INDEXING] * (self.scenario.tar and not any(self.folder.glob(".tar_index*")))
        return restores + indexes + reached

    def kill(self, processes: list[subprocess.Popen], workdir: Path, rng: random.Random) -> str | None:
        """Kill a random process at a random moment, then the others.

        Returns:
          The phase of the process; None if all ended before.
        """
        rank = rng.randrange(len(processes))
        target = rng.choice(self.targets(workdir)) if rng.random() < 0.5 else None
        due = time.monotonic() + rng.uniform(0, self.seconds)
        while all(process.poll() is None for process in processes):
            if phases.read_phase(self.folder, rank) == target if target else time.monotonic() >= due:
                time.sleep(rng.uniform(0, 0.05) if target else 0)
                processes[rank].kill()
                processes[rank].wait()
                phase = phases.read_phase(self.folder, rank)
                writing = phase == phases.STEPS and any((workdir / "checkpoints").glob("*tmp*"))
                time.sleep(rng.uniform(0, 2) * (len(processes) > 1))  # the others go on until they notice
                self.finish_killed(processes)
                return f"{phases.CHECKPOINT} in the background" if writing else phase
            time.sleep(0.002)
        return None

    def finish_killed(self, processes: list[subprocess.Popen]) -> None:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def disturbed(self, number: int, most: int, rng: random.Random) -> tuple[list[str], list[str]]:
        """Run once with at most `most` kills.

        Returns:
          (phases of the kills, failures).
        """
        workdir, killed, failures = self.folder / f"run-{number}", [], []
        self.forget_index()
        for start in range(most + 1):
            marker = f"{os.getpid()}-{self.folder.name}-{number}-{start}"
            processes = self.start(workdir, marker, **(AFRESH if rng.random() < 0.25 else {}))
            phase = self.kill(processes, workdir, rng) if start < most else None
            finished = None if phase else self.finish(processes)
            failures += [f"outlived a killed process ({phase}): {name}" for name in end_orphans(marker)]
            if finished is not None:
                break
            killed.append(phase)
        if failed(finished):
            return killed, [*failures, f"did not resume: {finished}"]
        got = self.outcome(workdir)
        differs = [name for name in Outcome._fields if not equal(getattr(got, name), getattr(self.reference, name))]
        return killed, failures + [f"another {name} after {', '.join(killed)}" for name in differs]


def equal(got, expected) -> bool:
    return got == expected if not isinstance(got, dict) or "params" not in got else runs.equal_bits(got, expected)


def failed(finished: list[runs.Finished]) -> bool:
    return any(process.returncode for process in finished)


def marked_processes(marker: str) -> Iterator[tuple[int, str]]:
    """Process ids and command lines of the living processes that inherited a marker."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={marker}\0".encode() in (folder / "environ").read_bytes():
                yield int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")[:200]
        except OSError:  # ended meanwhile, or another user's
            continue


def end_orphans(marker: str) -> list[str]:
    """Wait for the descendants of ended processes, then kill them; return their command lines."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while orphans := list(marked_processes(marker)):
        if time.monotonic() > deadline:
            for pid, _ in orphans:
                with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    return [name for _, name in orphans]


def kill_runs(count: int, seed: int, names: list[str], folder: Path) -> list[str]:
    """Kill runs of the named scenarios in turn, `count` times in all.

    Returns:
      Failures, one line each.
    """
    rng, failures, finished = random.Random(seed), [], collections.Counter()
    table = {name: collections.Counter() for name in names}
    scenarios = [Runs(name, folder / str(number)) for number, name in enumerate(names)]
    while (done := sum(counts.total() for counts in table.values())) < count:
        for scenario in scenarios[: count - done]:
            left = count - sum(counts.total() for counts in table.values())
            killed, wrong = scenario.disturbed(finished[scenario.name], min(MOST_KILLS, left), rng)
            finished[scenario.name] += 1
            table[scenario.name].update(killed)
            failures += [f"{scenario.name}: {line}" for line in wrong]
            print(f"{scenario.name}: killed in {', '.join(killed) or 'no phase'}: {wrong or 'equal'}", flush=True)
    print_table(table, finished)
    return failures


def print_table(table: dict[str, collections.Counter], finished: collections.Counter) -> None:
    kinds = list(dict.fromkeys([*phases.PHASES, *(phase for counts in table.values() for phase in counts)]))
    print(f"\n| kills | {' | '.join(table)} | all |\n|{' --- |' * (len(table) + 2)}")
    for kind in kinds:
        counts = [counts[kind] for counts in table.values()]
        print(f"| {kind} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    for title, counts in (("all", {k: c.total() for k, c in table.items()}), ("runs that ended", finished)):
        print(f"| {title} | {' | '.join(str(counts[name]) for name in table)} | {sum(counts.values())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments, phases and ranks")
    parser.add_argument("--scenarios", default=",".join(map(str, range(len(SCENARIOS)))), help="numbers, by comma")
    arguments = parser.parse_args()
    names = [list(SCENARIOS)[int(number)] for number in arguments.scenarios.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        failures = kill_runs(arguments.count, arguments.seed, names, Path(folder))
    sys.exit("\n".join(failures) if failures else 0)


if __name__ == "__main__":
    main()
