"""How the rooms of a Checkpointer are built and joined; `engine` only uses what comes out of here."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from easyckpt import catalog
from easyckpt.config import CheckpointConfig
from easyckpt.distributed.agree import all_good, done_by_rank_0
from easyckpt.distributed.mailbox import Mailbox
from easyckpt.distributed.ranks import Ranks, discover
from easyckpt.distributed.rendezvous import Channel, connect, settle_locality
from easyckpt.errors import EasyckptError, ForeignFormat, OutOfSpace
from easyckpt.events import EventLog, Warned
from easyckpt.format import layout
from easyckpt.memory import budget
from easyckpt.memory.arena import Arena
from easyckpt.memory.owner import OwnerLock
from easyckpt.memory.place import DEFAULT_DIRECTORY, memory_directory, user_name
from easyckpt.memory.slot import Slot
from easyckpt.saving.accumulation import AccumulationWatch
from easyckpt.saving.commit import CommitContext
from easyckpt.saving.coordinator import Coordinator
from easyckpt.saving.coordinator_thread import CoordinatorParts
from easyckpt.saving.cuda_copying import make_copier
from easyckpt.saving.flusher import Flusher
from easyckpt.saving.line import new_root
from easyckpt.saving.messages import Flush
from easyckpt.saving.metrics import Metrics
from easyckpt.saving.saver import SaverParts
from easyckpt.saving.scalers import ScalerWatch
from easyckpt.saving.sizing import expected_bytes
from easyckpt.saving.slots import TAIL_SLACK_BYTES
from easyckpt.saving.staging import Stager
from easyckpt.state.capture import Capture, StateCapture
from easyckpt.storage.lease import Lease
from easyckpt.storage.local import LocalStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRoot:
    """A root that this job owns, as one rank sees it."""

    storage: LocalStorage
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
    root: str, config: CheckpointConfig, ranks: Ranks, channel: Channel, events: EventLog
) -> tuple[OpenedRoot, Ranks]:
    """Own `root` and this rank's arena. All ranks call it; an error of one is raised on all."""
    storage = LocalStorage(root, direct_io=config.direct_io)
    identity = done_by_rank_0(channel, ranks, "opening the root", lambda: _identify(storage), config.peer_timeout)
    directory, in_memory = memory_directory(config.memory_dir)
    if not in_memory:
        wanted = config.memory_dir or DEFAULT_DIRECTORY
        message = f"{wanted} cannot be used: snapshots are kept in private memory and die with the process"
        events.emit(Warned(message=message))
    node = f"{socket.gethostname()}/{os.stat(directory).st_dev}/{os.stat(directory).st_ino}"
    ranks = settle_locality(ranks, channel, node, config.peer_timeout)
    arena: Arena | None = None
    failure: Exception | None = None
    try:
        arena = _own_arena(directory, in_memory, identity, ranks, config)
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
    return OpenedRoot(storage=storage, lease=lease, arena=arena, **identity), ranks


def _identify(storage: LocalStorage) -> dict[str, str]:
    """Rank 0: the run's identity, written into a new root."""
    if os.path.exists(storage.root) and not os.path.isdir(storage.root):
        raise ForeignFormat(f"{storage.root} is a file, not a directory for checkpoints")
    storage.makedirs(layout.EVENTS)
    record = catalog.read_root(storage)
    if record is None:
        storage.link_exclusive(layout.ROOT_FILE, new_root(storage, layout.NativeNaming()).to_bytes())
        record = catalog.read_root(storage)
        assert record is not None
    return {
        "run": record.run,
        "arena_id": layout.arena_id(record.run, os.path.realpath(storage.root)),
        "incarnation": secrets.token_hex(4),
    }


