"""An own, bounded connection to the job's c10d store.

Three things about c10d stores shape this. A client serves one call at a time, so that a wait in one thread blocks
every other thread's calls: each thread here has an own client, and waits by polling. No call has a time limit against
a server that falls silent, as a lost node or a stopped process does (even `wait` goes on to wait for the answer to its
own cancellation): the connection's socket itself gets one. And the server may live in rank 0's process, held up by
nothing but references to the store object: a client keeps the object that it was made from, so that
destroy_process_group() does not take the server away.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from easyckpt.errors import PeerError, UsageError

T = TypeVar("T")

#: torch.distributed has its store classes only where it is built in, so they are looked up when used.
_dist: Final[Any] = dist

#: The one key that always exists.
ALIVE: Final = "easyckpt/alive"
#: Seconds that a healthy store gets to answer at least, however near the deadline is.
_GRACE: Final = 1.0


def store_of(group: Any) -> Any:
    """The store object that `group` was made with. UsageError for a group without one."""
    pair = _dist.distributed_c10d._world.pg_map.get(group)
    if pair is None or pair[1] is None:
        raise UsageError(
            "the process group has no c10d store (backend mpi, or destroyed): make it with init_method env://"
        )
    return pair[1]


def base_store(store: Any) -> Any:
    """`store` without the PrefixStores around it."""
    while isinstance(store, _dist.PrefixStore):
        store = store.underlying_store
    return store


class StoreClient:
    """One connection, for one thread at a time. Every call is bounded; a lost store raises PeerError for good."""

    def __init__(self, store: Any, timeout: float, world_size: int) -> None:
        """Connect to the server behind `store`. Calls are bounded by `timeout` seconds where none is given."""
        self._timeout = timeout
        self._kept: Any = store
        self._broken: str | None = None
        base = base_store(store)
        over_tcp = isinstance(base, _dist.TCPStore)
        self._place = f"{base.host}:{base.port}" if over_tcp else type(base).__name__
        before = _open_sockets()
        self._store: Any = self._guard(lambda: _second_client(base, timeout, world_size))
        self._socket = _new_socket(before, base.port) if over_tcp else None
        self._limit = 0.0
        self._guard(lambda: self._store.set_timeout(timedelta(seconds=timeout)))
        self._guard(lambda: self._store.set(ALIVE, b"1"))

    def set(self, key: str, value: bytes, deadline: float | None = None) -> None:
        """Write `key`; the next read by anybody sees it."""
        self._call(lambda: self._store.set(key, value), deadline)
        self.check([ALIVE], deadline)  # a set has no answer, and would be lost in silence with the server

    def get_many(self, keys: Sequence[str], deadline: float | None = None) -> list[bytes]:
        """The values of `keys`, which must all exist."""
        return self._call(lambda: [bytes(value) for value in self._store.multi_get(list(keys))], deadline)

    def check(self, keys: Sequence[str], deadline: float | None = None) -> bool:
        """Whether all `keys` exist."""
        return self._call(lambda: bool(self._store.check(list(keys))), deadline)

    def add(self, key: str, amount: int, deadline: float | None = None) -> int:
        """Add to a counter, which begins at 0; returns the sum."""
        return self._call(lambda: int(self._store.add(key, amount)), deadline)

    def delete(self, keys: Sequence[str], deadline: float | None = None) -> None:
        """Delete `keys`; those that do not exist are no error."""
        for key in keys:
            self._call(lambda key=key: self._store.delete_key(key), deadline)  # type: ignore[misc]

    def num_keys(self) -> int:
        """Number of keys in the whole store."""
        return self._call(lambda: int(self._store.num_keys()), None)

    def close(self) -> None:
        """Give up the connection, and the hold on the store object."""
        self._broken = "this connection to the c10d store was closed"
        self._store = self._kept = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _call(self, operation: Callable[[], T], deadline: float | None) -> T:
        if self._broken is not None:
            raise PeerError(self._broken)
        self._bound(self._timeout if deadline is None else max(deadline - time.monotonic(), _GRACE))
        return self._guard(operation)

    def _bound(self, seconds: float) -> None:
        """Let no answer of the server take longer than about `seconds`."""
        if self._socket is not None and not 0.9 * seconds <= self._limit <= seconds:
            interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
            self._limit = seconds

    def _guard(self, operation: Callable[[], T]) -> T:
        """Run `operation`; a failure of the store ends this client, whose stream may be out of step from then on."""
        try:
            return operation()
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._broken = (
                f"the c10d store at {self._place}, through which the ranks agree, is gone or does not answer:"
                f" {reason}. The process that hosts it (rank 0, or torchrun's agent) has probably ended:"
                " look at its log first, and restart the job"
            )
            raise PeerError(self._broken) from error


def _second_client(base: Any, timeout: float, world_size: int) -> Any:
    """A connection of our own to the same data as `base`."""
    if isinstance(base, _dist.HashStore):
        return base  # lives in this process, takes calls from many threads
    if isinstance(base, (_dist.TCPStore, _dist.FileStore)):
        clone = getattr(base, "clone", None)
        if clone is not None:
            return clone()
        if isinstance(base, _dist.FileStore):
            return _dist.FileStore(base.path, world_size)
        limit = timedelta(seconds=timeout)
        return _dist.TCPStore(base.host, base.port, None, False, limit, wait_for_workers=False)
    raise UsageError(
        f"the process group's store is a {type(base).__name__}, which easyckpt cannot open a second connection to:"
        " make the group with init_method env://, tcp:// or file://, under torchrun, or with a TCPStore of your own"
    )


def _open_sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of every open socket of this process; empty where the system does not tell."""
    found = set()
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return set()
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile, as the listing's own descriptor always is
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _new_socket(before: set[tuple[int, int]], port: int) -> socket.socket | None:
    """The socket that was not there `before` and is connected to `port`; None where it cannot be told for certain."""
    found: list[socket.socket] = []
    for descriptor, _ in _open_sockets() - before:
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(descriptor))
            connection.setblocking(True)  # shared with torch's descriptor; a default timeout would have changed it
            if _is_connected_to(connection, port):
                found.append(connection)
            else:
                connection.close()
    if len(found) == 1:
        return found[0]
    for connection in found:
        connection.close()
    return None


def _is_connected_to(connection: socket.socket, port: int) -> bool:
    try:
        return bool(connection.getpeername()[1] == port)
    except (OSError, IndexError):
        return False
