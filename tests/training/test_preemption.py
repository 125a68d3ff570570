"""SIGTERM and Ctrl-C are caught once; previous handlers return on exit."""

import os
import signal

import pytest

from infcl_jax.training import Preemption

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def received():
    """Signals that reached the handlers from before."""
    signals = []
    previous = {n: signal.signal(n, lambda signum, frame: signals.append(signum)) for n in SIGNALS}
    yield signals
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noticed_from_then_on(received, number):
    with Preemption() as preemption:
        assert not preemption.noticed(1)
        os.kill(os.getpid(), number)
        assert preemption.noticed(2)
        assert preemption.noticed(3)
    assert received == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_would_end_the_process(received, number):
    with Preemption():
        os.kill(os.getpid(), number)
        assert [signal.getsignal(n) for n in SIGNALS] == [signal.SIG_DFL] * 2


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("signals", [0, 1])
def test_the_former_handler_is_back_afterwards(received, signals, number):
    with pytest.raises(KeyError), Preemption():
        for _ in range(signals):
            os.kill(os.getpid(), number)
        raise KeyError
    for n in SIGNALS:
        os.kill(os.getpid(), n)
    assert received == SIGNALS


def test_a_background_job_goes_on_ignoring_ctrl_c(received):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGINT)
        assert not preemption.noticed(1)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
