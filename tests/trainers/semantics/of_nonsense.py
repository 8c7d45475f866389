"""Whole to the byte, and yet no state: such a candidate is refused before anything is applied."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.trainer_callback import TrainerState

from easyckpt import DamagedCheckpoint
from easyckpt.format.difference import ASIDE
from easyckpt.integrations.training_data import TrainingData, require_place
from easyckpt.integrations.transformers import plan, stock
from easyckpt.integrations.transformers import progress as trainer_progress
from easyckpt.integrations.transformers.carried_loss import CarriedLoss
from easyckpt.integrations.transformers.judged import judged
from easyckpt.integrations.transformers.names import PROGRESS
from easyckpt.integrations.transformers.progress import Progress
from easyckpt.integrations.transformers.trainer_state import require_state
from easyckpt.state.generators import set_host_generators
from tests.trainers.semantics.trainings import At, Stopped, forget_memory, make, same, stop, straight, weights

NONSENSE: list[Any] = [
    None, True, -1, 1 << 70, 1.5, float("nan"), "x", "\0", "\ud800", b"x", [], [1], {}, {"a": 1}, {1: 2},
    torch.zeros(0), torch.zeros(2, dtype=torch.uint8), torch.full((1 << 16,), 255, dtype=torch.uint8),
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in it; of a list the first is enough."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], nonsense: Any) -> Any:
    if not path:
        return nonsense
    made = copy.copy(value)
    made[path[0]] = changed(value[path[0]], path[1:], nonsense)
    return made


def lacking(value: Any, path: tuple[Any, ...]) -> Any:
    made = copy.copy(value)
    if len(path) == 1:
        del made[path[0]]
    else:
        made[path[0]] = lacking(value[path[0]], path[1:])
    return made


def every_change(value: Any) -> Iterator[Any]:
    for path in places(value):
        for nonsense in NONSENSE:
            yield changed(value, path, nonsense)
        if path and isinstance(path[-1], str):
            yield lacking(value, path)


def test_what_is_not_refused_can_be_put_back(out):
    counts = {"refused": 0, "taken": 0}

    def try_all(control):
        run = trainer._easyckpt.run
        state, place = copy.deepcopy(run.progress.state_dict()), copy.deepcopy(run.data.state_dict())
        require = judged(trainer, Progress(), TrainingData())[PROGRESS]._require
        require(state, 3)
        require_place(place)
        for value in every_change(state):
            try:
                require(value, 3)
            except Exception:
                counts["refused"] += 1
                continue
            counts["taken"] += 1
            run.progress.restored = value
            TrainerState(**json.loads(trainer_progress.state_json(value)))
            trainer_progress.put_back(trainer, run.progress)
            CarriedLoss(trainer).put_back(run.progress)
            run._make_what_was_lost()
        for value in every_change(place):
            try:
                require_place(value)
            except Exception:
                counts["refused"] += 1
                continue
            counts["taken"] += 1
            data = TrainingData()
            data.load_state_dict(value)
            if data.place.consumed:
                set_host_generators(data.place.start)
                set_host_generators(data.place.ahead)
        raise Stopped

    trainer = make(out, callbacks=[At(3, try_all)])
    with pytest.raises(Stopped):
        trainer.train()
    assert counts["refused"] > 500, counts
    assert counts["taken"] > 20, counts


def test_every_field_of_the_trainers_file(out):
    with pytest.raises(Stopped):
        make(out, wrap=False, callbacks=[At(3, stop)]).train()
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    require_state(state)
    for value in every_change(state):
        read = json.loads(json.dumps(value, default=str))
        try:
            require_state(read)
        except DamagedCheckpoint:
            continue
        TrainerState(**read)


CASES: dict[str, dict[tuple[Any, ...], Any]] = {
    "log is no json": {(ASIDE, "log", "text"): torch.full((1 << 16,), 255, dtype=torch.uint8)},
    "log is too short": {(ASIDE, "log", "bytes"): 1 << 40},
    "counters": {("state", "stateful_callbacks"): [1]},
    "control": {("state", "stateful_callbacks", "TrainerControl"): 5},
    "step": {("state", "global_step"): 5},
    "loss": {("loss",): "much"},
    "total": {("total_loss",): None},
    "path": {(ASIDE, "best_model_checkpoint"): 7},
    "own": {(ASIDE, "own"): {"values": 1}},
    "nothing": {("state",): None},
}


def saving_nonsense(monkeypatch: pytest.MonkeyPatch, changes: dict[tuple[Any, ...], Any], steps: set[int]) -> None:
    """Have what is saved of these steps be nonsense, whole and with its checksums."""
    real, real_json = Progress.state_dict, plan.state_json

    def state_dict(self):
        value = real(self)
        if value and value["state"]["global_step"] in steps:
            for path, nonsense in changes.items():
                value = changed(value, path, nonsense)
        return value

    def state_json(value):
        try:
            return real_json(value)
        except Exception:
            return b"{}"

    monkeypatch.setattr(Progress, "state_dict", state_dict)
    monkeypatch.setattr(plan, "state_json", state_json)


@pytest.mark.parametrize("tier", ["memory", "storage"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_nonsense_of_ours_is_passed_over(out, tmp_path, case, tier, monkeypatch):
    with monkeypatch.context() as patched:
        saving_nonsense(patched, CASES[case], {6})
        with pytest.raises(Stopped):
            make(out, callbacks=[At(6, stop)], options={"on_save": "wait"}).train()
    if tier == "storage":
        forget_memory()
    begun: list[int] = []
    trainer = make(out)
    for step in range(8):
        trainer.add_callback(At(step, lambda control: begun.append(trainer.state.global_step)))
    trainer.train(resume_from_checkpoint=True)
    assert begun[0] in ((4,) if tier == "storage" else (4, 5))
    assert same(weights(trainer), straight(tmp_path))


def test_nonsense_alone_is_an_error_with_its_reason(out, monkeypatch):
    with monkeypatch.context() as patched:
        saving_nonsense(patched, CASES["log is no json"], set(range(9)))
        with pytest.raises(Stopped):
            make(out, callbacks=[At(5, stop)]).train()
    forget_memory()
    for resume in (True, str(out / "checkpoint-2")):
        with pytest.raises(DamagedCheckpoint, match="component 'trainer' is damaged"):
            make(out).train(resume_from_checkpoint=resume)


FILES = {
    "no utf-8": b'{"global_step": 4, "trial_name": "\xff"}',
    "utf-16": '{"global_step": 4}'.encode("utf-16"),
    "log": b'{"global_step": 4, "log_history": [1]}',
    "counters": b'{"global_step": 4, "stateful_callbacks": []}',
    "metric": b'{"global_step": 4, "best_metric": "high"}',
    "unknown": b'{"global_step": 4, "of_a_later_version": 1}',
    "batch size": b'{"global_step": 4, "train_batch_size": "2"}',
}


@pytest.mark.parametrize("case", sorted(FILES))
def test_nonsense_of_the_trainers_own_is_passed_over(out, case, caplog):
    with pytest.raises(Stopped):
        make(out, wrap=False, callbacks=[At(5, stop)]).train()
    (out / "checkpoint-4" / stock.STATE).write_bytes(FILES[case])
    begun: list[int] = []
    trainer = make(out)
    for step in (2, 4):
        trainer.add_callback(At(step, lambda control: begun.append(trainer.state.global_step)))
    with caplog.at_level(logging.WARNING, "easyckpt"):
        trainer.train(resume_from_checkpoint=True)
    assert begun == [2, 4]
    assert "trainer_state.json" in caplog.text
