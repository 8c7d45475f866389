"""A snapshot is never torn: what is sealed is the state of exactly its step, else it was discarded, and counted.

Mutations happen while the copying thread certainly stands before a tensor that it has not copied yet.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.staged import Rig, rig_of, stands_in, until  # noqa: F401 - rig_of is a fixture
from torch import nn

from easyckpt.memory.slot import Slot
from easyckpt.saving import staging
from easyckpt.saving.copying import CpuCopier, LiveLeaves

WIDTH = 128
FEW_STEPS = 3


class Job:
    """A model whose parameters are large enough to be copied late, its optimizer, and a step."""

    def __init__(self, make: Callable[[Any], Any] | None = None, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        make = make or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        self.optimizer = make(list(self.model.parameters()))
        self.state: dict[str, Any] = {"model": self.model, "opt": self.optimizer}

    def backward(self) -> None:
        self.model(torch.randn(8, WIDTH)).pow(2).mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    @property
    def weight(self) -> nn.Parameter:
        return next(self.model.parameters())


def settle(rig: Rig, step: Callable[[], Any], first: int = 1) -> int:
    """Train until snapshots overlap; returns the next step's number."""
    for number in range(first, first + FEW_STEPS):
        step()
        assert rig.save(number)
    step()
    rig.end()
    return first + FEW_STEPS


def overlapped(rig: Rig, step: int) -> bool:
    """Take the snapshot of `step` with its copy held, and let it go; whether there was one to hold."""
    with rig.holding() as gate:
        rig.save(step)
        if rig.window_step is None:
            return False
        gate.reached()
    return True


