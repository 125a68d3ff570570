"""Stop signals, handled so that a run can save a last checkpoint."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax

from infcl_jax.runtime.exit_codes import RESUME, STOP_SIGNALS, Interrupted, nothing_to_save, unignored
from infcl_jax.runtime.file_io import open_writable
from infcl_jax.runtime.printable import write_last_line
from infcl_jax.runtime.processes import Channel, channel

_POLL = 0.5  # seconds between two looks for requests of other processes
_AGREE_POLL = 0.05  # seconds between two looks for their answers
_REQUEST, _TICK, _LEFT = "stop/request", "stop/tick", "stop/left"  # topics of the channel
_EXIT_TIME = 0.5  # seconds that a process needs to end after its last message
_REPEAT = 1.0  # seconds: a scheduler and a wrapper script may both deliver the same request
_LEAVE = 5.0  # seconds for the last message, the stacks and the other processes


class Preemption:
    """Detect stop signals and end the run within a deadline.

    SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask to stop. In a run of several processes, a signal to any of them makes
    `noticed` return True at the same call on all processes, so they save the same step. A process that ignored a signal
    before keeps ignoring it.

    A thread receives the signals, so they take effect while the main thread compiles or waits for a device. It ends the
    process with `os._exit` in these cases:

    - No process has called `noticed` yet: status `RESUME`, since there is nothing to save.
    - The process still exists `timeout` seconds after the signal: status `RESUME`, with the stacks of all threads in a
      file.
    - A second signal: status 128 + its number.
    - SIGQUIT: status 131 at once, with the stacks in a file.

    With `interactive`, SIGINT never ends a process that trains alone, because Ctrl-C and the stop button of a notebook
    send it. The first one after `noticed` asks to stop, without a deadline. Any other raises `KeyboardInterrupt`.

    Outside the main thread Python installs no handlers, so that only other processes can ask to stop.

    Examples:
      >>> with Preemption() as preemption:
      ...     preemption.joined()
      ...     for step in range(1, 4):
      ...         if preemption.noticed(step):  # after SIGTERM: save a checkpoint of this step
      ...             raise preemption.interruption(step)

    Args:
      timeout: seconds from the signal to the end of the process.
      workdir: folder of the file with the stacks, `stacks-HOST-PID.txt`.
      interactive: whether the process goes on after SIGINT, as notebooks do.
    """

    def __init__(
        self, timeout: float = 60.0, workdir: str | os.PathLike[str] = ".", *, interactive: bool = False
    ) -> None:
        self._interactive, self._again = interactive, "call" if interactive else "command"
        self.interrupted = False  # SIGINT has asked an interactive run to stop
        self._interrupt_time = 0.0  # monotonic time of that signal
        self._timeout = timeout
        self._stacks = Path(workdir) / f"stacks-{socket.gethostname()}-{os.getpid()}.txt"
        self._previous: dict[signal.Signals, Any] = {}
        self._channel: Channel | None = None  # to the other processes, if there are any
        self._threads: list[threading.Thread] = []
        self._joined = self._closed = self._leaving = False
        self._reason: str | None = None
        self._first_signal: float | None = None  # monotonic time of the first signal to this process
        self._stirred = threading.Event()  # ends the pause of the thread that polls the other processes
        self._condition = threading.Condition()  # guards the next three
        self._pending = False  # `noticed` waits for `_stop_tick`
        # Calls of `noticed`, at the same places of the program on every process. The run stops at call `_stop_tick`.
        self._tick, self._stop_tick = 0, sys.maxsize
        self._step = 0

    def __enter__(self) -> Preemption:
        # JAX's preemption service would replace the SIGTERM handler. It knows no other signal.
        jax.config.update("jax_enable_preemption_service", False)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            watched = unignored(*STOP_SIGNALS, signal.SIGQUIT)
            # The main thread runs handlers between two instructions. The descriptor gets the number at once.
            self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._previous = {number: signal.signal(number, self._receive) for number in watched}
        self._start(self._watch_signals)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Interrupted) and self._reason is None and self._channel is not None and self._tick == 0:
            self._ask(error.message)  # such as a locked work directory, which only process 0 knows: all leave together
            self._leaving = True
        if self._leaving:
            # A thread ends the process. Errors of lost connections are the consequence of other processes that left.
            self._threads[0].join()
        self._closed = True
        os.write(self._write, b"\0")  # wakes the thread that waits for signals
        self._stirred.set()
        for thread in self._threads:
            thread.join()
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._main:
            signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._read)
        os.close(self._write)

    def joined(self) -> None:
        """Note that the devices and the connections between the processes exist.

        A signal that arrives earlier takes effect now, because the other processes could not learn of it.
        """
        if not self._joined:
            self._channel = channel()
            self._joined = True
            os.write(self._write, b"\0")  # wakes the thread that waits for signals
            if self._channel is not None:
                self._start(self._watch_processes, self._channel)

    def noticed(self, step: int) -> bool:
        """Return whether to save and stop.

        All processes must call it at the same places of the program. It waits only while the processes agree on a stop.

        Args:
          step: number of completed steps.
        """
        self.joined()
        with self._condition:
            self._condition.wait_for(lambda: not self._pending or self._stop_tick < sys.maxsize)
            self._step = step
            self._tick += 1
            return self._tick >= self._stop_tick

    def check(self) -> None:
        """Raise `Interrupted` at a stop without new state to save.

        All processes must call it at the same places of the program.
        """
        if self.noticed(self._step):
            raise Interrupted(self._nothing_to_save())

    def interruption(self, step: int) -> Interrupted:
        """Return the exception that ends the run after a checkpoint of `step`."""
        return Interrupted(
            f"asked to stop: saved step {step}; the same {self._again} continues from there ({self._reason})"
        )

    def _nothing_to_save(self) -> str:
        return nothing_to_save(str(self._reason), self._again)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Make the next `noticed` wait until a thread has handled the signal; SIGINT may be handled here."""
        if not self._goes_on(signum):
            self._pending = self._pending or signum in STOP_SIGNALS
        elif self._closed:  # the handlers are being restored
            return
        elif self._tick and self._reason is None:
            self.interrupted, self._interrupt_time = True, time.monotonic()
            self._reason, self._stop_tick = signal.SIGINT.name, self._tick + 1
        elif time.monotonic() - self._interrupt_time > _REPEAT:
            raise KeyboardInterrupt

    def _goes_on(self, number: int) -> bool:
        """Return whether the process goes on after a signal."""
        return self._interactive and number == signal.SIGINT and self._channel is None

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        # Daemons, because they outlive `__exit__` after a stop and must not keep the interpreter from exiting.
        self._threads.append(threading.Thread(target=target, args=arguments, name="preemption", daemon=True))
        self._threads[-1].start()

    def _ask(self, reason: str) -> None:
        """Request a stop on behalf of this process."""
        self._reason = reason
        self._stirred.set()
        os.write(self._write, b"\0")  # wakes the thread that waits for signals

    def _watch_signals(self) -> None:
        """Handle signals and enforce the deadline, without waiting for anything else."""
        deadline = None
        while not self._closed:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read], [], [], seconds)[0]:
                self._leave(
                    f"asked to stop: not done after {self._timeout:g} s (stop_timeout), see {self._stacks}; the same "
                    f"command continues from the last checkpoint ({self._reason})",
                    stacks=True,
                )
            for number in os.read(self._read, 64):
                if number in self._previous and not self._goes_on(number):
                    self._handle(signal.Signals(number))
            if self._reason is not None and not self.interrupted:
                deadline = deadline or time.monotonic() + self._timeout
                if self._joined and self._channel is None:
                    self._decide(self._tick)

    def _handle(self, number: signal.Signals) -> None:
        """Handle a signal to this process."""
        if number == signal.SIGQUIT:
            self._leave(f"left at once, see {self._stacks} (SIGQUIT)", 128 + number, stacks=True)
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            if self._reason is None or self.interrupted:
                self.interrupted = False
                self._ask(number.name)
        elif now - self._first_signal > _REPEAT:
            write_last_line(f"left at once: second signal ({number.name})")
            os._exit(128 + number)

    def _watch_processes(self, channel: Channel) -> None:
        """Exchange requests and ticks with the other processes."""
        requested = announced = False
        while not self._closed and self._stop_tick == sys.maxsize:
            # Without the coordination service, JAX ends the process, or the deadline does.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if self._reason is not None and not requested:
                    requested = True
                    channel.send(_REQUEST, f"{self._reason}, process {channel.rank}")
                requests = channel.received(_REQUEST)
                if requests and not announced:
                    requested = announced = True
                    with self._condition:
                        self._pending = True  # so that no other process stops at an earlier call
                        channel.send(_TICK, str(self._tick))
                if requests and self._reason is None:
                    self._ask(next(iter(requests.values())))  # starts the deadline
                ticks = channel.received(_TICK) if announced else {}
                if len(ticks) == channel.count:
                    # The request of the lowest rank, the same on every process.
                    self._reason = next(iter(channel.received(_REQUEST).values()))
                    self._decide(max(map(int, ticks.values())))
            self._stirred.wait(_AGREE_POLL if announced else _POLL)
            self._stirred.clear()

    def _decide(self, tick: int) -> None:
        """Stop at the call of `noticed` after the latest one, call `tick`; leave if there is nothing to save."""
        with self._condition:
            self._pending = True
            self._leaving = tick == 0
            if not self._leaving and self._stop_tick == sys.maxsize:
                self._stop_tick = tick + 1
                self._condition.notify_all()
        if self._leaving:
            self._leave(self._nothing_to_save())

    def _leave(self, line: str, status: int = RESUME, *, stacks: bool = False) -> None:
        """End the process, even if a file system or another process hangs."""
        self._leaving = True

        def farewell() -> None:
            write_last_line(line)
            if stacks:
                with open(open_writable(self._stacks, os.O_WRONLY | os.O_TRUNC), "w") as file:
                    faulthandler.dump_traceback(file)
            if self._channel is not None:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    _leave_last(self._channel)

        thread = threading.Thread(target=farewell, daemon=True)
        thread.start()
        thread.join(2 * _LEAVE)
        os._exit(status)


def _leave_last(channel: Channel) -> None:
    """Let process 0, which serves the channel, leave after all others.

    JAX aborts processes that lose the connection to process 0.
    """
    channel.send(_LEFT, "")
    if channel.rank == 0:
        deadline = time.monotonic() + _LEAVE
        while len(channel.received(_LEFT)) < channel.count and time.monotonic() < deadline:
            time.sleep(_AGREE_POLL)
        time.sleep(_EXIT_TIME)
