"""Messages between the processes of a run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from coordination import Service

from infcl_jax.runtime import processes


@pytest.fixture
def run_all(monkeypatch):
    """Call a function once for each of its arguments, in threads that stand for processes."""

    def run(function, arguments):
        service, own = Service(len(arguments)), {}
        monkeypatch.setattr(processes, "channel", lambda: own[threading.get_ident()])

        def process(channel, argument):
            own[threading.get_ident()] = channel
            return function(argument)

        with ThreadPoolExecutor(len(arguments)) as threads:
            results = list(threads.map(process, service.channels(), arguments))
        return results, service

    return run


def test_a_single_process_needs_no_channel():
    assert processes.channel() is None
    assert processes.is_lead()
    assert processes.gather({"a": 1}) == [{"a": 1}]
    assert processes.local_processes() == (1, 1)


@pytest.mark.parametrize("values", [[[3, 1, 3]], [[5, 2**40, 1], [], [7, 5]], [[], []]])
def test_union_of_the_integers_of_all_processes(run_all, values):
    unions, _ = run_all(processes.union, values)
    assert unions == [sorted({value for row in values for value in row})] * len(values)


def test_gathered_values_do_not_stay_in_the_store(run_all):
    def gather(rank):
        return [processes.gather([rank, number]) for number in range(20)]

    results, service = run_all(gather, range(3))
    assert results == [[[[rank, number] for rank in range(3)] for number in range(20)]] * 3
    assert len(service.values) <= 2 * 3


def test_processes_that_do_not_meet_in_time_are_told():
    present, absent = Service(2).channels()
    assert not present.meets("failed/1", 0.01)
    assert not absent.meets("failed/1", 0.01)


def test_processes_meet():
    channels = Service(2).channels()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda channel: channel.meets("failed/1", 60.0), channels)) == [True, True]


@pytest.mark.parametrize(
    ("places", "counts"),
    [
        ([("here", [0, 1])] * 4, [(4, 4)] * 4),
        ([("here", [0, 1]), ("here", [2, 3]), ("here", [0, 1])], [(3, 2), (3, 1), (3, 2)]),
        ([("here", [0, 1]), ("there", [0, 1])], [(1, 1), (1, 1)]),
    ],
)
def test_processes_that_share_a_host_and_its_cores_are_counted(monkeypatch, places, counts):
    for own, expected in zip(places, counts, strict=True):
        monkeypatch.setattr("socket.gethostname", lambda own=own: own[0])
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, own=own: set(own[1]))
        monkeypatch.setattr(
            processes, "gather", lambda value, own=own: (value == list(own)) and [list(p) for p in places]
        )
        assert processes.local_processes() == expected
