"""Stop signals: noticed once on every process, or the end of the process within a deadline."""

import os
import queue
import signal
import threading

import pytest
from coordination import Service

from infcl_jax.runtime import preemption
from infcl_jax.runtime.exit_codes import RESUME, STOP_SIGNALS, Interrupted
from infcl_jax.training import Preemption

SECONDS = 60  # for a thread, on a busy machine


@pytest.fixture(autouse=True)
def received():
    """Signals that reached the handlers from before."""
    signals = []
    watched = (*STOP_SIGNALS, signal.SIGQUIT)
    previous = {n: signal.signal(n, lambda signum, frame: signals.append(signum)) for n in watched}
    yield signals
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.fixture
def exits(monkeypatch):
    """Statuses with which a thread would have ended the process."""
    statuses = queue.Queue()

    def leave(status):
        statuses.put(status)
        raise SystemExit  # ends the thread alone

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # that of pytest reports SystemExit
    return statuses


@pytest.fixture
def other(monkeypatch):
    """Channel of rank 1 of two; the process of the test is rank 0."""
    own, other = Service(2).channels()
    monkeypatch.setattr(preemption, "channel", lambda: own)
    return other


def kill(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noticed_from_then_on(received, number):
    with Preemption() as stop:
        assert not stop.noticed(1)
        kill(number)
        kill(number)  # from a scheduler and a wrapper script
        assert stop.noticed(2)
        assert stop.noticed(3)
        assert str(stop.interruption(3)).endswith(
            f"saved step 3; the same command continues from there ({number.name})"
        )
        with pytest.raises(Interrupted, match=f"no new step to save.*{number.name}"):
            stop.check()
    assert received == []


@pytest.mark.parametrize(("signals", "error"), [(0, KeyError), (1, KeyError), (1, Interrupted)])
def test_the_former_handlers_are_back_afterwards(received, signals, error):
    with pytest.raises(error), Preemption() as stop:
        stop.noticed(1)
        for _ in range(signals):
            kill(signal.SIGTERM)
        raise error("saved")
    assert not any(thread.name == "preemption" for thread in threading.enumerate())
    for n in STOP_SIGNALS:
        kill(n)
    assert received == list(STOP_SIGNALS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ignored_signals_stay_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with Preemption() as stop:
        kill(number)
        assert not stop.noticed(1)
    assert signal.getsignal(number) == signal.SIG_IGN


def test_before_the_first_step_the_process_leaves_with_one_line(exits, capfd):
    with Preemption() as stop:
        kill(signal.SIGUSR1)  # waits until the other processes can learn of it
        stop.joined()
        assert exits.get(timeout=SECONDS) == RESUME
    line = "asked to stop: no new step to save; the same command continues the run (SIGUSR1)\n"
    assert capfd.readouterr().err == line


def test_a_second_signal_leaves_at_once(exits, monkeypatch):
    monkeypatch.setattr(preemption, "_REPEAT", 0)
    with Preemption() as stop:
        stop.noticed(1)
        kill(signal.SIGTERM)
        assert stop.noticed(2)
        kill(signal.SIGINT)
        assert exits.get(timeout=SECONDS) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGTERM, RESUME, r"not done after 0.01 s (stop_timeout), see"),
        (signal.SIGQUIT, 131, "left at once, see"),
    ],
)
def test_stacks_are_written_at_the_deadline_and_at_sigquit(exits, tmp_path, capfd, number, status, line):
    with Preemption(0.01, tmp_path) as stop:
        stop.noticed(1)
        kill(number)
        assert exits.get(timeout=SECONDS) == status
    (stacks,) = tmp_path.iterdir()
    assert "test_preemption.py" in stacks.read_text()
    assert f"{line} {stacks}" in capfd.readouterr().err


def test_all_processes_stop_at_the_call_after_the_latest_one(other):
    with Preemption() as stop:
        assert not stop.noticed(1)
        other.send("stop/tick", "3")
        other.send("stop/request", "SIGHUP, process 1")
        while len(other.received("stop/tick")) < 2:
            pass
        assert [stop.noticed(step) for step in (2, 3, 4)] == [False, False, True]
        assert "(SIGHUP, process 1)" in str(stop.interruption(4))


def test_a_signal_to_one_process_reaches_the_others(other):
    with Preemption() as stop:
        assert not stop.noticed(1)
        kill(signal.SIGTERM)
        while not other.received("stop/request"):
            pass
        other.send("stop/tick", "0")
        assert stop.noticed(2)
        assert other.received("stop/request") == {0: "SIGTERM, process 0"}


def test_a_process_that_cannot_continue_takes_the_others_along(other, exits):
    other.send("stop/left", "")
    other.send("stop/tick", "0")
    with pytest.raises(Interrupted), Preemption() as stop:
        stop.joined()
        thread = stop._threads[0]

        def join():  # in place of the thread that would end the process, once
            del thread.join
            exits.put(exits.get(timeout=SECONDS))

        thread.join = join
        raise Interrupted("workdir is in use")
    assert exits.get(timeout=SECONDS) == RESUME
    assert other.received("stop/request") == {0: "workdir is in use, process 0"}


def test_the_deadline_holds_for_a_stop_that_another_process_requested(other, exits, tmp_path):
    for topic, text in (("request", "SIGTERM, process 1"), ("tick", "3"), ("left", "")):
        other.send(f"stop/{topic}", text)
    with Preemption(0.01, tmp_path) as stop:
        stop.noticed(1)
        assert exits.get(timeout=SECONDS) == RESUME
    assert len(list(tmp_path.iterdir())) == 1


def test_ctrl_c_stops_an_interactive_run_but_not_its_process(exits, monkeypatch):
    with pytest.raises(KeyboardInterrupt), Preemption(interactive=True):
        kill(signal.SIGINT)  # before the first step
    with Preemption(0.0, interactive=True) as stop:
        stop.noticed(1)
        kill(signal.SIGINT)
        assert stop.noticed(2) and stop.interrupted
        kill(signal.SIGINT)  # within a second, as a wrapper script may send it again
        monkeypatch.setattr(preemption, "_REPEAT", 0)
        with pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)
    assert not any(thread.is_alive() for thread in stop._threads) and exits.empty()


def test_a_scheduler_ends_an_interactive_run_as_well(exits, tmp_path):
    with Preemption(0.01, tmp_path, interactive=True) as stop:
        stop.noticed(1)
        kill(signal.SIGINT)
        kill(signal.SIGTERM)
        assert exits.get(timeout=SECONDS) == RESUME
        assert not stop.interrupted


def test_outside_the_main_thread_only_other_processes_stop_a_run(received, other):
    def run():
        with Preemption() as stop:
            noticed.append(stop.noticed(1))
            kill(signal.SIGTERM)
            other.send("stop/request", "SIGHUP, process 1")
            other.send("stop/tick", "1")
            while len(other.received("stop/tick")) < 2:
                pass
            noticed.append(stop.noticed(2))

    noticed = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert noticed == [False, True] and received == [signal.SIGTERM]
