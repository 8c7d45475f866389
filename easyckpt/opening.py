"""Opening a root: its identity, this rank's arena, and the lease, by all ranks together."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from easyckpt import catalog
from easyckpt.config import CheckpointConfig
from easyckpt.dialects import Dialect
from easyckpt.distributed.agree import all_good, done_by_rank_0
from easyckpt.distributed.ranks import Ranks
from easyckpt.distributed.rendezvous import Channel, settle_locality
from easyckpt.errors import EasyckptError, ForeignFormat, RootInUse, StorageError, UsageError
from easyckpt.events import EventLog, Warned
from easyckpt.format import layout, memory_names
from easyckpt.memory import budget
from easyckpt.memory.arena import Arena
from easyckpt.memory.leftovers import OwnerNote
from easyckpt.memory.owner import OwnerLock
from easyckpt.memory.place import DEFAULT_DIRECTORY, memory_directory, user_name
from easyckpt.saving.line import new_root
from easyckpt.storage.lease import Lease
from easyckpt.storage.lease_chain import place_of
from easyckpt.storage.local import LocalStorage

#: How long a rank looks for the root that rank 0 has opened, and between two looks.
ROOT_SECONDS, ROOT_POLL_SECONDS = 5.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRoot:
    """A root that this job owns, as one rank sees it."""

    storage: LocalStorage
    dialect: Dialect
    run: str
    arena_id: str
    incarnation: str
    lease: Lease | None
    """Rank 0's."""
    arena: Arena


def uses_cuda() -> bool:
    """Whether this process has touched a GPU: building the model there has, before the Checkpointer is made."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def open_root(
    root: str | os.PathLike[str],
    config: CheckpointConfig,
    ranks: Ranks,
    channel: Channel,
    *,
    events: EventLog,
    dialect: Dialect,
) -> tuple[OpenedRoot, Ranks]:
    """Own `root` and this rank's arena. All ranks call it; an error of one is raised on all."""
    storage = dialect.place(root, config.direct_io)
    naming = dialect.naming
    identity = done_by_rank_0(
        channel, ranks, "opening the root", lambda: _identify(storage, naming), config.peer_timeout
    )
    directory, in_memory = memory_directory(config.memory_dir)
    if not in_memory:
        wanted = config.memory_dir or DEFAULT_DIRECTORY
        message = f"{wanted} cannot be used: snapshots are kept in private memory and die with the process"
        events.emit(Warned(message=message))
    ranks = settle_locality(ranks, channel, _node(directory), config.peer_timeout)
    arena: Arena | None = None
    failure: Exception | None = None
    try:
        _see_root(storage, ranks, min(ROOT_SECONDS, config.peer_timeout / 2))
        arena = _own_arena(directory, in_memory, identity, root=storage.root, ranks=ranks, config=config)
    except RootInUse as error:
        failure = RootInUse(f"{storage.root} is in use: {error}")
    except (EasyckptError, OSError) as error:
        failure = error
    try:
        all_good(channel, "owning the memory", failure, config.peer_timeout)
        assert arena is not None
        lease = _take_lease(storage, arena, identity, ranks=ranks, channel=channel, config=config, events=events)
    except BaseException:
        if arena is not None:
            arena.close(remove=False)
        raise
    return OpenedRoot(storage=storage, dialect=dialect, lease=lease, arena=arena, **identity), ranks


def _node(directory: str) -> str:
    """Which memory directory `directory` is: hosts that were made alike have the same name, devices and inodes."""
    found = os.stat(directory)
    return f"{socket.gethostname()}/{place_of(os.path.realpath(directory)) or f'{found.st_dev:x}/{found.st_ino:x}'}"


def _identify(storage: LocalStorage, naming: layout.NamingScheme) -> dict[str, str]:
    """Rank 0: the run's identity, written into a new root."""
    if os.path.exists(storage.root) and not os.path.isdir(storage.root):
        raise ForeignFormat(f"{storage.root} is a file, not a directory for checkpoints")
    if os.path.islink(storage.root) and not os.path.exists(storage.root):
        raise StorageError(f"{storage.root} is a link to {os.readlink(storage.root)}, and there is nothing")
    before, _, step = storage.root.rpartition("@")
    if step.isdecimal() and not os.path.exists(storage.root) and os.path.exists(os.path.join(before, layout.ROOT_FILE)):
        raise UsageError(
            f"{storage.root}: no such directory; ROOT@STEP is for the command line. Here it is "
            f"Checkpointer({before!r}, ...) and load(step={int(step)})"
        )
    storage.makedirs(layout.EVENTS)
    record = catalog.read_root(storage)
    if record is None:
        storage.link_exclusive(layout.ROOT_FILE, new_root(storage, naming).to_bytes())
        record = catalog.read_root(storage)
        assert record is not None
    return {
        "run": record.run,
        "arena_id": memory_names.arena_id(record.run, os.path.realpath(storage.root)),
        "incarnation": secrets.token_hex(4),
    }


def _see_root(storage: LocalStorage, ranks: Ranks, timeout: float) -> None:
    """A network file system may remember for a while that the root was not there yet."""
    deadline = time.monotonic() + timeout
    while not os.path.isdir(storage.root) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(storage.root))  # has it look again
        time.sleep(ROOT_POLL_SECONDS)
    if not os.path.isdir(storage.root):
        raise StorageError(
            f"rank {ranks.rank} does not see {storage.root}, which rank 0 has opened: is the root on a file system "
            "that all nodes share?"
        )


def _own_arena(
    directory: str,
    in_memory: bool,
    identity: Mapping[str, str],
    *,
    root: str,
    ranks: Ranks,
    config: CheckpointConfig,
) -> Arena:
    """The arena of this rank, with what dead processes have left in it."""
    user, arena_id = user_name(), identity["arena_id"]
    with budget.node_lock(directory, user):
        share = _budget_share(directory, user, arena_id, ranks) if in_memory else 0
    arena = Arena(
        directory,
        user,
        arena_id,
        ranks.rank,
        config.slots,
        run=identity["run"],
        incarnation=identity["incarnation"],
        budget_bytes=share,
        pin=uses_cuda(),
        note=OwnerNote.of(root).to_bytes(),
    )
    try:
        for view in arena.adopt():
            view.close()
    except BaseException:
        arena.close(remove=False)
        raise
    return arena


def _budget_share(directory: str, user: str, arena_id: str, ranks: Ranks) -> int:
    """Bytes of shared memory for this rank; what this arena's ranks hold already counts as theirs."""
    usable = budget.available(directory).usable + budget.held_bytes(directory, user, arena_id)
    return usable // ranks.local_world_size


def _take_lease(
    storage: LocalStorage,
    arena: Arena,
    identity: Mapping[str, str],
    *,
    ranks: Ranks,
    channel: Channel,
    config: CheckpointConfig,
    events: EventLog,
) -> Lease | None:
    """The right to write the root, which rank 0 takes for all."""
    owner = memory_names.owner_file(arena.user, arena.arena_id, arena.rank)
    lease = Lease(
        storage,
        root_lock_path=os.path.join(arena.directory, owner),
        incarnation=identity["incarnation"],
        run=identity["run"],
        timeout=config.lease_timeout,
        is_free=OwnerLock.is_free,
    )

    def take() -> None:
        lease.acquire(lambda message: events.emit(Warned(message=message)))

    try:
        done_by_rank_0(channel, ranks, "taking the lease", take, config.peer_timeout + 2 * config.lease_timeout)
    except BaseException:
        lease.release()  # it was taken where only another rank has failed
        raise
    return lease if ranks.rank == 0 else None
