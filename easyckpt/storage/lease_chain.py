"""What a lease looks like in storage: a record, and behind it the chain of those that have succeeded its owner."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from easyckpt.errors import EasyckptError
from easyckpt.format import layout
from easyckpt.format.manifest import LeaseRecord
from easyckpt.storage import process
from easyckpt.storage.base import Storage

_log = logging.getLogger("easyckpt")
_MAX_CHAIN = 1000


@dataclass(frozen=True, slots=True)
class Seen:
    """The lease file and the successor files behind it, as bytes: any change of them is a sign of life."""

    chain: tuple[bytes, ...]

    @property
    def owner(self) -> LeaseRecord | None:
        """The record at the end of the chain; None where this version cannot read it."""
        return _parsed(self.chain[-1])

    @property
    def tokens(self) -> list[str]:
        """One token for each record."""
        return [_token_of(data) for data in self.chain]


def _parsed(data: bytes) -> LeaseRecord | None:
    try:
        return LeaseRecord.from_bytes(data)
    except EasyckptError:
        return None


def _token_of(data: bytes) -> str:
    record = _parsed(data)
    return record.token if record is not None else "unreadable-" + hashlib.sha256(data).hexdigest()[:32]


def successor_file(token: str) -> str:
    """Its creation, possible once, succeeds the owner of `token`."""
    return layout.temp_file(layout.LEASE, token)


def look(storage: Storage) -> Seen | None:
    """What the storage says now; None where there is no lease."""
    chain: list[bytes] = []
    path = layout.LEASE
    while len(chain) < _MAX_CHAIN:
        try:
            chain.append(storage.read(path))
        except FileNotFoundError:
            break
        path = successor_file(_token_of(chain[-1]))
    return Seen(tuple(chain)) if chain else None


def claim(storage: Storage, path: str, data: bytes) -> bool:
    """Create `path` if nobody has; False too where a new owner has tidied up meanwhile: look again then."""
    try:
        return storage.link_exclusive(path, data)
    except FileNotFoundError:
        return False


def remove_leftovers(storage: Storage, owner: str) -> None:
    """Remove what renewals and take-overs that were cut short by a kill have left; `owner` is the owner's token.

    To be called by the owner. Whoever still has such a file in hand is none, and finds out.
    """
    try:
        for name in storage.listdir(""):
            if layout.is_beside_lease(name) and name != successor_file(owner):
                with contextlib.suppress(FileNotFoundError):
                    storage.remove(name)
    except (EasyckptError, OSError) as error:  # they are small, and the next owner tries again
        _log.warning("%s: removing the leftovers of an earlier lease failed: %s", storage.root, error)


def describe(owner: LeaseRecord | None) -> str:
    """`owner` in words, for messages; None: a record that could not be read."""
    if owner is None:
        return f"an owner whose {layout.LEASE} cannot be read here (damaged, or of a newer version)"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(owner.time, 0), 2**33)))
    return f"process {owner.pid} on host {owner.host} (run {owner.run}, last renewed {since} by its own clock)"


def lives(owner: LeaseRecord, is_free: Callable[[str], bool | None]) -> bool | None:
    """Whether `owner` lives, by the record lock that it has held for life; None where nothing here can tell.

    Where the lock's file is gone, the process itself may be seen to be gone too. `is_free` as for a Lease. This takes
    nothing and writes nothing.
    """
    free = is_free(owner.lock) if lived_here(owner) else None
    if free is not None:
        return not free
    same_host = owner.host == socket.gethostname()  # machines that are copies of each other have one boot's name
    return False if same_host and process.is_dead(owner.pid, owner.process) else None


def why_unknown(owner: LeaseRecord | None) -> str:
    """Why nothing here proves that `owner` is dead, in words."""
    if owner is None:
        return "nothing here tells whether it lives"
    if owner.host != socket.gethostname():
        return "the end of a process on another host cannot be seen here"
    if process.is_near(owner.process):
        return "a process of this number is still there"
    return "it ran in another container or before a restart of the host, and its lock cannot be asked"


def lived_here(owner: LeaseRecord) -> bool:
    """Whether the lock that `owner` held can be asked here: it is on this host, and the file is still the same one."""
    return bool(owner.boot) and (owner.host, owner.boot) == (socket.gethostname(), place_of(owner.lock))


def place_of(lock: str | None) -> str | None:
    """The kernel that runs here and the very file that `lock` names; None where there is no such file to ask.

    The file's identity counts, not its path alone: containers of one host have memory directories of the same name
    and different content, and a system that removes shared memory at logout leaves the path to a new file. That one
    being free says nothing about a process that holds the other.
    """
    try:
        found = os.lstat(lock or "")
    except OSError:
        return None
    kernel = process.boot()
    return None if kernel is None else f"{kernel}/{found.st_dev:x}/{found.st_ino:x}"
