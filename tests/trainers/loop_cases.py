"""What an AccelerateCheckpointer does besides, one case a process: an assertion that fails ends it with an error."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.utils.data import DataLoader

from easyckpt.errors import ConfigError, StateMismatch, UsageError
from easyckpt.integrations.accelerate import AccelerateCheckpointer
from tests.trainers.loop import Counted


def main() -> None:
    case, root = sys.argv[1:]
    CASES[case](root)


def raises(kind: type[Exception], call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def prepared(accelerator: Accelerator) -> tuple[Any, ...]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))


def loader_of(count: int, accelerator: Accelerator) -> Any:
    return accelerator.prepare(DataLoader(torch.arange(2.0 * count).view(count, 2), batch_size=2, shuffle=True))


def nothing_prepared_is_forgotten(root: str) -> None:
    """Names follow the order of prepare(); one of the user's own takes the place of that; nothing is there twice."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = prepared(accelerator)
    teacher = accelerator.prepare(nn.Linear(3, 3))
    loose = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 5)
    accelerator.register_for_checkpointing(Counted(), Counted(), loose)
    state = {"teacher": teacher, "optimizer": optimizer.optimizer, "mine": {"a": 1}, "loose": loose}
    with AccelerateCheckpointer(root, accelerator, state) as checkpointer:
        targets = {name: component.target for name, component in checkpointer._parts.capture.components.items()}
        assert {name for name in targets if not name.startswith("easyckpt.")} == {
            *state, "model", "scheduler", "registered", "registered_1", "accelerate"
        }  # fmt: skip
        assert targets["optimizer"] is optimizer.optimizer
        assert targets["scheduler"] is scheduler.scheduler
        assert targets["model"] is model


def a_save_in_mid_accumulation_is_refused(root: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _ = prepared(accelerator)
    loader, step = loader_of(8, accelerator), 0
    with AccelerateCheckpointer(root, accelerator, save_storage_interval=1) as checkpointer:
        for number, batch in enumerate(checkpointer.batches(loader, 0)):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
            if number % 2 == 0:
                assert "sync_gradients" in raises(UsageError, checkpointer.save_if_needed, step + 1)
                assert "sync_gradients" in raises(UsageError, checkpointer.save, step + 1)
                checkpointer.save_if_needed(step)  # the step before, once more: no snapshot of half a step
                checkpointer.wait()
                assert checkpointer.stats().last_committed_step == (step or None)
            else:
                step += 1
                checkpointer.save(step, wait=True)


def another_loader_is_refused(root: str) -> None:
    accelerator = Accelerator(cpu=True)
    prepared(accelerator)
    with AccelerateCheckpointer(root, accelerator) as checkpointer:
        next(checkpointer.batches(loader_of(8, accelerator), 0))
        checkpointer.save(1, wait=True)
        checkpointer.load()
        said = raises(StateMismatch, next, checkpointer.batches(loader_of(10, accelerator), 0))
        assert "5 batches" in said, said
        assert "had 4" in said, said


def passes_go_forward(root: str) -> None:
    """An epoch that is over or was given up is not iterated again; what was left early is gone on with."""
    accelerator = Accelerator(cpu=True)
    prepared(accelerator)
    loader = loader_of(8, accelerator)
    with AccelerateCheckpointer(root, accelerator) as checkpointer:
        assert len(list(checkpointer.batches(loader, 0))) == 4
        assert list(checkpointer.batches(loader, 0)) == []
        loop = checkpointer.batches(loader, 1)
        seen = [next(loop)]
        raises(UsageError, next, checkpointer.batches(loader, 1))  # within itself
        checkpointer.save(1, wait=True)
        straight = seen + list(loop)
        checkpointer.load()
        assert list(checkpointer.batches(loader, 0)) == []
        assert torch.equal(torch.cat(straight[1:]), torch.cat(list(checkpointer.batches(loader, 1))))
        assert len(list(checkpointer.batches(loader, 3))) == 4
        assert list(checkpointer.batches(loader, 2)) == []
        plain = DataLoader(torch.arange(8.0), batch_size=2)
        assert len(list(checkpointer.batches(plain, 0, name="plain"))) == 4
        assert "epoch" in raises(ConfigError, next, checkpointer.batches(loader, -1))


def sharded_training_is_refused(root: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    assert "save_state" in raises(ConfigError, AccelerateCheckpointer, root, accelerator)
    assert "Accelerator" in raises(ConfigError, AccelerateCheckpointer, root, {"model": nn.Linear(1, 1)})


CASES = {
    case.__name__: case
    for case in (
        nothing_prepared_is_forgotten,
        a_save_in_mid_accumulation_is_refused,
        another_loader_is_refused,
        passes_go_forward,
        sharded_training_is_refused,
    )
}

if __name__ == "__main__":
    main()
