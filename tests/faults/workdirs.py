"""Damage work directories, read them and count the outcomes.

    python -m tests.faults.workdirs [--count=600] [--seed=0]

Each seed damages one file of a small work directory. The report, the saved configuration, the metrics and the manifest
are then read. Each reader must succeed or raise an error of one line that names the file; the report names the files
that it leaves out.
"""

import collections
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from PIL import Image

from infcl_jax import run as runs
from infcl_jax.report import read_runs, write_report
from infcl_jax.runtime.exit_codes import Interrupted
from infcl_jax.runtime.outputs import Outputs
from infcl_jax.runtime.workdir import Holder, WorkdirLock, save_config
from infcl_jax.settings import check_config, default_config
from infcl_jax.training import MetricWriter, read_metrics
from infcl_jax.training.checkpoint_folder import CheckpointFolder, read_results, write_manifest
from infcl_jax.training.nonfinite import Safeguards
from infcl_jax.training.writers import CsvFile, Target
from tests.faults.apart import counts_of, describe
from tests.faults.case import BYTES, choose
from tests.faults.json_damage import damage_json

SECONDS = 10  # no case takes one
MEMORY = 4 * 2**30  # bytes that all cases may add to the process
MANIFEST = "checkpoints/4/manifest.json"
REPORTED = ("config.json", "metrics.jsonl", "environment.json", "evaluation.json", "examples.json", "retrieval.png")
FILES = (*REPORTED, "run.log", ".lock", "metrics.csv", "skipped_batches.jsonl", MANIFEST)
HOSTILE = "\x1b]0;owned\x07\nerror: forged \u202e"
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", HOSTILE, "NaN", "\ud800", [], {}, [[]], [{}], {"": {}}, {"a": {"b": {"c": 1}}}),
    *(0, -1, 1, 2**63, -(2**63) - 1, 10**400, 1e308, -1e308, 5e-324, 1e-300, float("nan"), float("inf"), -float("inf")),
)


def build(folder: Path) -> None:
    """Write a small work directory, without training."""
    folder.mkdir()
    config = default_config().to_dict()
    config |= {"batch_size": 8, "total_steps": 4}
    config["optimizer"]["warmup_steps"] = 0
    save_config(folder, config)
    with MetricWriter(folder, writers=["csv"]) as writer:
        for step in range(1, 5):
            writer.write(step, {"loss": 400.0 / step**4, "memory/peak_bytes": 3e8, "data/wait_fraction": 0.1})
        writer.write(4, {"zero_shot/top1": 0.5, "validation/loss": 2.0})
    plan = {"components": {"parameters": 2**20}, "peak": 2**20, "limit": 2**30}
    start = {"step": 2, "devices": "8 x H200", "memory_plan": plan}
    confusion = {"expected": "cat", "predicted": "dog", "images": 3}
    image = {"image": "data:,", "expected": ["cat"], "predicted": ["dog"], "similarity": [0.5], "correct": False}
    for name, content in {
        "environment.json": [start, start],
        "evaluation.json": {"step": 4, "zero_shot/top1": 0.5},
        "examples.json": {"zero_shot": {"confusions": [confusion], "examples": [image]}},
        ".lock": vars(Holder.own()),
        "skipped_batches.jsonl": {"step": 1, "stage": "the loss", "loss": "nan", "indices": [1]},
    }.items():
        (folder / name).write_text(json.dumps(content) + "\n")
    (folder / "run.log").write_text("2026-11-23 10:00:00+0000  warning: cannot write a.txt\n" * 3)
    Image.new("RGB", (4, 4)).save(folder / "retrieval.png")
    checkpoint = folder / MANIFEST
    checkpoint.parent.mkdir(parents=True)
    (checkpoint.parent / "state").write_bytes(b"state")
    write_manifest(epath.Path(checkpoint.parent), {"validation/loss": 2.0})


def damage(path: Path, rng: np.random.Generator) -> str:
    """Damage a file and return the kind of damage."""
    name, change = choose(tuple(DAMAGES.items()), rng)
    change(path, rng)
    return name


