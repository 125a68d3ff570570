"""Processes of a run, and the messages between them."""

import functools
import itertools
import json
import os
import socket
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

_WEEK = 7 * 86_400.0  # seconds that a process may be late, as after caching features; a lost one ends the run earlier


class Channel:
    """Messages between the processes of a run, over the key-value store of the coordination service.

    No device takes part, so a process may send and receive while it computes. The methods raise
    `jax.errors.JaxRuntimeError` without a connection to process 0, which serves the store.
    """

    def __init__(self, client: Any, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._client, self._round = client, 0

    def send(self, topic: str, text: str) -> None:
        """Publish a text of this process, once for each topic."""
        self._client.key_value_set(f"{_folder(topic)}{self.rank}", text)

    def received(self, topic: str) -> dict[int, str]:
        """Return the texts of a topic by rank, in ascending order."""
        pairs = self._client.key_value_dir_get(_folder(topic))
        return dict(sorted((int(key.rsplit("/", 1)[1]), text) for key, text in pairs))

    def gather(self, text: str, seconds: float = _WEEK) -> list[str]:
        """Return the texts of all processes by rank.

        All processes must call it at the same places of the program.
        """
        self._round += 1
        self.send(f"gather/{self._round}", text)
        self._client.wait_at_barrier(_folder("gather"), round(seconds * 1000))
        texts = list(self.received(f"gather/{self._round}").values())
        self._client.key_value_delete(f"{_folder(f'gather/{self._round - 1}')}{self.rank}")  # all have read it
        return texts

    def any(self, flag: bool) -> bool:
        """Return whether a process passes True; cheaper than `gather` if this is rare.

        All processes must call it at the same places of the program.
        """
        self._round += 1
        if flag:
            self.send(f"any/{self._round}", "")
        self._client.wait_at_barrier(_folder("any"), round(_WEEK * 1000))
        return bool(self.received(f"any/{self._round}"))

    def meets(self, topic: str, seconds: float) -> bool:
        """Return whether all processes call this within some seconds, once for each topic."""
        try:
            self._client.wait_at_barrier(_folder(topic), round(seconds * 1000))
        except jax.errors.JaxRuntimeError:
            return False
        return True


def _folder(topic: str) -> str:
    return f"infcl_jax/{topic}/"


def channel() -> Channel | None:
    """Return the channel of this run; None without `jax.distributed`."""
    from jax._src.distributed import global_state

    return None if global_state.client is None else _channel(global_state.client)


@functools.cache
def _channel(client: Any) -> Channel:
    from jax._src.distributed import global_state

    return Channel(client, global_state.process_id, global_state.num_processes)


def is_lead() -> bool:
    """Return whether this is process 0, which writes logs and images.

    Examples:
      >>> if is_lead():
      ...     print("one line for all processes")
      one line for all processes
    """
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """Gather a JSON value of each process, by rank.

    Every process must call this. It synchronizes the processes.
    """
    messages = channel()
    return [value] if messages is None else [json.loads(text) for text in messages.gather(json.dumps(value))]


def anywhere(flag: bool) -> bool:
    """Return whether the flag is set in a process.

    Every process must call this. It synchronizes the processes.
    """
    messages = channel()
    return flag if messages is None else messages.any(flag)


def union(values: Iterable[int]) -> list[int]:
    """Gather the different integers of all processes, in ascending order.

    Every process must call this. It synchronizes the processes.
    """
    return sorted(set(itertools.chain.from_iterable(gather(sorted(map(int, set(values)))))))


class LocalProcesses(NamedTuple):
    """Number of processes that share resources with this one, itself included."""

    host: int
    cores: int  # bound to the same CPU cores


def local_processes() -> LocalProcesses:
    """Count the processes of this host and of its cores.

    All processes must call this function.
    """
    own = [socket.gethostname(), sorted(os.sched_getaffinity(0))]
    every = gather(own)
    return LocalProcesses(sum(host == own[0] for host, _ in every), every.count(own))
