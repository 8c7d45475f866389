"""Copying live tensors into a slot: what must be early on the training thread, the rest on one background thread.

One large memmove a tensor is the fastest copy that a CPU gives, needs no second thread pool, and releases the GIL.
For small tensors that release costs more than the copy: they are moved at once, holding it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from easyckpt import failpoints
from easyckpt.format.image import Layout
from easyckpt.memory.slot import Slot
from easyckpt.saving.worker import Worker
from easyckpt.state.capture import Capture

LATE_COPY = failpoints.declare("staging.copy", "one tensor is about to be copied in the background")

#: Tensors below this size are copied at once, as long as all of them together stay below SMALL_TOTAL_BYTES.
SMALL_BYTES = (32 << 10, 16 << 10, 8 << 10, 4 << 10, 2 << 10, 1 << 10)
SMALL_TOTAL_BYTES = 8 << 20

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_holding_gil = ctypes.PyDLL(None).memmove
_move_holding_gil.argtypes, _move_holding_gil.restype = _ARGUMENTS, None
_move = ctypes.CDLL(None).memmove
_move.argtypes, _move.restype = _ARGUMENTS, None

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
        """Leaves (by number) that somebody wrote to since the capture, as far as version counters tell."""


class Copier(Protocol):
    """Starts copies on one kind of device."""

    def start(self, capture: Capture, slot: Slot, late: Sequence[int]) -> CopyJob:
        """Copy all leaves but `late` before returning (in stream order on a GPU), and `late` in the background."""

    def stop(self) -> None:
        """End the background thread."""


def small_leaves_first(layout: Layout, late: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split `late` in (small leaves, which are better copied at once, and the rest)."""
    for limit in SMALL_BYTES:
        small = [number for number in late if layout.leaves[number].nbytes < limit]
        if sum(layout.leaves[number].nbytes for number in small) <= SMALL_TOTAL_BYTES:
            break
    chosen = set(small)
    return small, [number for number in late if number not in chosen]


@dataclass(slots=True)
class _CopyPlan:
    """What of a layout's copying can be known beforehand."""

    layout: Layout
    strided: frozenset[int]
    late: Sequence[int]
    early_moves: list[int]
    early_strided: list[int]
    late_moves: list[int]
    offsets: list[int]
    sizes: list[int]


class Arrival:
    """What every CopyJob has in common: the moment when the last byte is there, and what went wrong."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._arrived = threading.Event()
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
        self.error = error
        with self._lock:
            self._arrived.set()
            actions, self._actions = self._actions, []
        for action in actions:
            action()


class CpuCopyJob(Arrival):
    """A copy on a CPU. Holds the sources until it is done."""

    def __init__(self, sources: list[torch.Tensor], numbers: list[int]) -> None:
        super().__init__()
        self.sources, self.numbers = sources, numbers
        self.versions = list(map(version_of, sources))

    def wait_before_step(self) -> None:
        """See CopyJob."""
        self.wait()

    def written_to(self) -> list[int]:
        """See CopyJob."""
        now = map(version_of, self.sources)
        return [number for number, then, new in zip(self.numbers, self.versions, now, strict=True) if then != new]


class CpuCopier:
    """Copies CPU tensors by memmove."""

    def __init__(self) -> None:
        self._worker = Worker("easyckpt-copy")
        self._plan: _CopyPlan | None = None

    def start(self, capture: Capture, slot: Slot, late: Sequence[int]) -> CpuCopyJob:
        """See Copier."""
        plan = self._plan_for(capture, late)
        sources = capture.sources
        pointers = list(map(torch.Tensor.data_ptr, sources))
        base = slot.address
        late_sources = [sources[number] for number in plan.late_moves]
        job = CpuCopyJob(late_sources, plan.late_moves)
        for number in plan.early_moves:
            size = plan.sizes[number]
            move = _move_holding_gil if size < SMALL_BYTES[0] else _move
            move(base + plan.offsets[number], pointers[number], size)
        for number in plan.early_strided:
            copy_strided(sources[number], base + plan.offsets[number], plan.sizes[number])
        if plan.late_moves:
            moves = [(base + plan.offsets[n], pointers[n], plan.sizes[n]) for n in plan.late_moves]
            self._worker.submit(lambda: _run(job, moves))
        else:
            job.finish(None)
        return job

    def copy_now(self, capture: Capture, slot: Slot, numbers: Iterable[int]) -> None:
        """Copy the leaves `numbers` before returning."""
        for number in numbers:
            leaf, source = capture.layout.leaves[number], capture.sources[number]
            if number in capture.strided:
                copy_strided(source, slot.address + leaf.offset, leaf.nbytes)
            elif leaf.nbytes:
                _move_holding_gil(slot.address + leaf.offset, source.data_ptr(), leaf.nbytes)

    def stop(self) -> None:
        """See Copier."""
        self._worker.stop(None)

    def _plan_for(self, capture: Capture, late: Sequence[int]) -> _CopyPlan:
        plan = self._plan
        known = plan is not None and plan.layout is capture.layout and plan.strided is capture.strided
        if plan is None or not known or plan.late is not late:
            plan = self._plan = _make_plan(capture, late)
        return plan


def _make_plan(capture: Capture, late: Sequence[int]) -> _CopyPlan:
    leaves = capture.layout.leaves
    _, late_moves = small_leaves_first(capture.layout, late)
    chosen = set(late_moves)
    early = [number for number, leaf in enumerate(leaves) if number not in chosen and leaf.nbytes]
    return _CopyPlan(
        layout=capture.layout,
        strided=capture.strided,
        late=late,
        early_moves=[number for number in early if number not in capture.strided],
        early_strided=[number for number in early if number in capture.strided],
        late_moves=late_moves,
        offsets=[leaf.offset for leaf in leaves],
        sizes=[leaf.nbytes for leaf in leaves],
    )


def _run(job: CpuCopyJob, moves: list[tuple[int, int, int]]) -> None:
    try:
        for destination, source, size in moves:
            failpoints.hit(LATE_COPY)
            _move(destination, source, size)
    except BaseException as error:
        job.finish(error)
        raise
    job.finish(None)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over raw memory; whoever calls keeps that memory mapped."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def copy_strided(source: torch.Tensor, address: int, nbytes: int) -> None:
    """Gather a tensor that no permutation makes contiguous."""
    with torch.no_grad():
        bytes_at(address, nbytes).view(source.dtype).view(source.shape).copy_(source)
