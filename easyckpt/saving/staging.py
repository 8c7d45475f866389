"""Snapshots of live state into slots, overlapped with the next forward and backward where that cannot tear them.

The window of a snapshot is the time from the capture until the next optimizer step: what only that step writes may be
copied within it. The wait at its end sits in torch's hook before every optimizer step. A snapshot is sealed when its
copy has ended and its window was checked; sealed is final.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

from easyckpt.errors import EasyckptError, SaveFailed
from easyckpt.events import Event, SnapshotBegun, SnapshotDiscarded, SnapshotSealed, Warned
from easyckpt.format.image import Layout
from easyckpt.memory.slot import Slot, SlotMeta
from easyckpt.saving.copying import Copier
from easyckpt.saving.reentry import Inside, entered, refuse
from easyckpt.saving.scalers import ScalerWatch
from easyckpt.saving.window import NOTHING_LATE, LateLeaves, Window, listed, names
from easyckpt.saving.worker import Result
from easyckpt.state.capture import Capture

#: Windows without an optimizer step before overlap is turned off.
MISSES_ALLOWED = 2
#: So many windows in a row with a step make up for the misses before: a save at every micro-step, which loses each
#: second snapshot, must end with overlap off as well.
FORGIVEN_AFTER = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotIdentity:
    """The fields of a snapshot that stay the same for a whole line of training."""

    run: str
    arena_id: str
    incarnation: str
    timeline: str
    rank: int
    world_size: int

    def meta(self, step: int, layout: Layout) -> SlotMeta:
        """The header of the snapshot of `step`."""
        return SlotMeta(
            run=self.run,
            arena_id=self.arena_id,
            incarnation=self.incarnation,
            timeline=self.timeline,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            layout_digest=layout.digest,
            image_bytes=layout.image_bytes,
        )


class Stager:
    """Takes snapshots. All methods belong to the training thread, but for the hook, which any thread may run."""

    def __init__(
        self,
        copier: Copier,
        *,
        optimizers: Iterable[torch.optim.Optimizer],
        scalers: ScalerWatch,
        overlap: bool,
        checksum: bool,
        emit: Callable[[Event], None],
        on_sealed: Callable[[int, Slot], None],
        on_discarded: Callable[[int, Slot, str], None],
    ) -> None:
        self._copier = copier
        self._optimizers = {id(optimizer) for optimizer in optimizers}
        self._scalers = scalers
        self._overlap = overlap
        self._checksum = checksum
        self._emit, self._on_sealed, self._on_discarded = emit, on_sealed, on_discarded
        self._window: Window | None = None
        self._unsealed: list[Window] = []
        """Snapshots whose bytes may still be on their way (on a GPU the host runs ahead of them)."""
        self._leaves = LateLeaves(copier)
        # Only ever taken by `with` itself: Ctrl-C inside a context manager written in Python would leave it locked.
        self._lock = threading.RLock()
        self._fired: set[int] = set()
        """Optimizers of the state (by id) whose steps were seen since the last save."""
        self._hits = self._misses = 0
        self._pid = os.getpid()
        self.inside: Inside = set()
        """Threads inside the hook, or (the engine sees to that) inside a call of the Checkpointer."""
        self.blocked_in_hook = 0.0
        self.steps_seen = 0
        """Steps of any torch optimizer of this process."""
        self._handle = register_optimizer_step_pre_hook(
            torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        )

    def stage(
        self, identity: SnapshotIdentity, step: int, capture: Capture, slot: Slot, *, overlap: bool = True
    ) -> None:
        """Begin the snapshot of `step` in `slot`; the window before must have ended (`end_window`)."""
        assert self._window is None
        begun = time.perf_counter()
        late = self.late(capture) if overlap else NOTHING_LATE
        self._fired = set()
        slot.begin()
        try:
            job = self._copier.start(capture, slot, late)
        except BaseException:
            slot.clear()
            raise
        layout = capture.layout
        meta = identity.meta(step, layout)
        window = Window(meta, slot, layout, capture.objects, job, begun)
        self._window = window
        self._unsealed.append(window)
        self._emit(SnapshotBegun(step=step, bytes=meta.image_bytes, seconds=time.perf_counter() - begun))
        if self._overlap:
            self._leaves.begin_trial(capture, slot)
        self._scalers.begin()
        if not late:
            self._check(window)

    def end_window(self, by: Literal["save", "wait", "close"]) -> None:
        """Wait for a copy that is still running, and seal or discard it."""
        with self._lock:
            window = self._window
            self._leaves.drop_trial()
            if self._fired:
                self._saw_a_step()
            if window is not None:
                window.job.wait_before_step()
                if by == "save" and not self._fired and not self._scalers.skipped_a_step():
                    self._miss(window)
                else:
                    self._check(window)
        self._unsealed = [other for other in self._unsealed if not other.over.is_set()]
        if by != "save":
            for other in self._unsealed:
                other.over.wait()
            self._unsealed = []

    def scaler_skipped(self) -> bool:
        """Whether a GradScaler has skipped an optimizer step since the last snapshot was begun. Waits for a GPU."""
        return self._scalers.skipped_a_step()

    def late(self, capture: Capture) -> list[int]:
        """The leaves that may be read until the next optimizer step; the same list while nothing changes."""
        return self._leaves.of(capture) if self._overlap else NOTHING_LATE

    def in_background(self, job: Callable[[], Result]) -> Future[Result]:
        """Have `job` run on the copying thread; see Copier.submit."""
        return self._copier.submit(job)

    def close(self) -> None:
        """Take the hook away and end the copying thread. The window must have ended."""
        self._handle.remove()
        self._copier.stop()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Runs before every optimizer step of the process: no step may write what is still being copied."""
        if os.getpid() != self._pid:
            return
        if threading.get_ident() not in self.inside:
            entered(self.inside, self._end_at_step, optimizer)
        elif self._lock._is_owned():  # type: ignore[attr-defined]
            raise refuse("an optimizer step")
        else:  # loading some optimizers takes a step
            self._end_at_step(optimizer)

    def _end_at_step(self, optimizer: torch.optim.Optimizer) -> None:
        if _is_being_captured():
            self._see_a_capture(optimizer)
            return
        begun = time.perf_counter()
        with self._lock:
            self.steps_seen += 1
            if id(optimizer) in self._optimizers:
                self._fired.add(id(optimizer))
            window = self._window
            if window is not None:
                window.job.wait_before_step()
            written = self._leaves.end_trial()  # before the slot may be given back
            if window is not None:
                self._check(window)
        if written:
            reason = "outside of an optimizer step: copied before save_if_needed returns from now on"
            self._emit(Warned(message=f"{listed(written)} changed {reason}"))
        self.blocked_in_hook += time.perf_counter() - begun

    def _see_a_capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing steps now: a CUDA graph is recorded. It will be replayed at any time, and no hook will fire."""
        with self._lock:
            if id(optimizer) in self._optimizers:
                self._leaves.never_trust(id(optimizer))
                if self._window is not None:
                    self._window.doubt = "an optimizer's step was captured into a CUDA graph; its state is copied early"

    def _saw_a_step(self) -> None:
        self._leaves.trust(self._fired)
        self._hits += 1
        if self._hits >= FORGIVEN_AFTER:
            self._hits = self._misses = 0

    def _check(self, window: Window) -> None:
        """The window is over: seal the snapshot, or discard it when somebody wrote to a leaf that was copied late."""
        with window.ended_if_interrupted():
            self._window = None
            written = window.job.written_to()
            if window.doubt:
                self._discard(window, window.doubt)
            elif written:
                found = names(window.layout, written)
                self._leaves.never_again(found)
                self._discard(window, f"{listed(found)} changed outside of an optimizer step; copied early from now on")
            else:
                window.job.on_arrival(lambda: self._seal(window))

    def _miss(self, window: Window) -> None:
        with window.ended_if_interrupted():
            self._window = None
            self._misses += 1
            self._hits = 0
            self._discard(window, "no step of a torch optimizer was seen since it began, so it may be torn")
        if self._misses >= MISSES_ALLOWED:
            self._overlap = False
            message = (
                f"overlap is off from step {window.meta.step} on: {MISSES_ALLOWED} snapshots saw no step of a torch "
                "optimizer; snapshots are now copied before save_if_needed returns (overlap=False says so)"
            )
            self._emit(Warned(step=window.meta.step, message=message))

    def _seal(self, window: Window) -> None:
        meta = window.meta
        try:
            if window.job.error is not None:
                raise SaveFailed(f"copying it failed: {window.job.error!r}")
            if self._checksum:
                digest = xxhash.xxh3_128_hexdigest(window.slot.image[: meta.image_bytes])
                meta = replace(meta, image_digest=digest)
            window.slot.seal(meta, window.layout.encoded, window.objects)
        except (EasyckptError, OSError) as error:
            # Not raised: this is one rank, and the others would wait for it in their next collective. They hear of it.
            self._discard(window, str(error))
            return
        window.job.release()
        self._emit(SnapshotSealed(step=meta.step, bytes=meta.image_bytes, seconds=time.perf_counter() - window.begun))
        self._on_sealed(meta.step, window.slot)
        window.over.set()

    def _discard(self, window: Window, reason: str) -> None:
        window.job.wait()
        window.job.release()
        window.slot.clear()
        meta, seconds = window.meta, time.perf_counter() - window.begun
        self._emit(SnapshotDiscarded(step=meta.step, reason=reason, bytes=meta.image_bytes, seconds=seconds))
        self._on_discarded(meta.step, window.slot, reason)
        window.over.set()


def _is_being_captured() -> bool:
    """Whether what runs on the GPU now is only recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
