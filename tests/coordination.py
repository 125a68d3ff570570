"""Coordination service of `jax.distributed` in memory, for threads that stand for processes."""

import threading

import jax

from infcl_jax.runtime.processes import Channel


class Service:
    """Key-value store and barriers, with the methods of JAX's client."""

    def __init__(self, count):
        self.values, self._count, self._barriers = {}, count, {}

    def channels(self):
        """The channel of each process."""
        return [Channel(self, rank, self._count) for rank in range(self._count)]

    def key_value_set(self, key, value):
        assert key not in self.values  # JAX refuses it
        self.values[key] = value

    def key_value_dir_get(self, folder):
        assert folder.endswith("/")
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(folder)]

    def key_value_delete(self, key):
        self.values.pop(key, None)

    def wait_at_barrier(self, name, milliseconds):
        try:
            self._barriers.setdefault(name, threading.Barrier(self._count)).wait(milliseconds / 1000)
        except threading.BrokenBarrierError as error:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED") from error
