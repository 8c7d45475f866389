"""Copies into a slot are exact for every kind of tensor, and the copying thread disturbs nobody."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.staged import Rig, rig_of  # noqa: F401 - rig_of is a fixture
from torch import nn

from easyckpt.format.image import LeafSpec, plan_layout
from easyckpt.saving import copying, cuda_copying, raw_memory

WIDTH = 128


KINDS = {
    "contiguous": torch.randn(40, 30),
    "transposed": torch.randn(40, 30).t(),
    "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "every second": torch.randn(40, 30)[:, ::2],
    "a column": torch.randn(40, 30)[:, 3],
    "a large strided one": torch.randn(600, 700)[:, 1:],
    "expanded": torch.randn(1, 30).expand(40, 30),
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 7),
    "view of a large storage": torch.randn(1000)[17:29],
    "odd address": torch.arange(64, dtype=torch.uint8)[3:],
    "bool": torch.tensor([True, False, True]),
    "bfloat16": torch.randn(33).bfloat16(),
    "float8": torch.randn(40).to(torch.float8_e4m3fn),
    "strided float8": torch.randn(40, 6).to(torch.float8_e5m2)[:, ::2],
    "complex128": torch.randn(7, dtype=torch.complex128),
    "strided complex": torch.randn(7, 4, dtype=torch.complex64)[:, ::2],
    "strided uint16": torch.arange(40, dtype=torch.int16).view(torch.uint16)[::3],
    "NaN with a payload": torch.tensor([0x7FC12345, -0x123], dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_copied_exactly(rig_of: Callable[..., Rig], kind: str) -> None:
    rig = rig_of({"box": {"before": torch.ones(3), "it": KINDS[kind], "after": torch.ones(5, dtype=torch.float64)}})
    rig.save(1)
    rig.end()
    assert rig.sealed == [1]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_thousands_of_tiny_tensors_are_copied_exactly_wherever_they_move(
    rig_of: Callable[..., Rig], itemsize: int
) -> None:
    """A component may hand over fresh tensors at each save: of the same form, at addresses aligned as no plan knows."""

    class Moving:
        def __init__(self) -> None:
            self.pool = torch.randint(0, 256, (600 * 24 + 64,), dtype=torch.uint8)
            self.begin = 0

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {str(n): self.pool[self.begin + 24 * n :][:24] for n in range(600)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            raise NotImplementedError

    moving = Moving()
    rig = rig_of({"moving": moving})
    for step, begin in enumerate((0, itemsize, 3 * itemsize, 16, 0), start=1):
        moving.begin = begin
        rig.save(step)
    rig.end()
    assert rig.sealed == [1, 2, 3, 4, 5]


def test_late_leaves_of_odd_form_are_copied_exactly(
    rig_of: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other memory formats, item sizes and addresses, all late."""
    monkeypatch.setattr(copying, "SMALL_LEAVES", (1,))
    pool = torch.randn(70_001)
    halves = torch.randn(90_001).bfloat16()
    parameters = [
        nn.Parameter(torch.randn(8, 3, 9, 9).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(60, 70).t()),
        nn.Parameter(pool[1:40_001]),
        nn.Parameter(halves[1:40_000]),  # at an address that words do not have
        nn.Parameter(torch.randn(1000, dtype=torch.float64)),
        nn.Parameter(torch.randn(501, dtype=torch.complex64)),
        nn.Parameter(torch.randn(3)),
        nn.Parameter(torch.empty(0, 5)),
        nn.Parameter(torch.randn(50, 60)[:, ::2]),
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    rig = rig_of({"model": nn.ParameterList(parameters), "opt": optimizer})
    for step in range(1, 7):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        rig.save(step)
        assert (rig.window_step is not None) == (step > 1)
    optimizer.step()
    rig.end()
    assert rig.sealed == list(range(1, 7))


def test_small_leaves_are_better_copied_at_once() -> None:
    sizes = [100, 1 << 20, 3000, 40 << 10]
    specs = [LeafSpec(("t", str(n)), "uint8", (size,), (0,), "cpu", False) for n, size in enumerate(sizes)]
    layout = plan_layout(specs, {}, 0, 1)
    assert copying.small_leaves_first(layout, [0, 1, 2, 3]) == ([0, 2], [1, 3])


def test_many_small_leaves_are_not_all_copied_at_once() -> None:
    count = copying.SMALL_TOTAL_BYTES // (20 << 10) + 1
    specs = [LeafSpec(("t", str(n)), "uint8", (20 << 10,), (0,), "cpu", False) for n in range(count)]
    layout = plan_layout(specs, {}, 0, 1)
    assert copying.small_leaves_first(layout, range(count)) == ([], list(range(count)))


def test_large_moves_let_go_of_the_gil() -> None:
    """What is copied in the background, and what is large, is moved by a function that releases the GIL."""
    holds = ctypes._FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]
    assert not raw_memory.move_large._flags_ & holds  # type: ignore[attr-defined]
    assert not raw_memory._compare._flags_ & holds  # type: ignore[attr-defined]
    assert raw_memory.move_small._flags_ & holds  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_words_at_addresses(kind: torch.dtype) -> None:
    values = torch.randint(0, 100, (100_000,), dtype=kind)
    picks = torch.randint(0, 100_000, (30_000,))
    numbers = raw_memory.word_number(values.data_ptr() + kind.itemsize * picks, kind.itemsize)
    assert torch.equal(raw_memory.words_at(numbers, kind), values[picks])
    assert raw_memory.words_at(torch.empty(0, dtype=torch.int64), kind).numel() == 0


