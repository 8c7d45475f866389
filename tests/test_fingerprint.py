"""Whether the state is still that of an earlier capture: every change is seen, and what cannot be known is no "yes"."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from easyckpt.memory.slot import SlotMeta
from easyckpt.saving.fingerprint import AT_ONCE_BYTES, SMALL_STATE_BYTES, Fingerprint, Fingerprints, Then
from easyckpt.saving.live import LiveSnapshot
from easyckpt.state.capture import Capture, StateCapture

WIDTH = 160  # a parameter of 100 KB


class Foreign:
    """Hands out copies of what it has."""

    def __init__(self, elements: int) -> None:
        self.value = torch.arange(elements, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Later:
    """The background thread: runs what it is given when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[dict[int, int]], Callable[[], dict[int, int]]]] = []

    def __call__(self, job: Callable[[], dict[int, int]]) -> Future[dict[int, int]]:
        future: Future[dict[int, int]] = Future()
        self.jobs.append((future, job))
        return future

    def run(self) -> None:
        while self.jobs:
            future, job = self.jobs.pop()
            future.set_result(job())


def image_of(capture: Capture, kept: Mapping[int, bytes] | None = None) -> bytes:
    names = dict.fromkeys(("run", "arena_id", "incarnation", "timeline", "layout_digest"), "")
    nbytes = capture.layout.image_bytes
    meta = SlotMeta(**names, step=1, rank=0, world_size=1, image_bytes=nbytes)
    return b"".join(map(bytes, LiveSnapshot(meta, capture, kept or {}).body(nbytes)))


def changed_in(before: Fingerprint, now: Capture) -> list[str]:
    """Names of what has changed; what can be lent all the same does not count."""
    found = before.lend(now)
    return [] if isinstance(found, Then) else found


class State:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(4, WIDTH)).sum().backward()
        self.optimizer.step()
        self.average = {"weight": torch.zeros(WIDTH, WIDTH), "turned": torch.zeros(WIDTH, WIDTH)[::2, ::2], "n": 0}
        self.own = torch.Generator()
        self.small = Foreign(16)
        self.fingerprints = Fingerprints(Later())
        self.capture = StateCapture(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "average": self.average,
                "own": self.own,
                "small": self.small,
            }
        )

    def now(self) -> Fingerprint:
        found = self.fingerprints.of(self.capture.capture(), [], lambda: True)
        assert isinstance(found, Fingerprint)
        return found

    def changed_since(self, before: Fingerprint) -> list[str]:
        return changed_in(before, self.capture.capture())

    @property
    def weight(self) -> nn.Parameter:
        return self.model[0].weight


