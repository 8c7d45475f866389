"""Training code may set a default device: what the library makes for itself lies on the CPU all the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import easyckpt


def objects(tensors: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 1000)  # large enough to be looked at while it is copied
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
        "scaler": torch.amp.GradScaler("cpu"),
        "sampler": easyckpt.SkipBatchSampler(24, 4, shuffle=True, seed=1),
        "generator": torch.Generator(),
        "many": {str(number): torch.full((8,), float(number)) for number in range(tensors)},
        "strided": {"s": torch.arange(600.0).view(20, 30)[:, ::2], "empty": torch.empty(0)},
    }


def train(state: dict, step: int) -> None:
    """With tensors of its own on the CPU, as code that knows where it computes."""
    state["optimizer"].zero_grad()
    state["scaler"].scale(state["model"](torch.ones(4, 300, device="cpu") * step).sum()).backward()
    state["scaler"].step(state["optimizer"])
    state["scaler"].update()
    for tensor in (*state["many"].values(), *state["strided"].values()):
        tensor.add_(1)


def exact(state: dict) -> list[torch.Tensor]:
    kept = [*state["model"].parameters(), *state["many"].values(), *state["strided"].values()]
    kept += [value for each in state["optimizer"].state.values() for value in each.values()]
    return [tensor.detach().clone() for tensor in (*kept, torch.get_rng_state(), state["generator"].get_state())]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tensors", [5, 900])
def test_state_is_exact_under_any_default_device(tmp_path, tensors, overlap):
    np.random.seed(3)
    random.seed(3)
    state = objects(tensors)
    train(state, 0)  # torch's optimizers put what they make at their first step on the default device
    with torch.device("meta"), easyckpt.Checkpointer(tmp_path, state, signals=(), overlap=overlap) as ckpt:
        ckpt.load()
        batches = iter(state["sampler"])
        for step in range(1, 4):
            next(batches)
            train(state, step)
            ckpt.save_if_needed(step)
        train(state, 4)
        ckpt.save(4, wait=True)
        ckpt.save_if_needed(5)  # a skipped step: is the state as it was?
    want, drawn = exact(state), (random.random(), np.random.rand())
    again = objects(tensors)
    with torch.device("meta"), easyckpt.Checkpointer(tmp_path, again, signals=()) as ckpt:
        assert ckpt.load().step >= 4
        batches_again = list(again["sampler"])
    assert (random.random(), np.random.rand()) == drawn
    for one, other in zip(exact(again), want, strict=True):
        assert one.device.type == "cpu"
        assert torch.equal(one, other)
    assert batches_again == list(batches)
