"""How the rooms of a Checkpointer are built and joined around an opened root; `engine` only uses what comes out."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from easyckpt import catalog
from easyckpt.auditing import Auditor
from easyckpt.config import CheckpointConfig
from easyckpt.distributed.mailbox import Mailbox
from easyckpt.distributed.ranks import Ranks, discover
from easyckpt.distributed.rendezvous import Channel, connect
from easyckpt.errors import LeaseLost, OutOfSpace
from easyckpt.events import EventLog, Measured, Warned
from easyckpt.format import layout, memory_names
from easyckpt.format.sizes import size_text
from easyckpt.loading.loader import Loader
from easyckpt.memory.arena import Arena
from easyckpt.memory.owner import OwnerLock
from easyckpt.memory.slot import Slot
from easyckpt.opening import OpenedRoot, uses_cuda
from easyckpt.saving import remains
from easyckpt.saving.accumulation import AccumulationWatch
from easyckpt.saving.commit import CommitContext
from easyckpt.saving.coordinator import Coordinator
from easyckpt.saving.coordinator_thread import CoordinatorParts
from easyckpt.saving.cuda_copying import make_copier
from easyckpt.saving.emergency import SignalWatcher
from easyckpt.saving.flusher import Flusher
from easyckpt.saving.housekeeper import Housekeeper
from easyckpt.saving.messages import Flush
from easyckpt.saving.metrics import Metrics
from easyckpt.saving.parts import SaverParts
from easyckpt.saving.policy import Policy
from easyckpt.saving.scalers import ScalerWatch
from easyckpt.saving.sizing import expected_bytes
from easyckpt.saving.slots import TAIL_SLACK_BYTES
from easyckpt.saving.staging import Stager
from easyckpt.state.capture import Capture, StateCapture
from easyckpt.state.data_position import DataPosition
from easyckpt.storage.local import LocalStorage

logger = logging.getLogger("easyckpt")

#: Seconds that logs get before a signal takes its effect.
LAST_WORDS_SECONDS = 1.0


def committed_by(storage: LocalStorage, naming: layout.NamingScheme) -> Callable[[Flush], bool]:
    """Answers whether an attempt has become a checkpoint, by looking at the root."""

    def look(flush: Flush) -> bool:
        entry = catalog.inspect(storage, naming.committed(flush.step), naming)
        return entry.problem is None and entry.manifest is not None and entry.manifest.attempt == flush.attempt

    return look


def dead_peers(arena: Arena, ranks: Ranks) -> list[int]:
    """Ranks of this node whose processes have certainly ended: nobody holds their arena's lock any more.

    Of a rank on another node nothing is known: what it has left here from an earlier start says nothing about it.
    """

    def has_died(rank: int) -> bool:
        owner = memory_names.owner_file(arena.user, arena.arena_id, rank)
        return OwnerLock.is_free(os.path.join(arena.directory, owner)) is True

    return [rank for rank in ranks.neighbours if has_died(rank)]


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
    naming = opened.dialect.naming
    flusher = _make_flusher(opened, config, ranks, events)
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


def _make_flusher(opened: OpenedRoot, config: CheckpointConfig, ranks: Ranks, events: EventLog) -> Flusher:
    dialect = opened.dialect
    context = CommitContext(
        storage=opened.storage,
        naming=dialect.naming,
        check_lease=opened.lease.check if opened.lease is not None else lambda: None,
        keeps_other_lines=dialect.keeps_other_lines,
    )
    return Flusher(
        context,
        ranks,
        opened.run,
        policy=Policy.of(config),
        writer=dialect.writer(opened.storage, config),
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
        on_lease_lost=lambda: events.set_sink(None),
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
    def sealed(step: int, slot: Slot) -> None:  # and the slot may be the next snapshot's already
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


def audit(parts: SaverParts, position: DataPosition) -> Auditor | None:
    """What EASYCKPT_AUDIT asks for, if it does."""
    asked = parts.config.audit
    if asked is None:
        return None
    return Auditor(asked, parts.storage, parts.ranks.rank, parts.capture.components, position)


def keep_house(parts: SaverParts, opened: OpenedRoot) -> Housekeeper:
    """Start the thread that writes logs and metrics, renews the lease and looks after the memory."""
    if parts.config.events:
        log = layout.events_file(parts.ranks.rank)
        parts.events.set_sink(lambda data: opened.storage.append(log, data))

    def lost(error: LeaseLost) -> None:
        parts.events.set_sink(None)
        parts.coordinator.lose_lease(error)

    return Housekeeper(
        parts.events,
        parts.metrics if parts.ranks.rank == 0 else None,
        opened.storage,
        lease=opened.lease,
        lease_interval=parts.config.lease_interval,
        on_lease_lost=lost,
        look_after_memory=_looking_after(opened.arena, parts.events),
    )


def _looking_after(arena: Arena, events: EventLog) -> Callable[[], None]:
    """The housekeeper's duty towards the memory tier, and what it then says for those who watch."""
    said: Measured | None = None

    def look_after() -> None:
        nonlocal said
        arena.look_after()
        now = Measured(
            seconds=events.stats().blocked_seconds,
            slots=arena.count,
            sealed=len(arena.sealed()),
            survives=arena.survives,
        )
        if said is None or now != replace(said, time=now.time):
            said = now
            events.emit(now)

    return look_after


