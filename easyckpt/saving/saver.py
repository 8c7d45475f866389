"""The saving half of a Checkpointer, as the training thread sees it: when, into which slot, who is told."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future

from easyckpt.errors import EasyckptError, SaveFailed
from easyckpt.events import SnapshotSkipped, Warned
from easyckpt.memory.slot import Slot
from easyckpt.saving.beginning import begin_line
from easyckpt.saving.catching_up import CatchUp
from easyckpt.saving.fingerprint import Then
from easyckpt.saving.line import Origin
from easyckpt.saving.live import LiveSnapshot
from easyckpt.saving.parts import SaverParts
from easyckpt.saving.slots import NO_MEMORY, Slots
from easyckpt.saving.staging import SnapshotIdentity
from easyckpt.state.capture import Capture
from easyckpt.state.components import RESERVED


class Saver:
    """See the module's docstring. All methods belong to the training thread."""

    def __init__(self, parts: SaverParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._identity: SnapshotIdentity | None = None
        self._origin: Origin | None = None
        self._warned: set[str] = set()
        self._warned_of_accumulation = False
        self._staged = -1
        self._slots = Slots(parts.arena, parts.coordinator.ledger, parts.config)
        self._catch_up = CatchUp(parts.capture, parts.stager)
        parts.metrics.hold_back()

    @property
    def identity(self) -> SnapshotIdentity | None:
        """Of the line of training that is open; None before its first save."""
        return self._identity

    @property
    def origin(self) -> Origin | None:
        """What the line goes on from; None before it is known."""
        return self._origin

    def go_on_from(self, origin: Origin, *, adopted: tuple[str, int] | None, committed: int) -> None:
        """The state was restored (or found missing): the next save opens a new line from there."""
        self._origin, self._identity, self._staged = origin, None, -1
        self._parts.metrics.hold_back()
        self._catch_up.forget()
        self._parts.coordinator.begin_line(None, committed=committed, adopted=adopted)

    def begin_again(self, step: int) -> None:
        """`step` is to be saved once more: where anything was saved of it, on a line on which there is nothing yet.

        Else the line goes on, with all that memory holds of earlier steps. All ranks call it.
        """
        self._parts.stager.end_window("wait")
        for future in self._parts.coordinator.ledger.pending():
            future.exception()  # in bounded time: the coordinator sees to that
        origin, identity = self._origin, self._identity
        if identity is None:
            if origin is not None and origin.step == step:
                self.go_on_from(dataclasses.replace(origin, again=True), adopted=None, committed=-1)
        elif self._was_saved(step):
            self.go_on_from(Origin(step, identity.timeline, again=True), adopted=None, committed=-1)

    def _was_saved(self, step: int) -> bool:
        """Whether the job could go on from `step`; what only some ranks hold of it is of no use, and dropped."""
        coordinator, arena = self._parts.coordinator, self._parts.arena
        held = [meta for meta in coordinator.ledger.on_line(arena.sealed()) if meta.step == step]
        mine = {"committed": step <= coordinator.committed, "held": bool(held)}
        answers = self._parts.channel.exchange(f"step {step}: was it saved", mine, self._config.peer_timeout)
        if any(answer["committed"] for answer in answers) or all(answer["held"] for answer in answers):
            return True
        arena.drop(lambda meta: meta in held)
        return False

    def came_to(self, step: int) -> None:
        """The training loop has handed over `step`, whether or not a snapshot of it is to be taken."""
        self._parts.metrics.take(step)
        self._catch_up.came_to(step)
        self._parts.coordinator.came_to(step)

    def snapshot(self, step: int, *, due: bool, wait: bool = False) -> Future[int] | None:
        """Take the snapshot of `step` if a slot is free, and have it flushed if `due`: then with what comes of that.

        `wait` for a slot that flushes hold. Raises background failures.
        """
        self._ready_line()
        self._parts.stager.end_window("save")
        self._want(step)
        if due and self._config.back_pressure == "wait":
            self._wait_for_flushes()
        if self._parts.arena.count == 0:
            if due:
                return self._save_live(step, forced=False)
            begun = time.perf_counter()
            self._skip(step, self._parts.capture.capture(), NO_MEMORY, begun)
            return None
        overlap = not (due and self._parts.coordinator.ledger.blocking)
        self._stage(step, wait=wait or (due and self._config.back_pressure == "wait"), overlap=overlap)
        return self._parts.coordinator.due(step, forced=False) if due else None

    def flush(self, step: int) -> Future[int]:
        """Take the snapshot of `step` while training goes on, and have it flushed for certain.

        Training waits only where no slot is free: they are held by flushes that were asked for before.
        """
        self._ready_line()
        self._parts.stager.end_window("save")
        self._want(step)
        coordinator = self._parts.coordinator
        if step <= coordinator.committed or self._holds(step):
            return coordinator.due(step, forced=True)
        if self._parts.arena.count == 0:
            return self._save_live(step, forced=True)
        self._stage(step, wait=True, overlap=not coordinator.ledger.blocking)
        return coordinator.due(step, forced=True)

    def flush_taken(self, step: int) -> Future[int] | None:
        """Have the snapshot of `step` flushed that all ranks took, or went on from, before; None where one has none."""
        self._ready_line()
        self._parts.stager.end_window("wait" if step == self._staged else "save")
        coordinator = self._parts.coordinator
        held = any(meta.step == step for meta in coordinator.ledger.on_line(self._parts.arena.sealed()))
        answers = self._parts.channel.exchange(
            f"step {step}: who has its snapshot", held or step <= coordinator.committed, self._config.peer_timeout
        )
        return coordinator.due(step, forced=True) if all(answers) else None

    def save(self, step: int) -> Future[int]:
        """Take the snapshot of `step` for certain and have it flushed; resolves when durable on all ranks."""
        self._parts.metrics.take(step)
        self._ready_line()
        # The snapshot that save_if_needed has just taken of this very step: no optimizer step belongs in between.
        self._parts.stager.end_window("wait" if step == self._staged else "save")
        coordinator = self._parts.coordinator
        self._want(step)
        if step <= coordinator.committed or self._holds(step):
            return coordinator.due(step, forced=True)
        if self._parts.arena.count == 0:
            return self._save_live(step, forced=True)
        # Sealed before this returns: whoever waits for the Future next takes no step that could end a window.
        if not self._stage(step, wait=True, overlap=False) and self._parts.arena.count == 0:
            return self._save_live(step, forced=True)  # it has turned out that memory does not hold it
        return coordinator.due(step, forced=True)

    def _save_live(self, step: int, *, forced: bool) -> Future[int]:
        """No memory holds even one snapshot: training waits until the live state itself is durable.

        Not `forced`: or until the ranks skip the flush, for which those that do have memory may have cause.
        """
        assert self._identity is not None
        self._want(step)
        coordinator = self._parts.coordinator
        capture = self._parts.capture.capture()
        coordinator.offer(LiveSnapshot(self._identity.meta(step, capture.layout), capture))
        try:
            future = coordinator.due(step, forced=forced)
            future.exception()  # in bounded time: the coordinator sees to that
        finally:
            coordinator.offer(None)
        return future

    def wait(self, timeout: float | None) -> None:
        """Until every flush that was due so far has ended. Raises TimeoutError, or what went wrong."""
        self._parts.stager.end_window("wait")
        deadline = None if timeout is None else time.monotonic() + timeout
        for future in self._parts.coordinator.ledger.pending():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            future.exception(left)
        self._parts.coordinator.raise_failure(None)

    def close(self, timeout: float) -> None:
        """Commit the newest step with all ranks, within `timeout` seconds; raises the first thing that went wrong.

        A rank whose newest snapshot was skipped lends its live state for it, before it says that it closes: it needs no
        slot, which might not become free in time.
        """
        deadline = time.monotonic() + timeout
        failures: list[EasyckptError] = []
        self._parts.stager.end_window("close")
        actions: tuple[Callable[[], None], ...] = (
            self._make_up,
            lambda: self._parts.coordinator.close(max(0.0, deadline - time.monotonic())),
        )
        try:
            for action in actions:
                try:
                    action()
                except EasyckptError as error:
                    failures.append(error)
        finally:
            self._parts.coordinator.offer(None)
        if failures:
            raise failures[0]

    def lose_window(self) -> None:
        """End the window of the newest snapshot (the job is ending in an error)."""
        self._parts.stager.end_window("close")

    def lost(self, why: str) -> SaveFailed | None:
        """The error that says so, if the newest step of which a snapshot was to be taken is not durable."""
        wanted, committed = self._parts.coordinator.ledger.post.wanted, self._parts.coordinator.committed
        if wanted <= committed:
            return None
        newest = f"the newest committed step is {committed}" if committed >= 0 else "nothing is committed"
        return SaveFailed(f"step {wanted}, the last that was handed over, is not durable ({why}); {newest}")

    def all_committed(self) -> bool:
        """Whether nothing in memory is newer than what is committed."""
        newest = max((meta.step for meta in self._parts.arena.sealed()), default=-1)
        return newest <= self._parts.coordinator.committed

    def _ready_line(self) -> None:
        if self._identity is None:
            self._identity = begin_line(self._parts, self._origin)

    def _want(self, step: int) -> None:
        self._catch_up.forget()
        self._parts.coordinator.wanted(step)

    def _skip(self, step: int, capture: Capture, reason: str, begun: float) -> None:
        self._catch_up.remember(step, capture, reason)
        nbytes, seconds = capture.layout.image_bytes, time.perf_counter() - begun
        self._parts.events.emit(SnapshotSkipped(step=step, reason=reason, bytes=nbytes, seconds=seconds))
        self._parts.coordinator.lacks(step, reason)

    def _make_up(self) -> None:
        """Lend the live state as the skipped snapshot of the newest step, if it is provably still that step's."""
        skipped, identity = self._catch_up.skipped, self._identity
        if skipped is None or identity is None:
            return
        coordinator, found = self._parts.coordinator, self._catch_up.state()
        if isinstance(found, Then):
            meta = identity.meta(skipped.step, found.capture.layout)
            coordinator.offer(LiveSnapshot(meta, found.capture, found.kept))
        else:
            coordinator.lacks(skipped.step, f"{skipped.reason}; it could not be taken at the end either: {found}")

    def _stage(self, step: int, *, wait: bool, overlap: bool) -> bool:
        """Take the snapshot of `step`; False where it was skipped."""
        assert self._identity is not None
        begun = time.perf_counter()
        capture = self._parts.capture.capture()
        self._warn_of_slow_components(capture)
        self._warn_of_accumulation(step)
        self._parts.flusher.prepare(capture.layout)
        deadline = time.monotonic() + self._config.commit_timeout if wait else None
        slot = self._slots.acquire(step, capture, self._identity.timeline, deadline=deadline)
        if slot is not None:
            self._put(step, capture, slot, overlap=overlap)
            return True
        # Also after waiting in vain nothing is raised here, by one rank alone: all ranks learn of it together.
        self._skip(step, capture, self._slots.why_none(capture), begun)
        return False

    def _put(self, step: int, capture: Capture, slot: Slot, *, overlap: bool) -> None:
        assert self._identity is not None
        try:
            self._parts.stager.stage(self._identity, step, capture, slot, overlap=overlap)
        except BaseException:
            self._parts.arena.release(slot)
            raise
        self._staged = step

    def _wait_for_flushes(self) -> None:
        for future in self._parts.coordinator.ledger.pending():
            future.exception()  # in bounded time: the coordinator sees to that

    def _holds(self, step: int) -> bool:
        timeline = None if self._identity is None else self._identity.timeline
        return any(meta.step == step and meta.timeline == timeline for meta in self._parts.arena.sealed())

    def _warn_of_accumulation(self, step: int) -> None:
        if self._warned_of_accumulation or not self._parts.accumulation.in_the_middle():
            return
        if not self._parts.stager.scaler_skipped():  # which leaves its gradients
            self._warned_of_accumulation = True
            message = (
                f"step {step} is saved between two backward passes of one optimizer step: gradients are not part of "
                "the state, so a job resumed from here loses them. Call save_if_needed after optimizer.step()"
            )
            self._parts.events.emit(Warned(step=step, message=message))

    def _warn_of_slow_components(self, capture: Capture) -> None:
        for name, milliseconds, nbytes in capture.slow:
            if name not in self._warned and not name.startswith(RESERVED):
                self._warned.add(name)
                message = (
                    f"component {name!r} costs {milliseconds:.1f} ms and {nbytes / 1e6:.2f} MB at every save, on the "
                    "training thread: hand over tensors where you can, and less where you cannot"
                )
                self._parts.events.emit(Warned(message=message))
