"""Agreement of all processes on a stop, over the key-value store of `jax.distributed`."""

from __future__ import annotations

import time
from typing import Any

import jax

from infcl_jax.runtime.distributed import coordination_client

_FOLDER = "infcl_jax/stop/"
_REQUEST, _TICK, _LEFT = f"{_FOLDER}request", f"{_FOLDER}tick", f"{_FOLDER}left"
_POLL = 0.1  # seconds between two reads while others are expected to answer
_EXIT_TIME = 0.5  # seconds that a process needs to end after its last write


class Peers:
    """Processes of a run, without collectives: a process may answer while another one computes."""

    def __init__(self, client: Any, rank: int, count: int):
        """Store the client.

        Args:
          client: client of the coordination service.
          rank: index of this process.
          count: number of processes.
        """
        self._client, self._rank, self._count = client, rank, count

    def request(self, reason: str) -> None:
        """Publish a request to stop, once."""
        self._client.key_value_set(f"{_REQUEST}/{self._rank}", f"{reason}, process {self._rank}")

    def requested(self) -> str | None:
        """Return the reason of the request of the lowest rank; None without request."""
        return next(iter(self._values(_REQUEST).values()), None)

    def announce(self, tick: int) -> None:
        """Publish the tick of this process, once."""
        self._client.key_value_set(f"{_TICK}/{self._rank}", str(tick))

    def last_tick(self) -> int | None:
        """Return the largest tick; None until all processes have announced theirs."""
        ticks = self._values(_TICK)
        return max(map(int, ticks.values())) if len(ticks) == self._count else None

    def leave(self, seconds: float) -> None:
        """Let process 0, which serves the store, leave after all others, or after `seconds`.

        JAX aborts processes that lose the connection to process 0.
        """
        self._client.key_value_set(f"{_LEFT}/{self._rank}", "")
        deadline = time.monotonic() + seconds
        while self._rank == 0 and len(self._values(_LEFT)) < self._count and time.monotonic() < deadline:
            time.sleep(_POLL)
        if self._rank == 0:
            time.sleep(_EXIT_TIME)

    def _values(self, folder: str) -> dict[int, str]:
        """Return the values of a folder by rank, in ascending order."""
        pairs = self._client.key_value_dir_get(f"{folder}/")
        return dict(sorted((int(key.rsplit("/", 1)[1]), value) for key, value in pairs))


def peers() -> Peers | None:
    """Return the processes of this run; None if it has one."""
    if not jax.distributed.is_initialized():
        return None
    return Peers(coordination_client(), jax.process_index(), jax.process_count())
