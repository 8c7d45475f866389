"""Copying from GPUs into page-locked slots, without a host sync on the training thread and without GPU memory.

Early leaves are copied on the compute stream, in stream order, so nothing enqueued later can tear them. Late leaves
are copied on a side stream that waits for the compute stream's event; before the next optimizer step the compute
stream waits for the side stream. The training thread only waits until a background thread has enqueued all of that.
CPU tensors (generators, counters, an optimizer's step numbers) are copied at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from easyckpt.memory.slot import Slot
from easyckpt.saving.copying import Arrival, CpuCopier, LiveLeaves, copy_now, differing_on_cpu
from easyckpt.saving.raw_memory import bytes_at
from easyckpt.saving.waking import Latch
from easyckpt.saving.worker import Result, Worker
from easyckpt.state.capture import Capture

_CAPTURE_MODE_RELAXED = 2
_Pair = tuple[torch.Tensor, torch.Tensor]  # (destination, source) of one shape, strides and dtype


@dataclass(slots=True)
class _Plan:
    """What of a layout's copying can be known beforehand. Holds no tensor of the user's."""

    facts: object
    late: Sequence[int]
    on_cpu: list[int]
    early: list[int]
    strided: list[int]
    late_by_device: dict[torch.device, list[int]]
    devices: list[torch.device]
    forms: dict[int, tuple[torch.dtype, torch.Size, tuple[int, ...]]]
    destinations: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    """By address of the slot and number of the leaf."""


class CudaCopyJob(Arrival):
    """A copy under way from one or more GPUs."""

    def __init__(self, capture: Capture, plan: _Plan) -> None:
        numbers = [number for device in plan.devices for number in plan.late_by_device[device]]
        sources = [capture.sources[number] for number in numbers]
        super().__init__(sources, numbers)
        self.devices = plan.devices
        # Aliases, made now: after `p.data = q` the tensor itself would be q.
        self.memory = dict(zip(numbers, map(torch.Tensor.detach, sources), strict=True))
        self.early_events = {device: _event() for device in plan.devices}
        self.late_events = {device: _event() for device in plan.devices}
        self.launched = Latch()

    def wait_before_step(self) -> None:
        """The host waits until all copies are enqueued, the compute streams until they are done."""
        self.launched.wait()
        for device in self.devices:
            with torch.cuda.device(device):
                capturing = torch.cuda.is_current_stream_capturing()
            if capturing:  # a graph cannot wait for an event from outside of it
                self.wait()
            else:
                torch.cuda.current_stream(device).wait_event(self.late_events[device])


class CudaCopier:
    """Copies CUDA tensors on side streams and CPU tensors by memmove."""

    def __init__(self) -> None:
        self._launcher = Worker("easyckpt-copy-cuda")
        self._waiter = Worker("easyckpt-arrival")
        self._launcher.submit(_relax_capture_mode)
        self._waiter.submit(_relax_capture_mode)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._plan: _Plan | None = None

    def start(self, capture: Capture, slot: Slot, late: Sequence[int]) -> CudaCopyJob:
        """See Copier."""
        plan = self._plan
        if plan is None or plan.facts is not capture.early or plan.late is not late:
            plan = self._plan = _make_plan(capture, late)
        job = CudaCopyJob(capture, plan)
        copy_now(capture, slot, plan.on_cpu)
        destinations = _destinations(capture, plan, slot)
        early = [(destinations[number], capture.sources[number]) for number in plan.early]
        for number in plan.strided:
            early += _strided_pairs(capture.sources[number], slot.address + capture.layout.leaves[number].offset)
        _copy(early)
        for device in plan.devices:
            job.early_events[device].record(torch.cuda.current_stream(device))
        # Until the copies have arrived, the source tensors and the slot have to live.
        keep = [(slot, early)]
        self._launcher.submit(lambda: self._launch(job, plan, destinations, keep))
        return job

    def differing(self, live: LiveLeaves, slot: Slot) -> list[int]:
        """See Copier. Only version counters watch over what is on a GPU: to look at it would take its time."""
        return differing_on_cpu(live, slot)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """See Copier."""
        return self._launcher.submit(job)

    def stop(self) -> None:
        """See Copier."""
        self._launcher.stop(None)
        self._waiter.stop(None)

    def _launch(
        self, job: CudaCopyJob, plan: _Plan, destinations: dict[int, torch.Tensor], keep: list[tuple[Slot, list[_Pair]]]
    ) -> None:
        error: BaseException | None = None
        try:
            for device in job.devices:
                stream = self._streams.get(device)
                if stream is None:
                    stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    stream.wait_event(job.early_events[device])
                    _copy([(destinations[n], job.memory[n]) for n in plan.late_by_device[device]])
                    job.late_events[device].record(stream)
        except BaseException as failure:  # noqa: BLE001 - it belongs to the snapshot
            error = failure
        job.launched.set()
        streams = [self._streams[device] for device in job.devices if device in self._streams]
        self._waiter.submit(lambda: _arrive(job, error, streams, keep))


def _make_plan(capture: Capture, late: Sequence[int]) -> _Plan:
    sources, leaves = capture.sources, capture.layout.leaves
    chosen = set(late)
    on_gpu = [n for n, source in enumerate(sources) if is_on_gpu(source) and leaves[n].nbytes]
    devices = sorted({sources[number].device for number in on_gpu}, key=str)
    return _Plan(
        facts=capture.early,
        late=late,
        on_cpu=[n for n, source in enumerate(sources) if not is_on_gpu(source)],
        early=[n for n in on_gpu if n not in chosen and n not in capture.strided],
        strided=[n for n in on_gpu if n in capture.strided],
        late_by_device={d: [n for n in on_gpu if n in chosen and sources[n].device == d] for d in devices},
        devices=devices,
        forms={
            n: (sources[n].dtype, sources[n].shape, sources[n].stride()) for n in on_gpu if n not in capture.strided
        },
    )


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether its copy is a stream's work."""
    return tensor.device.type != "cpu"


