"""Whether the state is still that of an earlier capture: every change is seen, and what cannot be known is no "yes"."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from easyckpt.saving.fingerprint import SMALL_BYTES, Fingerprints, what_changed
from easyckpt.state.capture import StateCapture

WIDTH = 160  # a parameter of 100 KB


class Foreign:
    """Hands out copies of what it has."""

    def __init__(self, elements: int) -> None:
        self.value = torch.arange(elements, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


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
        self.fingerprints = Fingerprints()
        self.capture = StateCapture(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "average": self.average,
                "own": self.own,
                "small": self.small,
            }
        )

    def now(self) -> Any:
        return self.fingerprints.of(self.capture.capture())

    @property
    def weight(self) -> nn.Parameter:
        return self.model[0].weight


CHANGES: dict[str, tuple[Any, str]] = {
    "buffer": (lambda s: s.model[1].running_mean.add_(1), "model.1.running_mean"),
    "buffer's data": (lambda s: s.model[1].running_mean.data.add_(1), "model.1.running_mean"),
    "parameter": (lambda s: torch._foreach_add_([s.weight.detach()], 1.0), "model.0.weight"),
    "parameter's data": (lambda s: s.weight.data.mul_(0.5), "model.0.weight"),
    "parameter replaced": (lambda s: setattr(s.weight, "data", s.weight.data.clone()), "model.0.weight"),
    "optimizer state": (lambda s: s.optimizer.state[s.weight]["exp_avg"].mul_(2), "optimizer.*exp_avg"),
    "group": (lambda s: s.optimizer.param_groups[0].update(lr=0.5), "optimizer"),
    "large tensor": (lambda s: s.average["weight"].add_(1), "average.weight"),
    "large tensor's memory": (lambda s: s.average["weight"].numpy().__iadd__(1), "average.weight"),
    "strided tensor": (lambda s: s.average["turned"].add_(1), "average.turned"),
    "number": (lambda s: s.average.update(n=1), "average"),
    "new tensor": (lambda s: s.average.update(new=torch.zeros(1)), "the form of the state"),
    "torch's generator": (lambda s: torch.rand(1), "easyckpt.rng.torch"),
    "Python's generator": (lambda s: random.random(), "easyckpt.rng.python"),
    "NumPy's generator": (lambda s: np.random.rand(), "easyckpt.rng"),
    "own generator": (lambda s: torch.rand(1, generator=s.own), "own"),
    "copied": (lambda s: s.small.value.add_(1), "small.value"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen_and_named(kind: str) -> None:
    state = State()
    state.now()  # (what is planned at the first capture)
    before = state.now()
    assert what_changed(before, state.now()) == []
    change, name = CHANGES[kind]
    change(state)
    found = what_changed(before, state.now())
    start, _, end = name.partition("*")
    assert [path for path in found if path.startswith(start) and path.endswith(end)], found


def test_forward_and_backward_in_evaluation_mode_change_nothing() -> None:
    state = State()
    state.now()
    before = state.now()
    state.model.eval()
    state.model(torch.ones(4, WIDTH)).sum().backward()
    assert what_changed(before, state.now()) == []


def test_a_large_tensor_that_is_fresh_each_time_proves_nothing() -> None:
    """The memory of the one before may have been given out again, at the same address and with the same counter."""
    foreign = Foreign(SMALL_BYTES)
    capture = StateCapture({"foreign": foreign})
    fingerprints = Fingerprints()
    capture.capture()
    before = fingerprints.of(capture.capture())
    assert what_changed(before, fingerprints.of(capture.capture())) == ["foreign.value"]


def test_an_inference_tensor_proves_nothing() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(SMALL_BYTES)
    capture = StateCapture({"box": {"tensor": tensor}})
    fingerprints = Fingerprints()
    capture.capture()
    before = fingerprints.of(capture.capture())
    assert what_changed(before, fingerprints.of(capture.capture())) == ["box.tensor"]


def test_nothing_is_held() -> None:
    state = State()
    kept = state.now()
    watched = [weakref.ref(p.untyped_storage()) for p in state.model.parameters()]
    watched += [weakref.ref(value.untyped_storage()) for value in state.average.values() if torch.is_tensor(value)]
    del state
    assert [reference() for reference in watched if reference() is not None] == []
    assert kept.values
