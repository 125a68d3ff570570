"""Stages of the data pipeline: their time, and the one that limits its rate."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

READ, DECODE, TOKENIZE = "read", "decode", "tokenize"  # stages of the reading threads or workers
CONCATENATE, GPU_DECODE = "concatenate", "gpu_decode"  # stages of the thread that completes a batch
STAGES = (READ, DECODE, TOKENIZE, CONCATENATE, GPU_DECODE)


def seconds_name(stage: str) -> str:
    """Name the seconds of a stage in `TrainIterator.stats`."""
    return f"seconds/{stage}"


class _Seconds(threading.local):
    """Seconds of the stages in one thread."""

    def __init__(self) -> None:
        self.by_stage: dict[str, float] = {}


_seconds = _Seconds()


@contextlib.contextmanager
def timed(stage: str) -> Iterator[None]:
    """Add the time of a block to a stage of this thread."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _seconds.by_stage[stage] = _seconds.by_stage.get(stage, 0.0) + time.perf_counter() - start


def take_seconds() -> dict[str, float]:
    """Return this thread's seconds since the last call, by the names of `seconds_name`."""
    by_stage, _seconds.by_stage = _seconds.by_stage, {}
    return {seconds_name(stage): seconds for stage, seconds in by_stage.items()}


def limiting_stage(stats: Mapping[str, float], readers: int) -> str:
    """Find the stage that limits the rate of the pipeline, given the seconds of `TrainIterator.stats`.

    All readers run the first three stages. One thread completes the batches with the others.
    """
    seconds = {stage: stats.get(seconds_name(stage), 0.0) for stage in STAGES}
    completing = {stage: seconds.pop(stage) for stage in (CONCATENATE, GPU_DECODE)}
    limiting = completing if sum(completing.values()) > sum(seconds.values()) / readers else seconds
    return max(limiting, key=limiting.__getitem__)
