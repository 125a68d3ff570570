"""Rendezvous of a run's processes, before JAX opens the coordinator's port.

The coordination service of JAX does not know runs: a process of another run that connects ends both. Therefore
process 0 first listens on the port alone, which fails if a program uses it. All processes, process 0 included, connect
and name their run. Once all are present, process 0 closes the socket, and JAX starts its service on the same port.
"""

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
from typing import Any, NamedTuple

from infcl_jax.runtime.file_io import parse_json
from infcl_jax.runtime.printable import printable
from infcl_jax.runtime.process_watch import DETECTION, ProcessWatch

# No digits but ASCII's; brackets around an IPv6 address, as in a URL.
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\[\]:/\s]+)):([0-9]{1,5})")
_GREETING, _GO = b"infcl_jax rendezvous 1\n", b"go\n"
_OTHER_RUN = "another run"
_LINE = 65_536  # bytes of a message at most
_RETRY = 0.2  # seconds between two connections
_ANSWER = 15.0  # seconds in which process 0 greets a process, on a busy machine
_BUSY = 3.0  # seconds for which a port without a greeting is not yet an error, since process 0 may be switching to JAX
_ACCEPT = 0.1  # seconds between two looks at whether all processes are present


class Address(NamedTuple):
    """Address of the coordinator."""

    text: str  # as JAX reads it
    host: str  # name or IP address of the host of process 0
    port: int
    variable: str  # environment variable that sets the port

    def in_use(self) -> ValueError:
        """Return the error of a port that another program uses."""
        return ValueError(
            f"the coordinator's port is in use by another run or program: {self.text}; choose another {self.variable}"
        )


