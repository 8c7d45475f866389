"""Copying live tensors into a slot: what must be early on the training thread, the rest on one background thread.

Whoever writes to a late leaf before the next optimizer step tears the snapshot. Version counters show most such
writes. Those that bypass them (through `.data`, or by fused optimizers whose hooks do not fire) are seen by probes:
some words of each late leaf are read at the capture, and looked at again in the copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from easyckpt import failpoints
from easyckpt.format.image import Layout
from easyckpt.memory.slot import Slot
from easyckpt.saving import raw_memory
from easyckpt.saving.gathering import WORTH_IT, Gather, is_tiny
from easyckpt.saving.probes import PROBES, Probes, can_be_probed, differing, probed_offsets
from easyckpt.saving.raw_memory import SMALL_BYTES
from easyckpt.saving.waking import Latch
from easyckpt.saving.worker import Result, Worker
from easyckpt.state.capture import Capture

LATE_COPY = failpoints.declare("staging.copy", "one tensor is about to be copied in the background")

#: Tensors below this size are copied at once, as long as all of them together stay below SMALL_TOTAL_BYTES.
SMALL_LEAVES = (32 << 10, 16 << 10, 8 << 10, 4 << 10, 2 << 10, 1 << 10)
SMALL_TOTAL_BYTES = 8 << 20

version_of: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class CopyJob(Protocol):
    """A copy under way into one slot."""

    error: BaseException | None

    def wait_before_step(self) -> None:
        """Hold the training thread until an optimizer step can do no harm."""

    def wait(self) -> None:
        """Until the last byte has arrived."""

    def on_arrival(self, action: Callable[[], None]) -> None:
        """Call `action` once the last byte has arrived: at once if it has, else from the copying thread."""

    def written_to(self) -> list[int]:
        """Leaves (by number) that somebody wrote to since the capture, as far as counters and probes tell.

        Call it after `wait_before_step`.
        """

    def release(self) -> None:
        """Let go of the tensors: the copy has arrived and was checked."""


class Copier(Protocol):
    """Starts copies on one kind of device."""

    def start(self, capture: Capture, slot: Slot, late: Sequence[int]) -> CopyJob:
        """Copy all leaves but `late` before returning (in stream order on a GPU), and `late` in the background."""

    def differing(self, live: LiveLeaves, slot: Slot) -> list[int]:
        """Leaves (by number) that are no longer what `slot` holds, as far as that can be told without waiting."""

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Have `job` run on the background thread, which copies wait for: it must be short, or look whether to end."""

    def stop(self) -> None:
        """End the background thread."""


@dataclass(frozen=True, slots=True)
class LiveLeaves:
    """Some leaves of a capture, without holding them."""

    layout: Layout
    numbers: list[int]
    tensors: list[weakref.ref[torch.Tensor]]


class Arrival:
    """What every CopyJob has in common: the moment when the last byte is there, and what went wrong.

    Version counters are read from the user's tensors. Their memory is held by itself until it is copied: after
    ``p.data = q`` the tensor would no longer do that.
    """

    def __init__(self, sources: list[torch.Tensor], numbers: Sequence[int]) -> None:
        self.error: BaseException | None = None
        self._sources, self._numbers = sources, numbers
        self._versions = list(map(version_of, sources))
        self._arrived = Latch()
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []

    def wait(self) -> None:
        """See CopyJob."""
        self._arrived.wait()

    def on_arrival(self, action: Callable[[], None]) -> None:
        """See CopyJob."""
        with self._lock:
            if not self._arrived.is_set():
                self._actions.append(action)
                return
        action()

    def finish(self, error: BaseException | None) -> None:
        """Called by whoever copies."""
        # (its traceback would hold the copying thread's frames, and they the tensors)
        self.error = None if error is None else error.with_traceback(None)
        with self._lock:
            self._arrived.set()
            actions, self._actions = self._actions, []
        for action in actions:
            action()

    def written_to(self) -> list[int]:
        """See CopyJob."""
        now = map(version_of, self._sources)
        return [number for number, then, new in zip(self._numbers, self._versions, now, strict=True) if then != new]

    def release(self) -> None:
        """See CopyJob."""
        self._sources, self._numbers, self._versions = [], [], []


@dataclass(slots=True)
class _CopyPlan:
    """What of a layout's copying can be known beforehand. Holds no tensor of the user's."""

    facts: object
    late: Sequence[int]
    tiny: Gather | None
    early_small: list[tuple[int, int, int]]  # number, offset, size
    early_large: list[tuple[int, int, int]]
    early_strided: list[tuple[int, int, int]]
    late_numbers: list[int]
    late_moves: list[tuple[int, int]]  # offset, size
    probes: Probes