def make_loader(parts: SaverParts, opened: OpenedRoot) -> Loader:
    """The loading half, which borrows what the saving half owns."""
    return Loader(
        storage=parts.storage,
        naming=parts.naming,
        open_checkpoint=opened.dialect.open,
        arena=parts.arena,
        channel=parts.channel,
        ranks=parts.ranks,
        run=parts.run,
        arena_id=parts.arena_id,
        capture=parts.capture,
        timeout=parts.config.peer_timeout,
        submit=parts.flusher.submit,
        emit=parts.events.emit,
    )


def watch_signals(
    parts: SaverParts, housekeeper: Housekeeper, *, takes_over: Callable[[], bool], ends: Callable[[], bool]
) -> SignalWatcher | None:
    """Have signals answered by an emergency flush; None where none are, or cannot be, watched.

    `ends`: the program has come to its end, where no collective waits for a rank that has died.
    """
    config, coordinator, ranks = parts.config, parts.coordinator, parts.ranks
    if not config.signals:
        return None
    if threading.current_thread() is not threading.main_thread():
        parts.events.emit(Warned(message="signals are not watched: the Checkpointer was not made on the main thread"))
        return None

    def flush(seconds: float) -> bool:
        in_time = coordinator.emergency(seconds)
        logger.warning("rank %d: %s", ranks.rank, remains.after_signal(parts))
        housekeeper.write_now(LAST_WORDS_SECONDS)  # the signal may end the process without another chance
        return in_time

    return SignalWatcher(
        config.signals,
        rank=ranks.rank,
        deadline=config.signal_deadline,
        flush=flush,
        takes_over=takes_over,
        stuck=lambda: not ends() and bool(dead_peers(parts.arena, ranks)),
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
        kept = (
            f" and {size_text(config.min_free_bytes)} are to stay free (min_free_bytes)"
            if config.min_free_bytes
            else ""
        )
        raise OutOfSpace(
            f"{opened.storage.root}: a checkpoint will take about {size_text(nbytes)}{kept}, {size_text(free)} are "
            "free. Free space, or choose another root."
        )
    opened.arena.ensure(nbytes + nbytes // 64, tail)


def meet(process_group: Any, config: CheckpointConfig) -> tuple[Ranks, Channel, Mailbox]:
    """Find the other ranks."""
    ranks = discover(process_group)
    channel, mailbox = connect(ranks, "checkpointer", config.peer_timeout)
    return ranks, channel, mailbox