def _own_arena(
    directory: str, in_memory: bool, identity: Mapping[str, str], ranks: Ranks, config: CheckpointConfig
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
    owner = layout.owner_file(arena.user, arena.arena_id, arena.rank)
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


def committed_by(storage: LocalStorage, naming: layout.NamingScheme) -> Callable[[Flush], bool]:
    """Answers whether an attempt has become a checkpoint, by looking at the root."""

    def look(flush: Flush) -> bool:
        entry = catalog.inspect(storage, naming.committed(flush.step), naming)
        return entry.problem is None and entry.manifest is not None and entry.manifest.attempt == flush.attempt

    return look


def dead_peers(arena: Arena, ranks: Ranks) -> list[int]:
    """Ranks of this node whose processes have certainly ended: nobody holds their arena's lock."""

    def has_died(rank: int) -> bool:
        owner = layout.owner_file(arena.user, arena.arena_id, rank)
        return OwnerLock.is_free(os.path.join(arena.directory, owner)) is True

    return [rank for rank in range(ranks.world_size) if rank != ranks.rank and has_died(rank)]


def join(
    opened: OpenedRoot,
    *,
    config: CheckpointConfig,
    ranks: Ranks,
    channel: Channel,
    mailbox: Mailbox,
    capture: StateCapture,
    scalers: Sequence[torch.amp.GradScaler],
    events: EventLog,
    metrics: Metrics,
    undo: contextlib.ExitStack,
) -> SaverParts:
    """Build the saving half around an opened root. How to end what runs then is entered into `undo`."""
    naming = layout.NativeNaming()
    flusher = _make_flusher(opened, naming, config, ranks, events)
    undo.callback(flusher.stop, config.exception_drain_timeout)
    coordinator = _make_coordinator(opened, naming, config, ranks, mailbox=mailbox, flusher=flusher, events=events)
    undo.callback(coordinator.abort, config.exception_drain_timeout)
    stager = _make_stager(opened.arena, coordinator, capture, scalers, config=config, events=events)
    undo.callback(stager.close)
    accumulation = AccumulationWatch(capture.optimizers())
    undo.callback(accumulation.close)
    return SaverParts(
        config=config,
        ranks=ranks,
        channel=channel,
        storage=opened.storage,
        naming=naming,
        run=opened.run,
        arena_id=opened.arena_id,
        incarnation=opened.incarnation,
        capture=capture,
        arena=opened.arena,
        stager=stager,
        accumulation=accumulation,
        coordinator=coordinator,
        flusher=flusher,
        events=events,
        metrics=metrics,
        mailbox=mailbox,
    )


def _make_flusher(
    opened: OpenedRoot, naming: layout.NamingScheme, config: CheckpointConfig, ranks: Ranks, events: EventLog
) -> Flusher:
    check = opened.lease.check if opened.lease is not None else lambda: None
    return Flusher(
        CommitContext(storage=opened.storage, naming=naming, check_lease=check),
        ranks,
        opened.run,
        keep_newest=config.max_ckpt_num,
        min_free_bytes=config.min_free_bytes,
        emit=events.emit,
    )


def _make_coordinator(
    opened: OpenedRoot,
    naming: layout.NamingScheme,
    config: CheckpointConfig,
    ranks: Ranks,
    *,
    mailbox: Mailbox,
    flusher: Flusher,
    events: EventLog,
) -> Coordinator:
    parts = CoordinatorParts(
        ranks=ranks,
        mailbox=mailbox,
        arena=opened.arena,
        flusher=flusher,
        config=config,
        emit=events.emit,
        committed_by=committed_by(opened.storage, naming),
        dead_peers=lambda: dead_peers(opened.arena, ranks),
    )
    return Coordinator(parts, incarnation=opened.incarnation)


def _make_stager(
    arena: Arena,
    coordinator: Coordinator,
    capture: StateCapture,
    scalers: Sequence[torch.amp.GradScaler],
    *,
    config: CheckpointConfig,
    events: EventLog,
) -> Stager:
    def sealed(step: int, slot: Slot) -> None:
        arena.release(slot)
        coordinator.sealed(step)

    def discarded(step: int, slot: Slot, reason: str) -> None:
        arena.release(slot)
        coordinator.lacks(step, f"its snapshot was discarded: {reason}")

    return Stager(
        make_copier(uses_cuda()),
        optimizers=capture.optimizers(),
        scalers=ScalerWatch(scalers),
        overlap=config.overlap,
        checksum=config.memory_checksum,
        emit=events.emit,
        on_sealed=sealed,
        on_discarded=discarded,
    )


def reserve(now: Capture, capture: StateCapture, opened: OpenedRoot, config: CheckpointConfig) -> None:
    """Have memory for the state as it will be, in the background; `now` is the state as it is.

    Raises OutOfSpace when storage has no room for one checkpoint of that size: rotation deletes only after a commit.
    """
    nbytes = expected_bytes(now.layout.image_bytes, capture.optimizers(), config.optimizer_factor)
    # (what a state that grows needs to be described grows with it)
    growth = max(1.0, min(4.0, nbytes / max(1, now.layout.image_bytes)))
    tail = int(growth * len(now.layout.encoded)) + 2 * len(now.objects) + TAIL_SLACK_BYTES
    free = opened.storage.free_bytes()
    if opened.lease is not None and free < nbytes + config.min_free_bytes:
        raise OutOfSpace(
            f"{opened.storage.root}: a checkpoint will take about {nbytes / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are "
            "free. Free space, or choose another root."
        )
    opened.arena.ensure(nbytes + nbytes // 64, tail)


def meet(process_group: Any, config: CheckpointConfig) -> tuple[Ranks, Channel, Mailbox]:
    """Find the other ranks."""
    ranks = discover(process_group)
    channel, mailbox = connect(ranks, "checkpointer", config.peer_timeout)
    return ranks, channel, mailbox
