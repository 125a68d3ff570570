"""Inputs in processes of their own, with limits of time and memory."""

import argparse
import collections
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

MEMORY = 2**29  # bytes that one input may add to the process
SECONDS = 60  # no input takes ten


def describe(error: BaseException) -> str:
    """Name an error and the line that raised it."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {str(error)[:300]!r}"


def counts_of(description: str, count: int, **options: str) -> argparse.Namespace:
    """Parse the flags of a script: the number of its inputs, their first seed, and switches with their meanings."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    for name, meaning in options.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    return parser.parse_args()


Run = Callable[[str, int, Path], dict[str, Any]]


def run_apart(run: Run, kind: str, seed: int) -> dict[str, Any]:
    """Call `run(kind, seed, folder)` in a fork.

    Args:
      run: function that returns a dictionary for JSON, with "problem".
      kind: kind of the input.
      seed: seed of the input.

    Returns:
      Its result with "bytes", the memory that it has added. A crash, more than `SECONDS` and more than `MEMORY` are
      problems.
    """
    with tempfile.TemporaryDirectory() as folder:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result = run(kind, seed, Path(folder))
            added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024  # Linux counts KiB
            os.write(writer, json.dumps(result | {"bytes": added}).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            data = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not data:
        return {"name": "?", "problem": f"the process ended with {status}", "bytes": 0}
    result = json.loads(data)
    if not result["problem"] and result["bytes"] > MEMORY:
        result["problem"] = f"{result['bytes'] / 2**20:.0f} MiB of memory"
    return result


def count_outcomes(run: Run, kinds: Sequence[str], arguments: argparse.Namespace) -> NoReturn:
    """Run inputs apart, print the counts of each kind, and exit with 1 after a problem.

    Args:
      run: see `run_apart`; its "counts" are added up, and its "line" is printed with the flag `--lines`.
      kinds: kinds of the inputs, in turns.
      arguments: flags "count", "seed" and, if any, "lines".
    """
    outcomes: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
    names, problems, most = set(), 0, 0
    for number in range(arguments.count):
        kind, seed = kinds[number % len(kinds)], arguments.seed + number
        result = run_apart(run, kind, seed)
        names.add(f"{kind}: {result['name']}")
        outcomes[kind].update({"inputs": 1} | result.get("counts", {"crashed": 1}))
        most = max(most, result["bytes"])
        line = result["problem"] or (getattr(arguments, "lines", False) and result.get("line"))
        problems += bool(result["problem"])
        if line:
            print(f"seed {seed}, {kind}, {result['name']}: {line}", flush=True)
    for kind, counts in outcomes.items():
        print(f"{kind}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    print(f"{arguments.count} inputs of {len(names)} kinds, at most {most / 2**20:.0f} MiB, {problems} problems")
    sys.exit(problems > 0)
