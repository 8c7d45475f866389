"""Copying from GPUs into page-locked slots, without a host sync on the training thread and without GPU memory.

Early leaves are copied on the compute stream, in stream order, so nothing enqueued later can tear them. Late leaves
are copied on a side stream that waits for the compute stream's event; before the next optimizer step the compute
stream waits for the side stream. The training thread only waits until a background thread has enqueued all of that.
CPU tensors (generators, counters, an optimizer's step numbers) are copied at once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence

import torch

from easyckpt.format.image import Layout
from easyckpt.memory.slot import Slot
from easyckpt.saving.copying import Arrival, CpuCopier, bytes_at, version_of
from easyckpt.saving.worker import Worker
from easyckpt.state.capture import Capture

_CAPTURE_MODE_RELAXED = 2
_Pair = tuple[torch.Tensor, torch.Tensor]  # (destination, source), flat and of one dtype


class CudaCopyJob(Arrival):
    """A copy under way from one or more GPUs. Holds the sources until it has arrived."""

    def __init__(self, sources: list[torch.Tensor], numbers: list[int], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.sources, self.numbers = sources, numbers
        self.versions = list(map(version_of, sources))
        self.devices = devices
        self.early_events = {device: _event() for device in devices}
        self.late_events = {device: _event() for device in devices}
        self.launched = threading.Event()

    def wait_before_step(self) -> None:
        """The host waits until all copies are enqueued, the compute streams until they are done."""
        self.launched.wait()
        for device in self.devices:
            torch.cuda.current_stream(device).wait_event(self.late_events[device])

    def written_to(self) -> list[int]:
        """See CopyJob. Version counters live on the host."""
        now = map(version_of, self.sources)
        return [number for number, then, new in zip(self.numbers, self.versions, now, strict=True) if then != new]


class CudaCopier:
    """Copies CUDA tensors on side streams and CPU tensors by memmove."""

    def __init__(self) -> None:
        self._cpu = CpuCopier()
        self._launcher = Worker("easyckpt-copy-cuda")
        self._waiter = Worker("easyckpt-arrival")
        self._launcher.submit(_relax_capture_mode)
        self._waiter.submit(_relax_capture_mode)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, capture: Capture, slot: Slot, late: Sequence[int]) -> CudaCopyJob:
        """See Copier."""
        chosen = set(late)
        leaves = capture.layout.leaves
        on_gpu = [n for n, source in enumerate(capture.sources) if source.device.type == "cuda" and leaves[n].nbytes]
        late_numbers = [number for number in on_gpu if number in chosen]
        early_numbers = [number for number in on_gpu if number not in chosen]
        devices = sorted({capture.sources[number].device for number in on_gpu}, key=str)
        job = CudaCopyJob([capture.sources[number] for number in late_numbers], late_numbers, devices)
        self._cpu.copy_now(capture, slot, [n for n, s in enumerate(capture.sources) if s.device.type == "cpu"])
        early = list(_pairs(capture, slot, early_numbers))
        with torch.no_grad():
            _copy(early)
        for device in devices:
            job.early_events[device].record(torch.cuda.current_stream(device))
        layout, base, keep = capture.layout, slot.address, (slot, early)
        self._launcher.submit(lambda: self._launch(job, layout, base, keep))
        return job

    def stop(self) -> None:
        """See Copier."""
        self._launcher.stop(None)
        self._waiter.stop(None)
        self._cpu.stop()

    def _launch(self, job: CudaCopyJob, layout: Layout, base: int, keep: object) -> None:
        error: BaseException | None = None
        try:
            with torch.no_grad():
                for device in job.devices:
                    self._launch_on(job, device, layout, base)
        except BaseException as failure:  # noqa: BLE001 - it belongs to the snapshot
            error = failure
        job.launched.set()
        self._waiter.submit(lambda: _arrive(job, error, keep))

    def _launch_on(self, job: CudaCopyJob, device: torch.device, layout: Layout, base: int) -> None:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        pairs = [
            _flat_pair(layout, base, number, source)
            for number, source in zip(job.numbers, job.sources, strict=True)
            if source.device == device
        ]
        with torch.cuda.stream(stream):
            stream.wait_event(job.early_events[device])
            _copy(pairs)
            job.late_events[device].record(stream)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _arrive(job: CudaCopyJob, error: BaseException | None, keep: object) -> None:
    try:
        if error is None:
            for device in job.devices:
                job.late_events[device].synchronize()
    except BaseException as failure:  # noqa: BLE001 - it belongs to the snapshot
        error = failure
    del keep  # until here the source tensors and the slot had to live
    job.finish(error)


def _copy(pairs: Sequence[_Pair]) -> None:
    """One call that loops in C++ and lets go of the GIL; it falls back to asynchronous copies one by one there."""
    if pairs:
        destinations, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(destinations), list(sources), non_blocking=True)


def _pairs(capture: Capture, slot: Slot, numbers: Sequence[int]) -> Iterator[_Pair]:
    base, layout = slot.address, capture.layout
    for number in numbers:
        source = capture.sources[number]
        if number in capture.strided:
            yield from _strided_pairs(source, base + layout.leaves[number].offset)
        else:
            yield _flat_pair(layout, base, number, source)


def _flat_pair(layout: Layout, base: int, number: int, source: torch.Tensor) -> _Pair:
    """A dense tensor as the one block of memory that it is, whatever its dimension order."""
    leaf = layout.leaves[number]
    flat = source.detach().as_strided((source.numel(),), (1,))
    return bytes_at(base + leaf.offset, leaf.nbytes).view(source.dtype), flat


def _strided_pairs(source: torch.Tensor, address: int) -> Iterator[_Pair]:
    """The dense rows of a strided tensor: copying it whole would gather it in GPU memory first."""
    if source.numel() == 0:
        return
    source = source.detach()
    dense = source.is_contiguous() and not source.is_conj() and not source.is_neg()
    if dense or source.dim() == 0:
        nbytes = source.numel() * source.element_size()
        yield bytes_at(address, nbytes).view(source.dtype), source.reshape(-1)
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
