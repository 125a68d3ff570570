"""Stages of the data pipeline: their time, and the one that limits its rate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

READ, DECODE, TOKENIZE = "read", "decode", "tokenize"  # stages of the reading threads or workers
CONCATENATE = "concatenate"  # stage of the thread that joins the chunks of a batch
STAGES = (READ, DECODE, TOKENIZE, CONCATENATE)


def seconds_name(stage: str) -> str:
    """Name the seconds of a stage in `TrainIterator.stats`."""
    return f"seconds/{stage}"


class StageClock:
    """Seconds of each stage of one chunk, in one thread.

    Example:
        clock = StageClock()
        with clock(READ):
            data = read()
        clock.seconds  # {"read": 0.01}
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._start = "", 0.0

    def __call__(self, stage: str) -> Self:
        """Select the stage of the next `with` block."""
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        elapsed = time.perf_counter() - self._start
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + elapsed

    def stats(self) -> dict[str, float]:
        """Return the seconds by the names of `seconds_name`."""
        return {seconds_name(stage): seconds for stage, seconds in self.seconds.items()}


def limiting_stage(stats: Mapping[str, float], readers: int) -> str:
    """Find the stage that limits the rate of the pipeline.

    All readers run the first three stages; one thread concatenates.

    Args:
      stats: seconds of the stages, from `TrainIterator.stats`.
      readers: number of reading threads or workers.

    Returns:
      One of `STAGES`.
    """
    seconds = {stage: stats.get(seconds_name(stage), 0.0) for stage in STAGES}
    concatenate = seconds.pop(CONCATENATE)
    if concatenate > sum(seconds.values()) / readers:
        return CONCATENATE
    return max(seconds, key=seconds.__getitem__)