CHANGES: dict[str, tuple[Any, str]] = {
    "parameter": (lambda s: torch._foreach_add_([s.weight.detach()], 1.0), "model.0.weight"),
    "parameter's data": (lambda s: s.weight.data.mul_(0.5), "model.0.weight"),
    "one element, unseen by counters": (lambda s: s.weight.data[1, 1].add_(1), "model.0.weight"),
    "parameter replaced": (lambda s: setattr(s.weight, "data", s.weight.data + 1), "model.0.weight"),
    "parameter of another form": (lambda s: setattr(s.weight, "data", s.weight.data[1:]), "model.0.weight"),
    "optimizer state": (lambda s: s.optimizer.state[s.weight]["exp_avg"].mul_(2), "optimizer.*exp_avg"),
    "large tensor": (lambda s: s.average["weight"].add_(1), "average.weight"),
    "large tensor's memory": (lambda s: s.average["weight"].numpy().__iadd__(1), "average.weight"),
    "large tensor taken out": (lambda s: s.average.pop("weight"), "average.weight"),
    "strided tensor": (lambda s: s.average["turned"].add_(1), "average.turned"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen_and_named(kind: str) -> None:
    state = State()
    state.now()  # (what is planned at the first capture)
    before = state.now()
    assert state.changed_since(before) == []
    change, name = CHANGES[kind]
    change(state)
    found = state.changed_since(before)
    start, _, end = name.partition("*")
    assert [path for path in found if path.startswith(start) and path.endswith(end)], found


SMALL_CHANGES: dict[str, Any] = {
    "buffer": lambda s: s.model[1].running_mean.add_(1),
    "buffer's data": lambda s: s.model[1].running_mean.data.add_(1),
    "buffer taken out": lambda s: s.model[1].register_buffer("running_mean", None),
    "bias": lambda s: s.model[0].bias.data.add_(1),
    "new tensor": lambda s: s.average.update(new=torch.zeros(1)),
    "torch's generator": lambda s: torch.rand(1),
    "Python's generator": lambda s: random.seed(1),
    "NumPy's generator": lambda s: np.random.rand(624),  # all its words anew, wherever it stands
    "own generator": lambda s: torch.rand(1, generator=s.own),
    "copied": lambda s: s.small.value.add_(1),
    "number": lambda s: s.average.update(n=1),
}


@pytest.mark.parametrize("kind", SMALL_CHANGES)
def test_what_is_small_is_lent_as_it_was(kind: str) -> None:
    state = State()
    state.now()
    capture = state.capture.capture()
    expected = image_of(capture)
    before = state.fingerprints.of(capture, [], lambda: True)
    assert isinstance(before, Fingerprint)
    SMALL_CHANGES[kind](state)
    found = before.lend(state.capture.capture())
    assert isinstance(found, Then)
    assert found.capture.layout is capture.layout
    assert found.capture.objects == capture.objects
    assert image_of(found.capture, found.kept) == expected


def test_what_is_no_tensor_is_kept_instead_of_compared() -> None:
    state = State()
    state.now()
    before = state.now()
    state.optimizer.param_groups[0]["lr"] = 0.5
    state.average["n"] = 1
    assert state.changed_since(before) == []
    assert b'"n":0' in before.objects.replace(b" ", b"")


def test_forward_and_backward_in_evaluation_mode_change_nothing() -> None:
    state = State()
    state.now()
    before = state.now()
    state.model.eval()
    state.model(torch.ones(4, WIDTH)).sum().backward()
    assert state.changed_since(before) == []


def test_tensors_of_which_nothing_but_the_bytes_stays_are_compared_by_these() -> None:
    """Fresh ones each time, inference tensors without a version counter, and equal ones in their place."""
    with torch.inference_mode():
        box = {"tensor": torch.zeros(100_000)}
    foreign = Foreign(100_000)
    capture = StateCapture({"foreign": foreign, "box": box})
    capture.capture()
    before = Fingerprints(Later()).of(capture.capture(), [], lambda: True)
    assert isinstance(before, Fingerprint)
    box["tensor"] = torch.zeros(100_000)
    assert changed_in(before, capture.capture()) == []
    foreign.value[-1] = 0
    box["tensor"][-1] = 1
    assert changed_in(before, capture.capture()) == ["foreign.value", "box.tensor"]


def test_thousands_of_tiny_tensors_are_lent_as_they_were() -> None:
    box = {f"t{number}": torch.full((number % 7 + 1,), float(number)) for number in range(2000)}
    capture = StateCapture({"box": box})
    capture.capture()
    then = capture.capture()
    expected = image_of(then)
    before = Fingerprints(Later()).of(then, [], lambda: True)
    assert isinstance(before, Fingerprint)
    box["t1234"].data[0] = 0
    found = before.lend(capture.capture())
    assert isinstance(found, Then)
    assert image_of(found.capture, found.kept) == expected


class Large:
    """A model that is too large to be digested at once as a whole, of which `late` leaves may be read later."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 1500))
        self.capture = StateCapture({"model": self.model, "optimizer": torch.optim.SGD(self.model.parameters())})
        self.capture.capture()
        self.later = Later()
        self.needed = True
        now = self.capture.capture()
        assert now.layout.image_bytes > SMALL_STATE_BYTES
        found = Fingerprints(self.later).of(now, now.late, lambda: self.needed)
        assert isinstance(found, Fingerprint)
        assert self.later.jobs
        self.before = found

    def changed(self) -> list[str]:
        return changed_in(self.before, self.capture.capture())


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "element": lambda weight: weight.data[7, 7].add_(1),
    "all": lambda weight: weight.data.mul_(0.9),
    "by NumPy": lambda weight: weight.detach().numpy().__imul__(0.9),
    "replaced": lambda weight: setattr(weight, "data", weight.data * 0.9),
}


def test_a_large_state_is_told_by_what_was_digested_in_the_background() -> None:
    state = Large()
    state.later.run()
    assert state.changed() == []


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_after_the_background_digest_is_seen(kind: str) -> None:
    state = Large()
    state.later.run()
    WRITES[kind](state.model[1].weight)
    assert state.changed() == ["model.1.weight"]


@pytest.mark.parametrize("kind", ["all", "by NumPy", "replaced"])
def test_a_write_before_the_background_digest_is_seen(kind: str) -> None:
    """As in a snapshot that is copied in the background, some words are looked at: before, and behind it."""
    state = Large()
    WRITES[kind](state.model[1].weight)
    state.later.run()
    assert state.changed() == ["model.1.weight"]


def test_a_write_that_is_counted_before_the_background_digest_is_seen() -> None:
    state = Large()
    with torch.no_grad():
        state.model[1].weight[7, 7] += 1
    state.later.run()
    assert state.changed() == ["model.1.weight"]


def test_a_digest_that_is_given_up_proves_nothing() -> None:
    state = Large()
    state.needed = False
    state.later.run()
    assert state.changed() == ["model.0.weight", "model.1.weight"]


def test_too_much_to_be_looked_at_at_each_skip_is_said() -> None:
    box = {"small": torch.zeros(10), "large": torch.zeros(AT_ONCE_BYTES // 4)}
    capture = StateCapture({"box": box})
    found = Fingerprints(Later()).of(capture.capture(), [], lambda: True)
    assert isinstance(found, str)
    assert "67 MB" in found
    assert "box.large" in found


def test_a_tensor_on_a_gpu_is_named() -> None:
    """Nothing but a counter could tell whether it has changed, and to digest it would take its time there."""
    now = StateCapture({"box": {"tensor": torch.zeros(10)}}).capture()
    leaves = [replace(leaf, device="cuda:0") if leaf.path[0] == "box" else leaf for leaf in now.layout.leaves]
    found = Fingerprints(Later()).of(replace(now, layout=replace(now.layout, leaves=leaves)), [], lambda: True)
    assert isinstance(found, str)
    assert "box.tensor lies on cuda:0" in found


def test_nothing_is_held() -> None:
    state = State()
    kept = state.now()
    large = Large()
    large.later.run()
    watched = [weakref.ref(p.untyped_storage()) for p in large.model.parameters()]
    watched += [weakref.ref(p.untyped_storage()) for p in state.model.parameters()]
    watched += [weakref.ref(value.untyped_storage()) for value in state.average.values() if torch.is_tensor(value)]
    proof = large.before
    del state, large
    assert [reference() for reference in watched if reference() is not None] == []
    assert kept.digests
    assert proof.late is not None
