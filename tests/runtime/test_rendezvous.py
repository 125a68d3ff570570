"""Rendezvous of the processes of a run: one run on a port, and one line for every other."""

import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import runs

from infcl_jax.runtime import rendezvous
from infcl_jax.runtime.rendezvous import meet, parse_address

IN_USE = (
    "^the coordinator's port is in use by another run or program: localhost:{}; choose another COORDINATOR_ADDRESS$"
)


class Watch:
    """The parts of a `ProcessWatch` that a rendezvous uses."""

    def __init__(self, folder, lead_may_run=False):
        folder.mkdir(exist_ok=True)
        self.folder, self.lead_may_run = folder, lambda: lead_may_run

    def leave_incomplete(self):
        raise InterruptedError("incomplete")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(rendezvous, "_ANSWER", 0.5)
    monkeypatch.setattr(rendezvous, "_BUSY", 0.3)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as executor:
        yield executor


def arrive(port, rank, watch, count=2, timeout=10, host="localhost"):
    lost = {"start_timeout": timeout, "lost_process_timeout": 1}
    meet(parse_address(f"{host}:{port}"), rank, count, watch=watch, **lost)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node-7.cluster:1", "node-7.cluster", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_addresses_are_split(text, host, port):
    assert parse_address(text)[:3] == (text, host, port)


@pytest.mark.parametrize(
    "text",
    ["host", ":80", "host:0", "host:65536", "host:٣", "::1:80", "[::1]", "[host]:80", "http://host:80", "host:80\n"],
)
def test_other_addresses_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"a port from 1 to 65535, got {text!r}") + "$"):
        parse_address(text)


@pytest.mark.parametrize(("order", "host"), [((0, 1, 2), "localhost"), ((2, 1, 0), "127.0.0.1")])
def test_processes_meet_in_any_order_and_free_the_port(tmp_path, threads, order, host):
    port, ranks = runs.free_port(), []
    for rank in order:
        ranks.append(threads.submit(arrive, port, rank, Watch(tmp_path), 3, host=host))
        time.sleep(0.1)
        assert len(ranks) == 3 or not ranks[0].done()
    assert [rank.result() for rank in ranks] == [None] * 3
    socket.create_server(("", port)).close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_run_is_refused_while_the_first_waits(tmp_path, threads, rank):
    port = runs.free_port()
    first = threads.submit(arrive, port, 0, Watch(tmp_path / "a"))
    time.sleep(0.3)
    with pytest.raises(ValueError, match=IN_USE.format(port)):
        arrive(port, rank, Watch(tmp_path / "b"))
    arrive(port, 1, Watch(tmp_path / "a"))
    assert first.result() is None


SETTINGS = b"\x00\x00\x18\x04\x00\x00\x00\x00\x00\x00\x04\x00@\x00\x00"  # first frame of gRPC


@contextlib.contextmanager
def program(first=b""):
    """Listen on a port, and greet each connection before closing it."""

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(first)

    with socket.create_server(("", 0)) as server:
        if first is not None:
            threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("rank", "first"), [(0, SETTINGS), (0, None), (1, SETTINGS), (1, b"infcl"), (1, None)])
def test_a_port_in_use_is_an_error_within_seconds(tmp_path, first, rank):
    with program(first) as port, pytest.raises(ValueError, match=IN_USE.format(port)):
        arrive(port, rank, Watch(tmp_path), timeout=60)


def test_process_0_on_another_host_does_not_connect_to_its_coordinator(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"127.0.0.1:{runs.free_port()}")
    with program(SETTINGS) as port, pytest.raises(ValueError, match=IN_USE.format(port)):
        arrive(port, 0, Watch(tmp_path), timeout=60)


def test_a_former_process_0_of_the_run_may_end_first(tmp_path, threads):
    with program(SETTINGS) as port:
        late = [threads.submit(arrive, port, rank, Watch(tmp_path, lead_may_run=True)) for rank in (0, 1)]
        time.sleep(0.8)
        assert not any(process.done() for process in late)
    assert [process.result() for process in late] == [None, None]


def test_a_forwarded_port_may_close_connections_until_process_0_listens(tmp_path, threads):
    with program(b"") as port:
        late = threads.submit(arrive, port, 1, Watch(tmp_path))
        time.sleep(0.8)
        assert not late.done()
    arrive(port, 0, Watch(tmp_path))
    assert late.result() is None


def test_a_process_that_ends_is_no_longer_present(tmp_path, threads):
    port = runs.free_port()
    first = threads.submit(arrive, port, 0, Watch(tmp_path), 3)
    time.sleep(0.3)
    with pytest.raises(InterruptedError):
        arrive(port, 1, Watch(tmp_path), 3, timeout=0.5)
    others = [threads.submit(arrive, port, rank, Watch(tmp_path), 3) for rank in (2, 1)]
    assert [process.result() for process in (first, *others)] == [None] * 3


@pytest.mark.parametrize(
    ("rank", "count", "text"),
    [
        (1, 3, "expected NUM_PROCESSES=2, as process 0 has, got 3 in process 1"),
        (0, 2, "expected one process 0, got two"),
    ],
)
def test_processes_that_disagree_with_process_0_are_refused(tmp_path, threads, rank, count, text, monkeypatch):
    port = runs.free_port()
    first = threads.submit(arrive, port, 0, Watch(tmp_path))
    time.sleep(0.3)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"127.0.0.1:{runs.free_port()}")
    with pytest.raises(ValueError, match=f"^localhost:{port}: {text}"):
        arrive(port, rank, Watch(tmp_path), count)
    arrive(port, 1, Watch(tmp_path))
    assert first.result() is None


@pytest.mark.parametrize("message", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"rank": []}\n', b"[" * 70_000])
def test_strangers_do_not_disturb_a_rendezvous(tmp_path, threads, message):
    port = runs.free_port()
    first = threads.submit(arrive, port, 0, Watch(tmp_path))
    time.sleep(0.3)
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(message)
        arrive(port, 1, Watch(tmp_path))
    assert first.result() is None


def test_missing_processes_end_the_wait(tmp_path):
    with pytest.raises(InterruptedError, match="incomplete"):
        arrive(runs.free_port(), 1, Watch(tmp_path), timeout=0.5)
    with pytest.raises(TimeoutError, match=r"^expected 2 processes within 0\.5 s at [^\n]*, got fewer$"):
        arrive(runs.free_port(), 0, None, timeout=0.5)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 70])
def test_a_host_without_an_address_is_named(tmp_path, host):
    with pytest.raises(ValueError, match=f"^expected a host that has an address in COORDINATOR_ADDRESS={host}:1234: "):
        arrive(1234, 1, Watch(tmp_path), timeout=0.5, host=host)


def test_a_folder_is_recognized_by_its_path_or_its_inode():
    for own, other, same in (
        *((["/a", "7"], ["/b", "7"], True), (["/a", "7"], ["/a", "8"], True), (["/a", "7"], ["/b", "8"], False)),
        *((["/a", "7"], [], False), (["/a", "7"], None, False), ([], [], True)),
    ):
        server = rendezvous._Server(None, {"count": 2, "folder": own})
        assert (server._admit({"rank": 1, "count": 2, "folder": other}, None) == "") == same
