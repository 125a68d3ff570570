"""SIGTERM is noticed once, a second one is not caught, and afterwards everything is as before."""

import os
import signal

import pytest

from infcl_jax.training import Preemption


@pytest.fixture
def received():
    """Signals that reached the handler from before."""
    signals = []
    previous = signal.signal(signal.SIGTERM, lambda signum, frame: signals.append(signum))
    yield signals
    signal.signal(signal.SIGTERM, previous)


def test_sigterm_is_noticed_from_then_on(received):
    with Preemption() as preemption:
        assert not preemption.noticed(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.noticed(2)
        assert preemption.noticed(3)
    assert received == []


def test_a_second_sigterm_would_end_the_process(received):
    with Preemption():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("signals", [0, 1])
def test_the_former_handler_is_back_afterwards(received, signals):
    with pytest.raises(KeyError), Preemption():
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyError
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]
