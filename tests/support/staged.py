"""A real Stager over a real Arena, beside reference copies taken before each snapshot began."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import raw

from easyckpt import failpoints
from easyckpt.events import EventLog, SnapshotDiscarded, SnapshotSkipped, Warned
from easyckpt.format.codec import path_text
from easyckpt.memory.arena import Arena
from easyckpt.memory.slot import Slot
from easyckpt.saving.copying import Copier
from easyckpt.saving.cuda_copying import make_copier
from easyckpt.saving.scalers import ScalerWatch
from easyckpt.saving.staging import SnapshotIdentity, Stager
from easyckpt.state.capture import Capture, StateCapture

IDENTITY = SnapshotIdentity(
    run="a" * 32, arena_id="a" * 12 + "-" + "b" * 8, incarnation="1", timeline="main", rank=0, world_size=1
)
PATIENCE = 30.0


def until(condition: Callable[[], Any]) -> None:
    """Wait for a background thread to come to a point."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def stands_in(thread: threading.Thread, function: str) -> bool:
    """Whether `thread` is within a call of a function of that name."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


class Gate:
    """Holds the copying thread right before it copies one tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reached(self) -> None:
        until(self.path.exists)

    def release(self) -> None:
        Path(f"{self.path}.go").touch()


def reference(capture: Capture) -> dict[str, bytes]:
    """Every leaf's bytes as they have to lie in the image."""
    return {
        path_text(leaf.path): raw(source if number in capture.strided else source.detach().permute(leaf.order))
        for number, (leaf, source) in enumerate(zip(capture.layout.leaves, capture.sources, strict=True))
    }


class Rig:
    """Saves as a Saver does. Each snapshot is compared with its reference when it is sealed, and at the end."""

    def __init__(
        self,
        directory: Path,
        state: Mapping[str, Any],
        *,
        overlap: bool = True,
        slots: int = 4,
        copier: Copier | None = None,
    ) -> None:
        self.capture = StateCapture(dict(state))
        self.log = EventLog(0)
        self.arena = Arena(
            str(directory), "u", IDENTITY.arena_id, 0, slots, run=IDENTITY.run, incarnation="1", budget_bytes=1 << 30
        )
        self.sealed: list[int] = []
        self.discarded: dict[int, str] = {}
        self.skipped: list[int] = []
        self.warned: list[str] = []
        self.torn: list[str] = []
        self._references: dict[int, tuple[dict[str, bytes], bytes]] = {}
        self._numbers = itertools.count()
        self._directory = directory
        scalers = [value for value in state.values() if isinstance(value, torch.amp.GradScaler)]
        self.stager = Stager(
            copier or make_copier(False),
            optimizers=self.capture.optimizers(),
            scalers=ScalerWatch(scalers),
            overlap=overlap,
            checksum=False,
            emit=self._emit,
            on_sealed=self._on_sealed,
            on_discarded=lambda _, slot, reason: self.arena.release(slot),
        )

    def _emit(self, event: Any) -> None:
        self.log.emit(event)
        if isinstance(event, SnapshotDiscarded):
            self.discarded[event.step] = event.reason
        elif isinstance(event, SnapshotSkipped):
            self.skipped.append(event.step)
        elif isinstance(event, Warned):
            self.warned.append(event.message)

    def _on_sealed(self, step: int, slot: Slot) -> None:
        self.arena.release(slot)
        self.sealed.append(step)
        self._compare(step)

    def _compare(self, step: int) -> None:
        view = self.arena.view(step, "main")
        expected, objects = self._references[step]
        image = bytes(view.image)
        for leaf in view_layout(view).leaves:
            name = path_text(leaf.path)
            if image[leaf.offset : leaf.offset + leaf.nbytes] != expected.pop(name):
                self.torn.append(f"step {step}: {name}")
        if expected:
            self.torn.append(f"step {step}: misses {sorted(expected)}")
        if view.objects != objects:
            self.torn.append(f"step {step}: objects")

    def save(self, step: int, *, overlap: bool = True) -> bool:
        """One snapshot; False where no slot was free."""
        self.stager.end_window("save")
        capture = self.capture.capture()
        need = capture.layout.image_bytes
        if not self.arena.ready(need):
            self.arena.ensure(need, 3 * len(capture.layout.encoded) + (64 << 10))
            self.arena.wait_ready()
        deadline = time.monotonic() + 5.0
        while (slot := self.arena.acquire(step, need, step - 1, ())) is None and time.monotonic() < deadline:
            time.sleep(0.001)  # as a longer step would: snapshots that are still being copied take the slots
        if slot is None:
            self._emit(SnapshotSkipped(step=step, reason="no slot is free"))
            return False
        self._references[step] = (reference(capture), capture.objects)
        self.stager.stage(IDENTITY, step, capture, slot, overlap=overlap)
        return True

    @property
    def window_step(self) -> int | None:
        """The step whose snapshot is neither sealed nor discarded yet."""
        window = self.stager._window
        return None if window is None else window.meta.step

    @contextlib.contextmanager
    def holding(self, nth: int = 1) -> Iterator[Gate]:
        """The copying thread stops before the `nth` tensor from now on, until the gate is released."""
        gate = Gate(self._directory / f"gate-{next(self._numbers)}")
        failpoints.arm(f"staging.copy@{nth}=hold:{gate.path}")
        try:
            yield gate
        finally:
            gate.release()
            failpoints.arm("")
            if (window := self.stager._window) is not None:
                window.job.wait()  # else this copy could run into the next gate

    def end(self) -> None:
        """End the last window. Every sealed snapshot must be of exactly its step."""
        self.stager.end_window("close")
        assert not self.torn

    def close(self) -> None:
        failpoints.arm("")
        try:
            self.stager.end_window("close")
        finally:
            self.stager.close()
            self.arena.close(remove=True)


def view_layout(view: Any) -> Any:
    from easyckpt.format.image import Layout

    return Layout.from_bytes(view.static)


@pytest.fixture
def rig_of(memory_dir: Path) -> Iterator[Callable[..., Rig]]:
    """Makes a Rig of a state, with the Rig's options; all are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def make(state: Any, **options: Any) -> Rig:
            directory = memory_dir / f"rig-{next(numbers)}"
            directory.mkdir()
            rig = Rig(directory, state, **options)
            stack.callback(rig.close)
            return rig

        yield make
