"""A save in the middle of gradient accumulation warns, once; none at the end of a step does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import easyckpt


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_a_scaler_has_left_by_skipping_a_step_are_no_accumulation(tmp_path, caplog, overlap):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    with easyckpt.Checkpointer(tmp_path / "run", state, overlap=overlap) as checkpointer:
        checkpointer.load()
        for step, factor in enumerate((1.0, 1.0, float("inf"), 1.0), 1):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            checkpointer.save_if_needed(step)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        checkpointer._events.drain()
        assert "between two backward passes" not in caplog.text
        checkpointer.save_if_needed(5)
        checkpointer._events.drain()
        assert "step 5 is saved between two backward passes" in caplog.text


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("every_micro_step", [True, False])
def test_only_a_save_between_two_backward_passes_of_a_step_warns(
    tmp_path, caplog, set_to_none, zero_first, kind, every_micro_step
):
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1, maximize=True)
    step = 0
    state = {"model": model, "optimizer": optimizer}
    with easyckpt.Checkpointer(tmp_path / "run", state, save_storage_interval=10**9) as checkpointer:
        checkpointer.load()
        for _ in range(4):
            if zero_first:
                optimizer.zero_grad(set_to_none=set_to_none)
            for micro_step in range(3):
                model(torch.randn(2, 4)).square().sum().backward()
                if every_micro_step and micro_step < 2:
                    step += 1
                    checkpointer.save_if_needed(step)
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad(set_to_none=set_to_none)
            step += 1
            checkpointer.save_if_needed(step)
        checkpointer._events.drain()
    warnings = [record for record in caplog.records if "between two backward passes" in record.message]
    assert len(warnings) == every_micro_step
