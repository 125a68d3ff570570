"""Benchmark of the start of a run: seconds from the command to the end of the first step, by phase.

    python -m experiments.benchmarks.startup --model=ViT-B/32 --precision=bf16 --batch_size=1024

Trains two steps on the digits in a process of its own, first with an empty persistent compilation cache, then with the
one that this filled. Prints both as JSON lines. docs/performance.md defines the phases.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import command_line

# Events of `jax.monitoring`, whose durations in the main thread are summed. Those of an event that contains another one
# include it.
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}

_MODEL = flags.DEFINE_string("model", "ViT-B/32", "Model name, as config.model.", allow_override=True)
_OVERRIDES = flags.DEFINE_string(
    "model_overrides", "", "Model changes, such as vision.remat=dots.", allow_override=True
)
_PRECISION = command_line.shared_flag("precision")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1024, "Global batch size.", lower_bound=1, allow_override=True)

# The run of each start: its settings and the time of the command are arguments.
_CHILD = "import sys; from experiments.benchmarks.startup import start; start(*sys.argv[1:])"


class _Span(NamedTuple):
    """Event of one thread: name, start and duration in seconds."""

    name: str
    start: float
    duration: float


def _add(spans: list[_Span], span: _Span) -> None:
    """Add an event that has just ended to those before, in place of the events that it contains."""
    while spans and spans[-1].start >= span.start:
        spans.pop()
    spans.append(span)


def _totals(spans: Sequence[_Span]) -> dict[str, float]:
    """Sum the durations of each event."""
    return {name: sum(span.duration for span in spans if span.name == name) for name in _EVENTS.values()}


def start(settings: str, workdir: str, started: str) -> None:
    """Train two steps and print the seconds of each phase until the first step has ended."""
    import jax

    import infcl_jax
    from infcl_jax.run.build import start_devices
    from infcl_jax.run.train import train
    from infcl_jax.settings import make_config
    from infcl_jax.training import compiled_step

    main, ahead = list[_Span](), list[_Span]()
    threads = {threading.main_thread().name: main, f"{compiled_step.THREAD}_0": ahead}

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        spans = threads.get(threading.current_thread().name)
        if event in _EVENTS and spans is not None:
            _add(spans, _Span(_EVENTS[event], time.time() - duration_secs, duration_secs))

    def seconds() -> dict[str, float]:
        return _totals(main) | {"compile_ahead": sum(_totals(ahead).values())}

    marks = [float(started), time.time()]
    jax.monitoring.register_event_duration_secs_listener(count)
    config = make_config(json.loads(settings))
    start_devices(config)
    marks.append(time.time())
    prepared: dict[str, float] = {}

    class FirstStep(infcl_jax.Callback):
        def on_start(self, *_: Any) -> None:
            marks.append(time.time())
            prepared.update(seconds())

        def on_step(self, step: int, metrics: Any) -> None:
            if step == 1:
                marks.append(time.time())
                self.phases = _phases(marks, prepared, seconds())

    first = FirstStep()
    train(config, workdir, [first])
    print(json.dumps(first.phases))


def _phases(marks: Sequence[float], prepared: Mapping[str, float], end: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase.

    All but `compile_ahead`, which another thread measures, add up to the total.

    Args:
      marks: times of the command, of its imports' end, of the devices, of the end of the preparation and of the step.
      prepared: seconds of each event until the end of the preparation.
      end: seconds of each event until the end of the step.
    """
    names = ("import", "devices", "prepare", "first_step")
    phases = {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
    for event in _EVENTS.values():
        phases["prepare"] -= prepared[event]
        phases["first_step"] -= end[event] - prepared[event]
    phases |= {**end, "total": marks[-1] - marks[0]}
    return {name: round(seconds, 2) for name, seconds in phases.items()}


def main() -> None:
    """Start the run with an empty and with a filled cache."""
    settings = {
        "dataset": "digits",
        "model": _MODEL.value,
        "model_overrides": _OVERRIDES.value,
        "precision": _PRECISION.value,
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
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # warnings are shown
            print(json.dumps({"cache": cache, **json.loads(done.stdout.splitlines()[-1])}), flush=True)


if __name__ == "__main__":
    command_line.run(main)
