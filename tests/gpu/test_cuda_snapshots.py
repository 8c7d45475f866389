"""Snapshots of a GPU's state: exact while the CPU runs ahead, without GPU memory, without waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import raw
from support.staged import Rig, until, view_layout
from torch import nn

import easyckpt
from easyckpt.format.codec import path_text
from easyckpt.saving.cuda_copying import CudaCopier

WIDTH = 1024


class Job:
    """A step that takes the GPU far longer than it takes the CPU to enqueue it."""

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.model.to(device=device, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.state: dict[str, Any] = {"model": self.model, "opt": self.optimizer}
        self.load = torch.randn(4096, 4096, device=device)
        self.dtype = dtype

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(10):
            self.load = self.load @ self.load * 1e-4
        self.model(torch.randn(64, WIDTH, device="cuda", dtype=self.dtype)).pow(2).mean().backward()
        self.optimizer.step()


class GpuRig(Rig):
    """References are kept on the GPU, in stream order, so that the CPU can run ahead."""

    def save(self, step: int, *, overlap: bool = True) -> bool:
        self.stager.end_window("save")
        capture = self.capture.capture()
        need = capture.layout.image_bytes
        if not self.arena.ready(need):
            self.arena.ensure(need, 3 * len(capture.layout.encoded) + (64 << 10))
            self.arena.wait_ready()
        floor = max(self.sealed, default=-1)
        slot = self.arena.acquire(step, need, floor, ())
        if slot is None:
            self.skipped.append(step)
            return False
        self.kept[step] = [source.detach().clone() for source in capture.sources]
        self.stager.stage(self.identity, step, capture, slot, overlap=overlap)
        return True

    @property
    def kept(self) -> dict[int, list[torch.Tensor]]:
        return self.__dict__.setdefault("_kept", {})

    @property
    def identity(self) -> Any:
        from support.staged import IDENTITY

        return IDENTITY

    def _compare(self, step: int) -> None:
        """On the thread that seals: only note the image; it is compared at the end."""
        view = self.arena.view(step, "main")
        self.__dict__.setdefault("images", {})[step] = (view_layout(view), bytes(view.image))

    def end(self) -> None:
        self.stager.end_window("close")
        torch.cuda.synchronize()
        for step, (layout, image) in self.__dict__.get("images", {}).items():
            for leaf, tensor in zip(layout.leaves, self.kept[step], strict=True):
                host = tensor.cpu()
                expected = raw(host.permute(leaf.order) if leaf.order else host)
                assert image[leaf.offset : leaf.offset + leaf.nbytes] == expected, (step, path_text(leaf.path))


@pytest.fixture
def rig_of(memory_dir: Path) -> Iterator[Callable[..., GpuRig]]:
    made: list[GpuRig] = []

    def make(state: Any, **options: Any) -> GpuRig:
        directory = memory_dir / f"rig-{len(made)}"
        directory.mkdir()
        made.append(GpuRig(directory, state, copier=CudaCopier(), **options))
        return made[-1]

    yield make
    torch.cuda.synchronize()
    for rig in made:
        rig.close()


def _train(rig: GpuRig, step: Callable[[], Any], count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        step()
        rig.save(number)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"capturable": True, "foreach": True}], ids=str
)
def test_bitwise_while_the_cpu_runs_ahead(rig_of: Callable[..., GpuRig], options: dict[str, Any]) -> None:
    job = Job(**options)
    rig = rig_of(job.state)
    _train(rig, job.step, 12)
    job.step()
    rig.end()
    assert len(rig.sealed) >= 4
    assert sorted(rig.sealed + rig.skipped) == list(range(1, 13))
    assert not rig.discarded


def test_bfloat16_with_fused_adamw(rig_of: Callable[..., GpuRig]) -> None:
    job = Job(dtype=torch.bfloat16, fused=True)
    rig = rig_of(job.state)
    _train(rig, job.step, 8)
    job.step()
    rig.end()
    assert not rig.discarded


def test_buffers_and_averages_that_change_after_the_save(rig_of: Callable[..., GpuRig]) -> None:
    job = Job(fused=True)
    average = nn.Linear(WIDTH, WIDTH).cuda()
    rig = rig_of({**job.state, "average": average})
    for number in range(1, 9):
        job.step()
        rig.save(number)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.add_(1.0)
            job.model[1].running_mean.add_(1.0)
    job.step()
    rig.end()
    assert not rig.discarded


def test_a_write_outside_of_a_step_is_discarded(rig_of: Callable[..., GpuRig]) -> None:
    job = Job(fused=True)
    rig = rig_of(job.state)
    _train(rig, job.step, 4)
    torch.cuda.synchronize()
    until(lambda: 3 in rig.sealed)
    rig.save(5)
    with torch.no_grad():
        job.model[0].weight.add_(1.0)
    job.step()
    rig.end()
    assert 5 not in rig.sealed


def test_an_optimizer_whose_step_becomes_a_graph(rig_of: Callable[..., GpuRig]) -> None:
    """Its hook fires while the graph is captured, in the middle of a window, and never when it is replayed."""
    job, graphed = Job(fused=True), Job(capturable=True, foreach=True)
    rig = rig_of({**job.state, "graphed": graphed.model, "graphed opt": graphed.optimizer})

    def both() -> None:
        job.step()
        graphed.step()

    _train(rig, both, 4)
    both()
    torch.cuda.synchronize()
    rig.save(5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.optimizer.step()
    for number in range(6, 14):
        graph.replay()
        job.step()
        rig.save(number)
    job.step()
    rig.end()
    assert "CUDA graph" in rig.discarded[5]
    assert list(rig.discarded) == [5]
    assert len(rig.sealed) >= 4


def test_a_save_takes_no_gpu_memory(memory_dir: Path, tmp_path: Path) -> None:
    job = Job(fused=True)
    job.step()
    with easyckpt.Checkpointer(tmp_path / "root", job.state, save_storage_interval=1000, signals=()) as ckpt:
        ckpt.load()
        for number in range(1, 4):
            job.step()
            ckpt.save_if_needed(number)
        for number in range(4, 10):
            job.step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()
            ckpt.save_if_needed(number)
            ckpt._parts.stager.end_window("wait")
            after = torch.cuda.memory_stats()
            for key in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.allocated"):
                assert after[key] == before[key], key
    assert ckpt.stats().counts["SnapshotSealed"] == 9


def test_strided_sources_make_no_temporary(rig_of: Callable[..., GpuRig]) -> None:
    wide = torch.randn(300, 500, device="cuda")
    box = {"cut": wide[:, :250], "turned": wide.t(), "deep": torch.randn(4, 6, 8, device="cuda")[:, ::2, :5]}
    rig = rig_of({"box": box})
    rig.save(1)
    rig.kept.clear()
    rig.stager.end_window("wait")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    rig.stager.end_window("save")
    capture = rig.capture.capture()
    slot = rig.arena.acquire(2, capture.layout.image_bytes, 1, ())
    assert slot is not None
    rig.kept[2] = []
    rig.stager.stage(rig.identity, 2, capture, slot)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    until(lambda: 2 in rig.sealed)
    layout, image = rig.__dict__["images"][2]
    for leaf, source in zip(layout.leaves, capture.sources, strict=True):
        host = source.cpu()
        strided = leaf.path[-1] in ("cut", "deep")
        assert image[leaf.offset : leaf.offset + leaf.nbytes] == raw(host if strided else host.permute(leaf.order))
    rig.__dict__["images"].clear()


def test_generators_are_restored(tmp_path: Path) -> None:
    job = Job(fused=True)
    own = torch.Generator("cuda").manual_seed(5)
    job.state["own"] = own
    with easyckpt.Checkpointer(tmp_path / "root", job.state, signals=()) as ckpt:
        ckpt.load()
        job.step()
        ckpt.save(1, wait=True)
        expected = (torch.randn(9, device="cuda"), torch.randn(9, device="cuda", generator=own))
    torch.manual_seed(99)
    own.manual_seed(99)
    with easyckpt.Checkpointer(tmp_path / "root", job.state, signals=()) as ckpt:
        assert ckpt.load().step == 1
        assert torch.equal(torch.randn(9, device="cuda"), expected[0])
        assert torch.equal(torch.randn(9, device="cuda", generator=own), expected[1])


def test_a_scaler_that_skips(rig_of: Callable[..., GpuRig]) -> None:
    job = Job()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    rig = rig_of({**job.state, "scaler": scaler})
    for number in range(1, 11):
        loss = job.model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean()
        scaler.scale(loss * (float("inf") if number % 4 == 3 else 1.0)).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        rig.save(number)
    job.step()
    rig.end()
    assert not rig.discarded
    assert not rig.warned


def test_a_graph_is_captured_elsewhere_meanwhile(rig_of: Callable[..., GpuRig]) -> None:
    job = Job(fused=True)
    rig = rig_of(job.state)
    _train(rig, job.step, 4)
    still = torch.randn(256, 256, device="cuda")
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        still @ still
    warm.synchronize()
    job.step()
    rig.save(5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = still @ still
    graph.replay()
    job.step()
    rig.end()
    assert torch.equal(made, still @ still)
    assert 5 in rig.sealed or 5 in rig.skipped


def test_a_step_that_is_captured_into_a_graph(rig_of: Callable[..., GpuRig]) -> None:
    """Its hook fires while the graph is captured, and never again: overlap ends, nothing is torn."""
    job = Job(capturable=True, foreach=True)
    rig = rig_of(job.state)
    _train(rig, job.step, 4)
    for parameter in job.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    torch.cuda.synchronize()
    rig.save(5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.optimizer.step()
    for number in range(6, 12):
        rig.save(number)
        graph.replay()
    rig.end()
    assert len(rig.discarded) <= 2


KILLED = """
import os, signal, sys
import torch
sys.path[:0] = [{repository!r}, {tests!r}, {tests!r} + "/gpu"]
import easyckpt
from test_cuda_snapshots import Job
job = Job(fused=True)
with easyckpt.Checkpointer({root!r}, job.state, save_storage_interval=10**9, signals=()) as ckpt:
    restored = ckpt.load()
    for step in range(restored.step + 1, 21):
        job.step()
        ckpt.save_if_needed(step)
        if step == 12 and restored.tier is None:
            job.step()
            torch.cuda.synchronize()
            ckpt._parts.stager.end_window("wait")
            os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda.synchronize()
    total = sum(p.double().sum().item() for p in job.model.parameters())
    print(restored.tier, restored.step, total.hex())
"""


def test_kill_and_restore_from_shared_memory(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]

    def run(root: str) -> subprocess.CompletedProcess[str]:
        script = KILLED.format(repository=str(tests.parent), tests=str(tests), root=str(tmp_path / root))
        return subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            env=dict(os.environ),
            check=False,
        )

    killed = run("one")
    assert killed.returncode == -9, killed.stderr
    resumed = run("one")
    assert resumed.returncode == 0, resumed.stderr
    tier, step, total = resumed.stdout.split()
    assert (tier, step) == ("memory", "12")
    script = KILLED.format(repository=str(tests.parent), tests=str(tests), root=str(tmp_path / "two"))
    straight = subprocess.run(
        [sys.executable, "-c", script.replace("step == 12", "step == -1")],
        capture_output=True, text=True, timeout=240, env=dict(os.environ), check=False,
    )  # fmt: skip
    assert straight.stdout.split()[2] == total, straight.stderr
