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
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

from easyckpt.errors import EasyckptError, SaveFailed
from easyckpt.events import Event, SnapshotBegun, SnapshotDiscarded, SnapshotSealed, Warned
from easyckpt.format.codec import path_text
from easyckpt.memory.slot import Slot, SlotMeta
from easyckpt.saving.copying import Copier, CopyJob
from easyckpt.state.capture import Capture

#: Windows in a row without an optimizer step before overlap is turned off.
MISSES_ALLOWED = 2
#: One object, so that copy plans for it can be told by identity.
NOTHING_LATE: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotIdentity:
    """The fields of a snapshot that stay the same for a whole line of training."""

    run: str
    arena_id: str
    incarnation: str
    timeline: str
    rank: int
    world_size: int


@dataclass(slots=True)
class _Window:
    """A snapshot whose copy may still run."""

    meta: SlotMeta
    slot: Slot
    capture: Capture
    job: CopyJob
    begun: float
    checked: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class Stager:
    """Takes snapshots. All methods belong to the training thread, but for the hook, which any thread may run."""

    def __init__(
        self,
        copier: Copier,
        *,
        optimizers: Iterable[torch.optim.Optimizer],
        scaler_skipped: Callable[[], bool],
        overlap: bool,
        checksum: bool,
        emit: Callable[[Event], None],
        on_sealed: Callable[[int, Slot], None],
        on_discarded: Callable[[int, Slot], None],
    ) -> None:
        self._copier = copier
        self._optimizers = {id(optimizer) for optimizer in optimizers}
        self._scaler_skipped = scaler_skipped
        self._overlap = overlap
        self._checksum = checksum
        self._emit, self._on_sealed, self._on_discarded = emit, on_sealed, on_discarded
        self._window: _Window | None = None
        self._unsealed: list[_Window] = []
        """Snapshots whose bytes may still be on their way (on a GPU the host runs ahead of them)."""
        self._lock = threading.Lock()
        self._fired = False
        self._trusted = False
        self._misses = 0
        self._torn: set[str] = set()
        self._late: tuple[object, list[int]] = (None, [])
        self._pid = os.getpid()
        self._error: EasyckptError | None = None
        self.blocked_in_hook = 0.0
        self._handle = register_optimizer_step_pre_hook(
            torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        )

    def stage(
        self, identity: SnapshotIdentity, step: int, capture: Capture, slot: Slot, *, overlap: bool = True
    ) -> None:
        """Begin the snapshot of `step` in `slot`; the window before must have ended (`end_window`)."""
        assert self._window is None
        begun = time.perf_counter()
        late = self._late_leaves(capture) if overlap and self._overlap and self._trusted else NOTHING_LATE
        self._fired = False
        slot.begin()
        try:
            job = self._copier.start(capture, slot, late)
        except BaseException:
            slot.clear()
            raise
        meta = SlotMeta(
            run=identity.run,
            arena_id=identity.arena_id,
            incarnation=identity.incarnation,
            timeline=identity.timeline,
            step=step,
            rank=identity.rank,
            world_size=identity.world_size,
            layout_digest=capture.layout.digest,
            image_bytes=capture.layout.image_bytes,
        )
        window = _Window(meta, slot, capture, job, begun)
        self._window = window
        self._unsealed.append(window)
        self._emit(SnapshotBegun(step=step, bytes=meta.image_bytes, seconds=time.perf_counter() - begun))
        if not late:
            self._check(window)

    def end_window(self, by: Literal["save", "wait", "close"]) -> None:
        """Wait for a copy that is still running, and seal or discard it. Raises what went wrong in a hook before."""
        with self._lock:
            window = self._window
            if window is not None:
                window.job.wait_before_step()
                missed = by == "save" and not self._fired and not self._scaler_skipped()
                if missed:
                    self._miss(window)
                else:
                    self._check(window)
            elif self._fired:
                self._trusted, self._misses = True, 0
        self._unsealed = [other for other in self._unsealed if not other.over.is_set()]
        if by != "save":
            for other in self._unsealed:
                other.over.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def window_step(self) -> int | None:
        """The step whose snapshot is not sealed yet."""
        window = self._window
        return None if window is None else window.meta.step

    def close(self) -> None:
        """Take the hook away and end the copying thread. The window must have ended."""
        self._handle.remove()
        self._copier.stop()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Runs before every optimizer step of the process: no step may write what is still being copied."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._fired = self._fired or id(optimizer) in self._optimizers
            window = self._window
            if window is not None:
                begun = time.perf_counter()
                window.job.wait_before_step()
                self._check(window)
                self.blocked_in_hook += time.perf_counter() - begun

    def _check(self, window: _Window) -> None:
        """The window is over: seal the snapshot, or discard it when somebody wrote to a leaf that was copied late."""
        self._window = None
        written = window.job.written_to()
        if written:
            names = [path_text(window.capture.layout.leaves[number].path) for number in written]
            self._torn.update(names)
            self._late = (None, [])
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            self._discard(window, f"{shown} changed outside of an optimizer step; copied early from now on")
        else:
            window.job.on_arrival(lambda: self._seal(window))

    def _miss(self, window: _Window) -> None:
        self._window = None
        self._misses += 1
        self._discard(window, "no step of a torch optimizer was seen since it began, so it may be torn")
        if self._misses >= MISSES_ALLOWED:
            self._overlap = False
            message = (
                f"overlap is off from step {window.meta.step} on: {MISSES_ALLOWED} snapshots in a row saw no step of a "
                "torch optimizer; snapshots are now copied before save_if_needed returns (overlap=False says so)"
            )
            self._emit(Warned(step=window.meta.step, message=message))

    def _seal(self, window: _Window) -> None:
        capture = window.capture
        meta = window.meta
        try:
            if window.job.error is not None:
                raise SaveFailed(f"copying the snapshot of step {meta.step} failed: {window.job.error!r}")
            if self._checksum:
                digest = xxhash.xxh3_128_hexdigest(window.slot.image[: meta.image_bytes])
                meta = replace(meta, image_digest=digest)
            window.slot.seal(meta, capture.layout.encoded, capture.objects)
        except (EasyckptError, OSError) as error:
            self._error = error if isinstance(error, EasyckptError) else SaveFailed(f"step {meta.step}: {error}")
            self._discard(window, str(error))
            return
        self._emit(SnapshotSealed(step=meta.step, bytes=meta.image_bytes, seconds=time.perf_counter() - window.begun))
        self._on_sealed(meta.step, window.slot)
        window.over.set()

    def _discard(self, window: _Window, reason: str) -> None:
        window.job.wait()
        window.slot.clear()
        self._emit(SnapshotDiscarded(step=window.meta.step, reason=reason))
        self._on_discarded(window.meta.step, window.slot)
        window.over.set()

    def _late_leaves(self, capture: Capture) -> list[int]:
        """The capture's late leaves without those found torn before (the same list while nothing changes)."""
        if not self._torn:
            return capture.late
        if self._late[0] is not capture.layout:
            leaves = capture.layout.leaves
            late = [number for number in capture.late if path_text(leaves[number].path) not in self._torn]
            self._late = (capture.layout, late)
        return self._late[1]