class CpuCopyJob(Arrival):
    """A copy on a CPU."""

    def __init__(self, capture: Capture, plan: _CopyPlan, base: int) -> None:
        sources = [capture.sources[number] for number in plan.late_numbers]
        super().__init__(sources, plan.late_numbers)
        self._plan, self._base = plan, base
        self._pointers = [capture.pointers[number] for number in plan.late_numbers]
        self._memory = list(map(torch.Tensor.untyped_storage, sources))
        self._expected = plan.probes.words(self._pointers)
        self._torn: list[int] = []

    def wait_before_step(self) -> None:
        """See CopyJob."""
        self.wait()

    def run(self) -> None:
        """On the background thread: copy, then look whether the copy is of what was there at the capture."""
        error: BaseException | None = None
        try:
            for pointer, (offset, size) in zip(self._pointers, self._plan.late_moves, strict=True):
                failpoints.hit(LATE_COPY)
                raw_memory.move_large(self._base + offset, pointer, size)
            rows = differing(self._plan.probes.places, self._expected, self._base)
            self._torn = [self._plan.late_numbers[row] for row in rows]
        except BaseException as failure:  # noqa: BLE001 - it belongs to the snapshot
            error = failure
        self._memory = []
        self.finish(error)

    def written_to(self) -> list[int]:
        """See CopyJob."""
        return sorted({*self._torn, *super().written_to()})


class CpuCopier:
    """Copies CPU tensors by memmove."""

    def __init__(self) -> None:
        self._worker = Worker("easyckpt-copy")
        self._plan: _CopyPlan | None = None

    def start(self, capture: Capture, slot: Slot, late: Sequence[int]) -> CopyJob:
        """See Copier."""
        plan = self._plan
        if plan is None or plan.facts is not capture.early or plan.late is not late:
            plan = self._plan = _make_plan(capture, late)
        base, pointers = slot.address, capture.pointers
        if plan.tiny is not None:
            plan.tiny.copy(capture, slot)
        for move, moves in ((raw_memory.move_small, plan.early_small), (raw_memory.move_large, plan.early_large)):
            for number, offset, size in moves:
                move(base + offset, pointers[number], size)
        for number, offset, size in plan.early_strided:
            raw_memory.move_strided(base + offset, capture.sources[number], size)
        job = CpuCopyJob(capture, plan, base)
        if plan.late_numbers:
            self._worker.submit(job.run)
        else:
            job.finish(None)
        return job

    def differing(self, live: LiveLeaves, slot: Slot) -> list[int]:
        """See Copier."""
        return differing_on_cpu(live, slot)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """See Copier."""
        return self._worker.submit(job)

    def stop(self) -> None:
        """See Copier."""
        self._worker.stop(None)


def small_leaves_first(layout: Layout, late: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split `late` in (small leaves, which are better copied at once, and the rest)."""
    for limit in SMALL_LEAVES:
        small = [number for number in late if layout.leaves[number].nbytes < limit]
        if sum(layout.leaves[number].nbytes for number in small) <= SMALL_TOTAL_BYTES:
            break
    chosen = set(small)
    return small, [number for number in late if number not in chosen]


def copy_now(capture: Capture, slot: Slot, numbers: Iterable[int]) -> None:
    """Copy the CPU leaves `numbers` before returning."""
    for number in numbers:
        leaf, source = capture.layout.leaves[number], capture.sources[number]
        if number in capture.strided:
            raw_memory.move_strided(slot.address + leaf.offset, source, leaf.nbytes)
        elif leaf.nbytes:
            raw_memory.move(slot.address + leaf.offset, capture.pointers[number], leaf.nbytes)


def differing_on_cpu(live: LiveLeaves, slot: Slot) -> list[int]:
    """Of the CPU leaves in `live`: those whose bytes are no longer what `slot` holds."""
    found = []
    for number, reference in zip(live.numbers, live.tensors, strict=True):
        tensor, leaf = reference(), live.layout.leaves[number]
        if tensor is not None and tensor.device.type == "cpu":
            same = tensor.nbytes == leaf.nbytes and raw_memory.equal(
                tensor.data_ptr(), slot.address + leaf.offset, leaf.nbytes
            )
            found += [] if same else [number]
    return found


def _make_plan(capture: Capture, late: Sequence[int]) -> _CopyPlan:
    leaves = capture.layout.leaves
    _, numbers = small_leaves_first(capture.layout, [n for n in late if can_be_probed(capture, n)])
    chosen = set(numbers)
    early = [(n, leaf.offset, leaf.nbytes) for n, leaf in enumerate(leaves) if n not in chosen and leaf.nbytes]
    tiny = [move[0] for move in early if is_tiny(capture, move[0])]
    gathered = set(tiny) if len(tiny) >= WORTH_IT else set()
    dense = [move for move in early if move[0] not in capture.strided and move[0] not in gathered]
    offsets = [offset for number in numbers for offset in probed_offsets(leaves[number])]
    starts = [leaves[number].offset for number in numbers for _ in range(PROBES)]
    return _CopyPlan(
        facts=capture.early,
        late=late,
        tiny=Gather(capture, tiny) if gathered else None,
        early_small=[move for move in dense if move[2] < SMALL_BYTES],
        early_large=[move for move in dense if move[2] >= SMALL_BYTES],
        early_strided=[move for move in early if move[0] in capture.strided],
        late_numbers=numbers,
        late_moves=[(leaves[number].offset, leaves[number].nbytes) for number in numbers],
        probes=Probes(offsets, [start + offset for start, offset in zip(starts, offsets, strict=True)]),
    )