def test_the_step_waits_until_the_copy_has_ended(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    before = copy.deepcopy(job.weight.detach())
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()
        stepping = threading.Thread(target=job.step)
        stepping.start()
        until(lambda: stands_in(stepping, "wait_before_step"))
        assert torch.equal(job.weight.detach(), before)  # the step has not begun
        assert rig.sealed[-1] < number
        gate.release()
        stepping.join()
    assert not torch.equal(job.weight.detach(), before)
    rig.end()
    assert rig.sealed[-1] == number
    assert not rig.discarded


def _no_grad(change: Callable[[Job], Any]) -> Callable[[Job], None]:
    def run(job: Job) -> None:
        with torch.no_grad():
            change(job)

    return run


MUTATIONS: dict[str, Callable[[Job], Any]] = {
    "in place": _no_grad(lambda job: job.weight.add_(1)),
    "one element": _no_grad(lambda job: job.weight[3, 4].add_(1)),
    "copy_": _no_grad(lambda job: job.weight.copy_(torch.zeros_like(job.weight))),
    "foreach": _no_grad(lambda job: torch._foreach_add_(list(job.model.parameters()), 1.0)),
    "data": lambda job: job.weight.data.mul_(1.5),
    "data of all": lambda job: [p.data.add_(1e-3) for p in job.model.parameters()],
    "numpy": lambda job: job.weight.detach().numpy().__iadd__(1),
    "load_state_dict": lambda job: job.model.load_state_dict(
        {name: value + 1 for name, value in job.model.state_dict().items()}
    ),
    "optimizer state": lambda job: job.optimizer.state[job.weight]["exp_avg"].mul_(2),
    "optimizer state's data": lambda job: job.optimizer.state[job.weight]["exp_avg"].data.mul_(2),
    "reset": lambda job: nn.init.normal_(job.weight),
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_parameters_changed_outside_of_a_step(rig_of: Callable[..., Rig], kind: str) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()
        MUTATIONS[kind](job)
        gate.release()
        job.step()
    assert list(rig.discarded) == [number]
    assert "changed outside of an optimizer step" in rig.discarded[number]
    assert rig.log.stats().counts["SnapshotDiscarded"] == 1
    # The leaf is early from now on: the same once more does no harm.
    for again in (number + 1, number + 2):
        rig.save(again)
        MUTATIONS[kind](job)
        job.step()
    rig.end()
    assert rig.sealed[-2:] == [number + 1, number + 2]
    assert list(rig.discarded) == [number]


def test_a_change_before_the_first_overlap_is_learned_without_a_loss(rig_of: Callable[..., Rig]) -> None:
    """Weights that are clipped through .data before each step, as WGAN does: few elements change."""
    job = Job()
    rig = rig_of(job.state)
    for number in range(1, 8):
        rig.save(number)
        job.weight.data[5, 6] += 1
        job.step()
    rig.end()
    assert rig.sealed == list(range(1, 8))
    assert not rig.discarded
    assert [message for message in rig.warned if "model.0.weight changed outside" in message]
    assert len(rig.warned) == 1


def test_weights_swapped_for_an_evaluation_and_swapped_back(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    kept = [p.detach().clone() for p in job.model.parameters()]
    with rig.holding(nth=2) as gate:
        rig.save(number)
        gate.reached()
        for parameter in job.model.parameters():
            parameter.data.copy_(torch.full_like(parameter, 7.0))
        gate.release()
        rig.stager._window.job.wait()  # type: ignore[union-attr]
        for parameter, value in zip(job.model.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        job.step()
    rig.end()
    assert list(rig.discarded) == [number]


def test_embedding_that_renormalizes_itself_in_forward(rig_of: Callable[..., Rig]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WIDTH, WIDTH, max_norm=1.0)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(x[:, 0].abs().long()))

    job = Job(model=Model(), make=lambda p: torch.optim.SGD(p, lr=10.0))
    rig = rig_of(job.state)
    for number in range(1, 8):
        rig.save(number)
        job.step()
    rig.end()
    assert len(rig.sealed) + len(rig.discarded) == 7
    assert len(rig.discarded) <= 1
    assert rig.sealed[-5:] == [3, 4, 5, 6, 7]


def test_data_of_a_parameter_replaced_and_its_memory_freed(rig_of: Callable[..., Rig]) -> None:
    """The old memory lives until it is copied; then nobody holds it."""
    model = nn.Sequential(nn.Linear(2048, 2048))  # its memory goes back to the system when it is freed
    job = Job(model=model, make=lambda p: torch.optim.SGD(p, lr=1e-2))
    job.backward = lambda: model(torch.randn(2, 2048)).pow(2).mean().backward()  # type: ignore[method-assign]
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()
        job.weight.data = torch.zeros(2048, 2048)
        gate.release()
        job.step()
    rig.save(number + 1)
    job.step()
    rig.end()
    assert rig.sealed[-2:] == [number, number + 1]


def test_buffers_that_change_in_forward(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()
        before = copy.deepcopy(job.model[1].running_mean)
        job.backward()
        assert not torch.equal(before, job.model[1].running_mean)
        gate.release()
        job.optimizer.step()
    rig.end()
    assert rig.sealed[-1] == number
    assert not rig.discarded


def test_ema_weights_and_counters_that_are_updated_after_the_save(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    ema = copy.deepcopy(job.model)
    counters = {"seen": torch.zeros(WIDTH * WIDTH), "steps": 0}
    schedule = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 0.9**step)
    rig = rig_of({**job.state, "ema": ema, "counters": counters, "schedule": schedule})

    def after() -> None:
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), job.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        counters["seen"].add_(1)
        counters["steps"] += 1
        schedule.step()

    def step() -> None:
        job.step()
        after()

    number = settle(rig, step)
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()
        after()
        gate.release()
        job.step()
    rig.end()
    assert rig.sealed[-1] == number
    assert not rig.discarded


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW single": lambda p: torch.optim.AdamW(p, foreach=False, amsgrad=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_of_torch(rig_of: Callable[..., Rig], kind: str) -> None:
    job = Job(OPTIMIZERS[kind])
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    for again in range(number, number + FEW_STEPS):
        assert overlapped(rig, again)
        job.step()
    rig.end()
    assert rig.sealed == list(range(1, number + FEW_STEPS))
    assert not rig.discarded
    assert not rig.warned


def test_a_closure_is_evaluated_within_the_step(rig_of: Callable[..., Rig]) -> None:
    job = Job(lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=2, history_size=2))

    def step() -> None:
        def closure() -> Any:
            job.optimizer.zero_grad()
            loss = job.model(torch.randn(8, WIDTH)).pow(2).mean()
            loss.backward()
            return loss

        job.optimizer.step(closure)

    rig = rig_of(job.state)
    number = settle(rig, step)
    for again in range(number, number + FEW_STEPS):
        rig.save(again)
        step()
    rig.end()
    assert rig.sealed == list(range(1, number + FEW_STEPS))


def test_bfloat16_parameters_with_states_of_other_types(rig_of: Callable[..., Rig]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16()
    job = Job(lambda p: torch.optim.AdamW(p, fused=True), model)
    job.backward = lambda: model(torch.randn(8, WIDTH).bfloat16()).pow(2).mean().backward()  # type: ignore[method-assign]
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()
        job.weight.data.add_(0.5)
        gate.release()
        job.step()
    rig.end()
    assert list(rig.discarded) == [number]


class ScaledJob(Job):
    """A job under a GradScaler; `skip` makes the next step's gradients infinite."""

    def __init__(self, growth_interval: int = 1000, known: bool = True) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=growth_interval)
        self.skip = False
        if known:
            self.state["scaler"] = self.scaler

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, WIDTH)).pow(2).mean()
        self.scaler.scale(loss * (float("inf") if self.skip else 1.0)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_a_step_that_the_scaler_skips_is_no_miss(rig_of: Callable[..., Rig]) -> None:
    job = ScaledJob()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    for again in range(number, number + 6):
        assert overlapped(rig, again)
        job.skip = again % 3 != 2
        job.step()
    rig.save(number + 6)
    rig.end()
    assert rig.sealed == list(range(1, number + 7))
    assert not rig.discarded


def test_a_skip_long_ago_excuses_no_step_without_a_hook(rig_of: Callable[..., Rig]) -> None:
    job = ScaledJob()
    rig = rig_of(job.state)
    job.skip = True
    for number in (1, 2):  # nothing overlaps yet, and the scale falls
        job.step()
        rig.save(number)
    job.skip = False
    number = settle(rig, job.step, first=3)
    rig.save(number)
    job.skip = True
    job.step()  # one that is seen for what it is
    job.skip = False
    number = settle(rig, job.step, first=number + 1)
    rig.save(number)
    _step_without_hooks(job)
    rig.save(number + 1)
    rig.end()
    assert list(rig.discarded) == [number]


def test_skips_of_a_scaler_that_is_not_in_the_state_turn_overlap_off(rig_of: Callable[..., Rig]) -> None:
    job = ScaledJob(known=False)
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    job.skip = True
    for again in range(number, number + 4):
        rig.save(again)
        job.step()
    rig.end()
    assert list(rig.discarded) == [number, number + 1]
    assert len(rig.warned) == 1
    assert not overlapped(rig, number + 5)


def test_gradients_accumulated_with_a_save_at_each_step(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)

    def step() -> None:
        job.optimizer.zero_grad()
        for _ in range(4):
            job.backward()
        job.optimizer.step()

    number = settle(rig, step)
    for again in range(number, number + FEW_STEPS):
        assert overlapped(rig, again)
        step()
    rig.end()
    assert rig.sealed == list(range(1, number + FEW_STEPS))


def test_gradients_accumulated_with_a_save_at_each_part_ends_without_overlap(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    for number in range(1, 21):
        job.backward()
        if number % 2 == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
        rig.save(number)
    rig.end()
    assert len(rig.discarded) == staging.MISSES_ALLOWED
    assert len(rig.warned) == 1
    assert "overlap is off" in rig.warned[0]
    assert rig.sealed[-10:] == list(range(11, 21))


def test_an_optimizer_that_steps_in_backward(rig_of: Callable[..., Rig]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizers = {p: torch.optim.AdamW([p], fused=True) for p in model.parameters()}

    def step_one(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_one)

    def step() -> None:
        model(torch.randn(8, WIDTH)).pow(2).mean().backward()

    rig = rig_of({"model": model, **{f"opt{n}": o for n, o in enumerate(optimizers.values())}})
    number = settle(rig, step)
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()
        backward = threading.Thread(target=step)
        before = model[1].weight.detach().clone()
        backward.start()
        until(lambda: stands_in(backward, "wait_before_step"))
        assert torch.equal(model[1].weight.detach(), before)
        gate.release()
        backward.join()
    rig.end()
    assert rig.sealed == list(range(1, number + 1))
    assert not rig.discarded


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_and_step(rig_of: Callable[..., Rig], backend: str) -> None:
    job = Job()
    run = torch.compile(job.model, backend=backend)
    compiled = torch.compile(job.optimizer.step, backend=backend)

    def step() -> None:
        job.optimizer.zero_grad()
        run(torch.randn(8, WIDTH)).pow(2).mean().backward()
        compiled()

    rig = rig_of({"model": run, "opt": job.optimizer})
    try:
        number = settle(rig, step)
        for again in range(number, number + FEW_STEPS):
            assert overlapped(rig, again)
            step()
        rig.end()
    finally:
        torch._dynamo.reset()
    assert rig.sealed == list(range(1, number + FEW_STEPS))
    assert not rig.discarded


def _step_without_hooks(job: Job) -> None:
    """As an optimizer whose step is replaced, or in a CUDA graph: no hook fires, no counter is raised."""
    for parameter in job.model.parameters():
        parameter.data.mul_(0.9)


def test_a_torch_optimizer_whose_hooks_do_not_fire(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    job.optimizer.step = lambda: _step_without_hooks(job)  # type: ignore[method-assign]
    for again in range(number, number + 5):
        with rig.holding() as gate:
            rig.save(again)
            if rig.window_step is not None:
                gate.reached()
            job.optimizer.step()
            gate.release()
    rig.save(number + 5)
    rig.end()
    assert list(rig.discarded) == [number, number + 1]
    assert len(rig.warned) == 1
    assert "overlap is off" in rig.warned[0]


def test_a_torch_optimizer_whose_hooks_never_fired_is_never_trusted(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    job.optimizer.step = lambda: _step_without_hooks(job)  # type: ignore[method-assign]
    other = Job()  # one that is not part of the state, and steps once
    rig = rig_of(job.state)
    for number in range(1, 6):
        rig.save(number)
        assert rig.window_step is None
        if number == 1:
            other.step()
        job.optimizer.step()
    rig.end()
    assert rig.sealed == list(range(1, 6))
    assert not rig.warned


class AsOnAGpu(CpuCopier):
    """Nobody can look without waiting whether a leaf was written to before the step."""

    def differing(self, live: LiveLeaves, slot: Slot) -> list[int]:
        return []


@pytest.mark.parametrize("copier", [CpuCopier, AsOnAGpu])
def test_one_of_two_optimizers_has_no_hooks(rig_of: Callable[..., Rig], copier: Callable[[], CpuCopier]) -> None:
    """The other one's hook ends each window after the harm is done: neither its leaves nor it prove themselves."""
    job, quiet = Job(), Job()
    quiet.optimizer.step = lambda: _step_without_hooks(quiet)  # type: ignore[method-assign]
    rig = rig_of({**job.state, "quiet": quiet.model, "quiet opt": quiet.optimizer}, copier=copier())
    for number in range(1, 7):
        with rig.holding() as gate:
            rig.save(number)
            if rig.window_step is not None:
                gate.reached()
            quiet.optimizer.step()
            gate.release()
            job.step()
    rig.end()
    assert rig.sealed == list(range(1, 7))
    assert not rig.discarded
    assert overlapped(rig, 8)


def test_an_optimizer_whose_step_becomes_a_cuda_graph(rig_of: Callable[..., Rig], monkeypatch: Any) -> None:
    """Its hook fires while the step is captured and writes nothing, and never when the graph is replayed."""
    job, graphed = Job(), Job()
    rig = rig_of({**job.state, "graphed": graphed.model, "graphed opt": graphed.optimizer}, copier=AsOnAGpu())

    def both() -> None:
        job.step()
        graphed.step()

    number = settle(rig, both)
    with monkeypatch.context() as capturing:
        capturing.setattr(staging, "_is_being_captured", lambda: True)
        rig.save(number)
        rig.stager._before_step(graphed.optimizer, (), {})
    for again in range(number + 1, number + 5):
        _step_without_hooks(graphed)
        job.step()
        with rig.holding() as gate:
            rig.save(again)
            gate.reached()
            _step_without_hooks(graphed)
    rig.end()
    assert list(rig.discarded) == [number]
    assert "CUDA graph" in rig.discarded[number]
    assert overlapped(rig, 8)


class HomeMade:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.momentum = parameters, [torch.zeros_like(p) for p in parameters]

    def step(self) -> None:
        for parameter, momentum in zip(self.parameters, self.momentum, strict=True):
            momentum.data.mul_(0.9).add_(0.1)
            parameter.data.sub_(momentum)

    def zero_grad(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum = state["momentum"]


def test_an_optimizer_that_is_none_of_torchs(rig_of: Callable[..., Rig]) -> None:
    job = Job(HomeMade)
    other = Job()  # of which the hook fires, and which is not part of the state
    rig = rig_of(job.state)
    for number in range(1, 6):
        rig.save(number)
        assert rig.window_step is None
        job.optimizer.step()
        other.step()
    rig.end()
    assert rig.sealed == list(range(1, 6))


class Wrapper:
    """As mixed-precision libraries and Accelerate have it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(parameters, fused=True)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def test_an_optimizer_inside_of_another_object(rig_of: Callable[..., Rig]) -> None:
    job = Job(Wrapper)
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    assert overlapped(rig, number)
    job.step()
    rig.end()
    assert rig.sealed == list(range(1, number + 1))


def test_inference_tensors_are_copied_early(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    job.step()
    with torch.inference_mode():
        kept = torch.zeros(WIDTH, WIDTH)
    job.optimizer.state[job.weight]["exp_avg"] = kept
    box = {"kept": kept}
    rig = rig_of({**job.state, "box": box})
    rig.save(1)
    for number in range(2, 6):
        with torch.inference_mode():
            kept.add_(1)
        rig.save(number)
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.param_groups[0]["lr"] = 0.0
        job.weight.grad = None
        job.optimizer.step()
    rig.end()
    assert rig.sealed == [1, 2, 3, 4, 5]


def test_a_parameter_that_shares_its_storage_with_a_buffer(rig_of: Callable[..., Rig]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(2 * WIDTH, WIDTH)
            self.weight = nn.Parameter(both[:WIDTH])
            self.register_buffer("other", both[WIDTH:])
            self.register_buffer("same", self.weight.detach()[: WIDTH // 2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.same.data.mul_(1.01)
                self.other.data.mul_(1.01)
            return x @ self.weight + self.other.sum()

    job = Job(model=Model())
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    with rig.holding() as gate:
        rig.save(number)
        gate.reached()  # (the optimizer's state is late still)
        job.model(torch.randn(8, WIDTH))
        gate.release()
        job.step()
    rig.end()
    assert rig.sealed == list(range(1, number + 1))
    assert not rig.discarded


def test_the_layout_changes_between_saves(rig_of: Callable[..., Rig]) -> None:
    """Growing and shrinking: a new param group, a new buffer, another dtype, a layer that goes."""
    job = Job()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    new = nn.Linear(WIDTH, WIDTH)

    def grow() -> None:
        job.model.append(new)
        job.optimizer.add_param_group({"params": list(new.parameters()), "lr": 1e-3})

    def shrink() -> None:
        del job.model[-1]
        gone = job.optimizer.param_groups.pop()["params"]
        for parameter in gone:
            job.optimizer.state.pop(parameter, None)

    def buffer() -> None:
        job.model.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def dtype() -> None:
        job.model.double()

    def data() -> None:
        job.weight.data = job.weight.data.t().contiguous()

    change: Callable[[], None]
    for change in (grow, buffer, shrink, data):
        change()
        for again in range(number, number + 4):
            rig.save(again)
            job.step()
        number += 4
    dtype()
    job.optimizer.state.clear()
    job.backward = lambda: job.model(torch.randn(8, WIDTH).double()).sum().backward()  # type: ignore[method-assign]
    for again in range(number, number + 4):
        rig.save(again)
        job.step()
    rig.end()
    assert not rig.discarded
    assert sorted(rig.sealed + rig.skipped) == list(range(1, number + 4))  # (skipped while memory grows)
    assert len(rig.skipped) <= 4
    assert overlapped(rig, number + 5)  # all have proven themselves again


def test_no_tensor_is_held_after_the_window(rig_of: Callable[..., Rig]) -> None:
    job = Job()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    rig.save(number)
    job.step()
    watched = [weakref.ref(p) for p in job.model.parameters()]
    watched += [weakref.ref(value) for entry in job.optimizer.state.values() for value in entry.values()]
    memory = weakref.ref(job.weight.untyped_storage())
    for module in job.model:
        module._parameters.clear()
        module._buffers.clear()
    job.optimizer.param_groups.clear()
    job.optimizer.state.clear()
    assert [reference() for reference in watched if reference() is not None] == []
    assert memory() is None
    assert rig.sealed[-1] == number


def test_memory_is_let_go_of_at_the_end_of_its_copy(rig_of: Callable[..., Rig]) -> None:
    """Not only at the end of the window: after p.data = q the old memory is of no use to anybody else."""
    job = Job()
    rig = rig_of(job.state)
    number = settle(rig, job.step)
    rig.save(number)
    memory = weakref.ref(job.weight.untyped_storage())
    job.weight.data = torch.zeros_like(job.weight)
    window = rig.stager._window
    assert window is not None
    window.job.wait()
    until(lambda: memory() is None)
    job.step()
    rig.end()