def _destinations(capture: Capture, plan: _Plan, slot: Slot) -> dict[int, torch.Tensor]:
    """Each dense leaf's place in the slot as a tensor of the leaf's form: one block of memory on both sides."""
    found = plan.destinations.get(slot.address)
    if found is None:
        leaves, base = capture.layout.leaves, slot.address
        found = plan.destinations[base] = {
            n: bytes_at(base + leaves[n].offset, leaves[n].nbytes).view(dtype).as_strided(shape, strides)
            for n, (dtype, shape, strides) in plan.forms.items()
        }
    return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _arrive(
    job: CudaCopyJob,
    error: BaseException | None,
    streams: list[torch.cuda.Stream],
    keep: list[tuple[Slot, list[_Pair]]],
) -> None:
    try:
        for device in job.devices:
            job.early_events[device].synchronize()
            if error is None:
                job.late_events[device].synchronize()
        if error is not None:  # what was enqueued before the error still reads the sources
            for stream in streams:
                stream.synchronize()
    except BaseException as failure:  # noqa: BLE001 - it belongs to the snapshot
        error = error or failure
    keep.clear()
    job.memory = {}
    job.finish(error)


def _copy(pairs: Iterable[_Pair]) -> None:
    """One call that loops in C++ and lets go of the GIL; it falls back to asynchronous copies one by one there."""
    destinations, sources = [], []
    for destination, source in pairs:
        destinations.append(destination)
        sources.append(source)
    if sources:
        with torch.no_grad():
            torch._foreach_copy_(destinations, sources, non_blocking=True)


def _strided_pairs(source: torch.Tensor, address: int) -> Iterator[_Pair]:
    """The dense rows of a strided tensor: copying it whole would gather it in GPU memory first."""
    if source.numel() == 0:
        return
    source = source.detach()
    if source.is_contiguous():
        nbytes = source.numel() * source.element_size()
        yield bytes_at(address, nbytes).view(source.dtype).view(source.shape), source
        return
    step = source[0].numel() * source.element_size()
    for row in range(source.shape[0]):
        yield from _strided_pairs(source[row], address + row * step)


def _relax_capture_mode() -> None:
    """Let this thread use CUDA while another one captures a graph. Best effort: the symbol may be out of reach."""
    for name in (None, "libcudart.so.13", "libcudart.so.12"):
        try:
            exchange = ctypes.CDLL(name).cudaThreadExchangeStreamCaptureMode
        except (OSError, AttributeError):
            continue
        exchange(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))
        return


def make_copier(use_cuda: bool) -> CpuCopier | CudaCopier:
    """The copier for the devices of this process."""
    return CudaCopier() if use_cuda else CpuCopier()
