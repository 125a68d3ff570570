"""Benchmark of the start of a run: seconds from the command to the end of the first step, by phase.

    python -m experiments.benchmarks.startup --model=ViT-B/32 --model_overrides=dtype=bfloat16 --batch_size=1024

Trains two steps on the digits in a process of its own, first with an empty persistent compilation cache, then with the
one that this filled. Prints both as JSON lines. docs/benchmarks.md defines the phases.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

from experiments import command_line

# Events of `jax.monitoring`, whose durations are summed.
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}

_MODEL = flags.DEFINE_string("model", "ViT-B/32", "Model name, as config.model.", allow_override=True)
_OVERRIDES = flags.DEFINE_string("model_overrides", "", "Model changes: dtype=bfloat16.", allow_override=True)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1024, "Global batch size.", lower_bound=1, allow_override=True)

# The run of each start: its settings and the time of the command are arguments.
_CHILD = "import sys; from experiments.benchmarks.startup import start; start(*sys.argv[1:])"


def start(settings: str, workdir: str, started: str) -> None:
    """Train two steps and print the seconds of each phase until the first step has ended.

    Args:
      settings: changed settings of the run, as JSON.
      workdir: directory of the run.
      started: time of the command, as `time.time()`.
    """
    import jax

    import infcl_jax
    from infcl_jax.run.train import train

    events: dict[str, float] = dict.fromkeys(_EVENTS.values(), 0.0)

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        if event in _EVENTS:
            events[_EVENTS[event]] += duration_secs

    marks = {"import": time.time()}
    jax.monitoring.register_event_duration_secs_listener(count)
    jax.devices()
    marks["devices"] = time.time()

    class FirstStep(infcl_jax.Callback):
        def on_start(self, *_: Any) -> None:
            marks["prepare"] = time.time()
            self.compiled = events["compile"]
            events.update(dict.fromkeys(events, 0.0))

        def on_step(self, step: int, metrics: Any) -> None:
            if step == 1:
                self.phases = _phases(float(started), marks, self.compiled, events)

    first = FirstStep()
    train(json.loads(settings), workdir, [first])
    print(json.dumps(first.phases))


def _phases(
    started: float, marks: dict[str, float], prepare_compile: float, step: dict[str, float]
) -> dict[str, float]:
    """Return the seconds of each phase, which add up to the total."""
    now = time.time()
    phases = {
        "import": marks["import"] - started,
        "devices": marks["devices"] - marks["import"],
        "prepare": marks["prepare"] - marks["devices"] - prepare_compile,
        "prepare_compile": prepare_compile,
        **step,
        "first_step": now - marks["prepare"] - sum(step.values()),
        "total": now - started,
    }
    return {name: round(seconds, 2) for name, seconds in phases.items()}


def main() -> None:
    """Start the run with an empty and with a filled cache."""
    settings = {
        "dataset": "digits",
        "model": _MODEL.value,
        "model_overrides": _OVERRIDES.value,
        "batch_size": _BATCH_SIZE.value,
        "total_steps": 2,
        "optimizer": {"warmup_steps": 0},
        "evaluation": {"retrieval_dataset": None, "zero_shot_dataset": None},
    }
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "filled"):
            workdir = os.path.join(folder, cache)
            arguments = json.dumps(settings | {"compilation_cache": os.path.join(folder, "cache")}), workdir
            command = [sys.executable, "-c", _CHILD, *arguments, str(time.time())]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(json.dumps({"cache": cache, **json.loads(done.stdout.splitlines()[-1])}), flush=True)


if __name__ == "__main__":
    command_line.run(main)