def parse_address(text: str, variable: str = "COORDINATOR_ADDRESS") -> Address:
    """Parse HOST:PORT, where HOST is a name, an IPv4 address or an IPv6 address in brackets."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 65_536:
        raise ValueError(
            f"expected COORDINATOR_ADDRESS as HOST:PORT or [IPV6]:PORT with a port from 1 to 65535, got {text!r}"
        )
    return Address(text, match[1] or match[2], int(match[3]), variable)


def meet(
    address: Address,
    rank: int,
    count: int,
    *,
    watch: ProcessWatch | None,
    start_timeout: float,
    lost_process_timeout: float,
) -> None:
    """Wait until all processes of the run are present.

    The folder of logs of the watch identifies the run. After `start_timeout` seconds, the watch ends this process.

    Raises:
      ValueError: the port is in use by another run or program, the host has no address, or the processes disagree.
      TimeoutError: some processes are missing, and there is no watch.
    """
    hello = {"rank": rank, "count": count, "folder": _identity(watch)}
    deadline = time.monotonic() + start_timeout

    def patience() -> float:
        """Return the seconds that a former process 0 may hold the port."""
        former = rank > 0 if watch is None else watch.lead_may_run()
        return lost_process_timeout + DETECTION if former else _BUSY

    if rank == 0:
        listener = _listen(address, count, time.monotonic() + min(patience(), start_timeout))
        threading.Thread(target=_Server(listener, hello).run, daemon=True).start()
    unresolved, busy_since = "", None
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((address.host, address.port), min(left, _ANSWER)) as connection:
                if connection.getsockname() == connection.getpeername():  # TCP connects an ephemeral port to itself
                    raise ConnectionRefusedError
                busy, reply = _introduce(connection, hello, deadline)
        except (socket.gaierror, UnicodeError) as error:  # a cluster may publish the name with process 0
            unresolved = getattr(error, "strerror", None) or str(error)
        except OSError:  # process 0 does not listen yet
            unresolved, busy_since = "", None
        else:
            unresolved = ""
            if reply == _GO:
                return
            if reply:
                refusal = printable(reply.decode(errors="replace").strip())
                raise address.in_use() if refusal == _OTHER_RUN else ValueError(f"{address.text}: {refusal}")
            busy_since = (busy_since or time.monotonic()) if busy else None
            if busy_since is not None and time.monotonic() - busy_since >= patience():
                raise address.in_use()
        time.sleep(_RETRY)
    if busy_since is not None and patience() == _BUSY:
        raise address.in_use()
    if unresolved:
        raise ValueError(f"expected a host that has an address in COORDINATOR_ADDRESS={address.text}: {unresolved}")
    if watch is not None:
        watch.leave_incomplete()
    raise TimeoutError(f"expected {count} processes within {start_timeout:g} s at {address.text}, got fewer")


def _introduce(connection: socket.socket, hello: dict[str, Any], deadline: float) -> tuple[bool, bytes]:
    """Return whether something else than a process 0 answers, and the reply.

    A forwarded port behind which nothing listens yet may close a connection at once.
    """
    with contextlib.suppress(OSError), connection.makefile("rb") as file:
        try:
            greeting = file.read(len(_GREETING))
        except TimeoutError:  # silent, or a service that waits for its own greeting
            return True, b""
        if greeting != _GREETING:
            return bool(greeting), b""
        connection.sendall(json.dumps(hello).encode() + b"\n")
        connection.settimeout(max(deadline - time.monotonic(), _RETRY))
        return False, file.readline(_LINE)
    return False, b""


def _identity(watch: ProcessWatch | None) -> list[str]:
    """Return path and inode of the log folder; mounts may differ in the path."""
    return [] if watch is None else [os.path.realpath(watch.folder), f"inode {watch.folder.stat().st_ino}"]


def _listen(address: Address, count: int, deadline: float) -> socket.socket:
    """Listen alone on the coordinator's port, on JAX's interfaces, once it is free."""
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    host = parse_address(bind).host if bind else "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    port = parse_address(bind).port if bind else address.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            # SO_REUSEADDR, so that connections of a former start do not count, without SO_REUSEPORT, which gRPC sets.
            return socket.create_server((host, port), family=family, backlog=count, dualstack_ipv6=host == "::")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise ValueError(
                    f"process 0 cannot listen on port {port} of {host}: {reason}; choose another {address.variable}"
                ) from error
            if time.monotonic() >= deadline:
                raise address.in_use() from error
        time.sleep(_RETRY)


class _Server:
    """Rendezvous in process 0."""

    def __init__(self, listener: socket.socket, hello: dict[str, Any]) -> None:
        self._listener, self._hello = listener, hello
        self._members: dict[int, socket.socket] = {}  # guarded by the lock
        self._lock = threading.Lock()
        self._complete = threading.Event()

    def run(self) -> None:
        """Greet processes until all are present, close the port and let them go on."""
        with self._listener:
            self._listener.settimeout(_ACCEPT)
            while not self._complete.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = self._listener.accept()
                    threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
        for connection in list(self._members.values()):
            with contextlib.suppress(OSError):
                connection.sendall(_GO)

    def _greet(self, connection: socket.socket) -> None:
        """Admit or refuse a process; a process that ends is no longer present."""
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(_ANSWER)
            connection.sendall(_GREETING)
            with connection.makefile("rb") as file:
                hello = parse_json(file.readline(_LINE), "the message of a process")
                if refusal := self._admit(hello, connection):
                    connection.sendall(f"{refusal}\n".encode())
                    return
                connection.settimeout(None)
                with contextlib.suppress(OSError):
                    file.read(1)  # returns once the process goes on or ends
                with self._lock:
                    if not self._complete.is_set():
                        del self._members[hello["rank"]]

    def _admit(self, hello: dict[str, Any], connection: socket.socket) -> str:
        """Return why a process is not admitted; empty if it is."""
        rank, count, own, folder = hello.get("rank"), self._hello["count"], self._hello["folder"], hello.get("folder")
        if own != folder and not (isinstance(folder, list) and any(name in folder for name in own)):
            return _OTHER_RUN
        if hello.get("count") != count or type(rank) is not int or not 0 <= rank < count:
            return f"expected NUM_PROCESSES={count}, as process 0 has, got {hello.get('count')} in process {rank}"
        with self._lock:
            if rank in self._members:
                return f"expected one process {rank}, got two; has the same command been started twice?"
            self._members[rank] = connection
            if len(self._members) == count:
                self._complete.set()
        return ""
