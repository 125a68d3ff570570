"""Inputs in processes of their own, with limits of time and memory."""

import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 2**29  # bytes that one input may add to the process
SECONDS = 60  # no input takes ten


def run_apart(run: Callable[[str, int, Path], dict[str, Any]], kind: str, seed: int) -> dict[str, Any]:
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