POOL = """
import os, sys, tempfile
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from support.staged import Rig
from easyckpt.saving import copying
copying.SMALL_LEAVES = (1,)
parameters = [nn.Parameter(torch.randn(64)) for _ in range(10_000)]  # four probes each: above torch's grain size
optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
for p in parameters:
    p.grad = torch.ones_like(p)
rig = Rig(Path({directory!r}), {{"model": nn.ParameterList(parameters), "opt": optimizer}})
rig.save(1)
torch.ones(1 << 20).exp_()  # the main thread's own pool
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
for step in range(2, 5):
    optimizer.step()
    rig.save(step)
    assert rig.window_step == step
    rig.stager._window.job.wait()
print(threads() - before, len(rig.sealed))
rig.end()
rig.close()
"""


def test_the_copying_thread_starts_no_second_pool(memory_dir: Path) -> None:
    directory = memory_dir / "rig"
    directory.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}
    script = POOL.format(tests=str(Path(__file__).parent), directory=str(directory))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.split() == ["0", "3"], done.stderr


def test_an_error_while_copying_belongs_to_the_snapshot(rig_of: Callable[..., Rig]) -> None:
    from easyckpt import failpoints

    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rig = rig_of({"model": model, "opt": optimizer})
    for step in (1, 2, 3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        rig.save(step)
    optimizer.step()
    failpoints.arm("staging.copy=error:EIO")
    rig.save(4)
    optimizer.step()
    rig.save(5)  # nothing is raised: other ranks would wait for this one in their next collective
    optimizer.step()
    rig.end()
    assert list(rig.discarded) == [4]
    assert "copying it failed" in rig.discarded[4]
    assert rig.sealed == [1, 2, 3, 5]


# The CUDA path, as far as a CPU allows: streams that do at once what they are told.


class FakeStream:
    def __init__(self, *_: Any) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        assert event.recorded
        self.waited.append(event)

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class FakeEvent:
    def __init__(self) -> None:
        self.recorded = False

    def record(self, stream: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_copying, "is_on_gpu", lambda tensor: tensor.numel() >= 1000)
    return stream


def _gpu_job() -> tuple[nn.Module, Callable[[], None], dict[str, Any]]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Conv2d(8, 16, 3))
    model[2].weight.data = model[2].weight.data.to(memory_format=torch.channels_last)
    model.register_buffer("wide", torch.randn(40, 60)[:, ::2])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        (model[1](model[0](torch.randn(4, WIDTH))).sum() + model[2](torch.randn(1, 8, 5, 5)).sum()).backward()
        optimizer.step()

    return model, step, {"model": model, "opt": optimizer}


def _saved(
    rig_of: Callable[..., Rig], last: int, copier: cuda_copying.CudaCopier | None = None
) -> tuple[nn.Module, Callable[[], None], Rig]:
    """A job on a GPU that is none, with its rig, which has snapshots of the steps up to `last`."""
    model, step, state = _gpu_job()
    rig = rig_of(state, copier=copier or cuda_copying.CudaCopier())
    for number in range(1, last + 1):
        step()
        rig.save(number)
    return model, step, rig


def test_cuda_copies_are_exact_and_streams_wait(rig_of: Callable[..., Rig], compute: FakeStream) -> None:
    _, step, rig = _saved(rig_of, 6)
    waited = len(compute.waited)
    step()
    assert len(compute.waited) == waited + 1
    rig.end()
    assert rig.sealed == list(range(1, 7))
    assert not rig.discarded


def test_a_write_in_the_window_of_a_cuda_copy_is_seen_by_counters(
    rig_of: Callable[..., Rig], compute: FakeStream
) -> None:
    model, step, rig = _saved(rig_of, 4)
    with torch.no_grad():
        model[0].weight.add_(1)
    step()
    rig.save(5)
    step()
    rig.end()
    assert list(rig.discarded) == [4]


def test_memory_of_a_cuda_copy_is_what_it_was_at_the_save(rig_of: Callable[..., Rig], compute: FakeStream) -> None:
    """The background thread enqueues copies after the call has returned; `p.data = q` may come first."""
    copier = cuda_copying.CudaCopier()
    model, step, rig = _saved(rig_of, 3, copier)
    step()
    import threading

    go = threading.Event()
    copier._launcher.submit(go.wait)
    rig.save(4)
    model[0].weight.data = torch.zeros(WIDTH, WIDTH)
    go.set()
    step()
    rig.end()
    assert rig.sealed[-1] == 4


def test_a_graph_that_is_captured_waits_on_the_host(
    rig_of: Callable[..., Rig], compute: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, step, rig = _saved(rig_of, 3)
    waited = len(compute.waited)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step()
    assert len(compute.waited) == waited
    rig.end()
    assert rig.sealed == [1, 2, 3]


def test_an_error_while_enqueueing_cuda_copies(
    rig_of: Callable[..., Rig], compute: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, step, rig = _saved(rig_of, 3)
    step()
    original = FakeStream.wait_event

    def fail(self: FakeStream, event: Any) -> None:
        if self is not compute:
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(FakeStream, "wait_event", fail)
    rig.save(4)
    rig.stager._window.job.wait()  # type: ignore[union-attr]
    monkeypatch.setattr(FakeStream, "wait_event", lambda self, event: original(self, event) if event.recorded else None)
    step()
    rig.save(5)
    step()
    rig.end()
    assert list(rig.discarded) == [4]
    assert "CUDA error" in rig.discarded[4]