def _bytes(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(choose(BYTES, rng)(path.read_bytes(), rng))


def _content(path: Path, rng: np.random.Generator) -> None:
    deep = b"[" * int(choose((500, 900, 3000, 10**5), rng))
    contents = (
        b"",
        b"\0" * 99,
        b"\xff\xfe{}",
        b'{"a": "caf\xe9"}',
        b"1" * 5000,
        b'{"step": ',
        b'"text"',
        b"null",
        b"[1]",
    )
    nested = (deep, deep + b"]" * len(deep), b'{"step": 1, "a": ' + deep + b"]" * len(deep) + b"}")
    path.write_bytes(choose((*contents, *nested, HOSTILE.encode()), rng))


def _picture(path: Path, rng: np.random.Generator) -> None:
    """Write a picture, also one with more pixels than its bytes suggest."""
    side = choose((1, 12_000, 40_000), rng)
    Image.new("1", (side, side)).save(path, choose(("PNG", "GIF"), rng))


def _json(path: Path, rng: np.random.Generator) -> None:
    """Damage the values of JSON."""
    changed = []
    text = path.read_text(errors="replace")
    for line in text.split("\n") if path.suffix == ".jsonl" else [text]:
        try:
            changed.append(damage_json(json.loads(line), rng, VALUES)[1])
        except ValueError:  # another kind of file
            changed.append(line)
    path.write_text("\n".join(changed))


def _special(path: Path, rng: np.random.Generator) -> None:
    """Put something else than a file in the place of a file."""
    path.unlink()
    kind = rng.integers(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    else:
        path.symlink_to(("/dev/zero", path.name, "/")[kind - 2])


def _sparse(path: Path, rng: np.random.Generator) -> None:
    """Extend a file to more bytes than fit memory."""
    os.truncate(path, 2**40)


DAMAGES: dict[str, Callable[[Path, np.random.Generator], None]] = {
    "bytes": _bytes,
    "content": _content,
    "picture": _picture,
    "json": _json,
    "json again": _json,
    "special": _special,
    "sparse": _sparse,
}


def _report(folder: Path) -> None:
    (record,) = read_runs([folder])
    write_report(folder / "report.html", [record])
    page = (folder / "report.html").read_text()
    assert not any(ord(character) < 32 and character != "\n" for character in page), "the page has control characters"
    for name in REPORTED:
        if not (folder / name).is_file():
            assert any(name in warning for warning in record.warnings), f"no warning of {name}"


def _config(folder: Path) -> None:
    check_config(runs.saved_config(folder))


def _metrics(folder: Path) -> None:
    read_metrics(folder / "metrics.jsonl")


def _checkpoint(folder: Path) -> None:
    read_results(epath.Path(folder / MANIFEST).parent)
    CheckpointFolder(folder / "checkpoints", lambda line: None).intact_step()


def _resume(folder: Path) -> None:
    """Open the files that a resumed run continues."""
    outputs = Outputs(lambda line: None)
    CsvFile(Target(folder, 2, outputs)).close()
    Safeguards("skip", workdir=folder, start=2, outputs=outputs).close()
    with MetricWriter(folder, resume_step=2, outputs=outputs):
        pass


def _lock(folder: Path) -> None:
    with contextlib.suppress(Interrupted), WorkdirLock(folder, lambda line: None, wait=0.0):
        pass


READERS = {
    "report": _report,
    "configuration": _config,
    "metrics": _metrics,
    "checkpoint": _checkpoint,
    "lock": _lock,
    "resume": _resume,
}


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in the main thread after some seconds."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError(f"not done after {seconds} s")

    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def run(seed: int, folder: Path) -> dict[str, str]:
    """Damage a work directory and read it.

    Returns:
      Outcome of each reader: "read", "refused" or a problem.
    """
    rng, workdir, outcomes = np.random.default_rng(seed), folder / "run", {}
    build(workdir)
    name = choose(FILES, rng)
    kind = damage(workdir / name, rng)
    for reader, read in READERS.items():
        try:
            with limited(SECONDS):
                read(workdir)
            outcomes[reader] = "read"
        except BaseException as error:
            text, plain = str(error), type(error) is ValueError or isinstance(error, OSError)
            named = str(workdir) in text or reader == "configuration"  # whose errors name the setting
            if plain and named and "\n" not in text and len(text) < 2000:
                outcomes[reader] = "refused"
                continue
            outcomes[reader] = f"{kind} in {name}: {describe(error)}"
    return outcomes


def main() -> None:
    """Read the work directories of the flags and print the outcomes."""
    arguments = counts_of(__doc__, 600)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    counts: dict[str, collections.Counter] = {reader: collections.Counter() for reader in READERS}
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run(seed, Path(folder))
        for reader, outcome in outcomes.items():
            known = outcome in ("read", "refused")
            counts[reader][outcome if known else "opaque"] += 1
            if not known:
                print(f"seed {seed}, {reader}: {outcome}", flush=True)
    for reader, count in counts.items():
        print(f"{reader}: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items())))
    sys.exit(any(count["opaque"] for count in counts.values()))


if __name__ == "__main__":
    main()
