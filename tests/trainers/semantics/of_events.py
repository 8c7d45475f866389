"""What callbacks and uploads see of a checkpoint, and when."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from tests.trainers.semantics.trainings import checkpoints, make, same, straight, weights, whole


class Listener(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[tuple[int, int, bool]] = []
        self.live = lambda: -1

    def on_save(self, args, state, control, **kwargs):
        out = Path(args.output_dir)
        self.heard.append((state.global_step, self.live(), whole(out, state.global_step)))


@pytest.mark.parametrize("on_save", ["later", "wait"])
def test_callbacks_see_complete_directories(out, on_save):
    listener = Listener()
    trainer = make(out, callbacks=[listener], options={"on_save": on_save})
    listener.live = lambda: trainer.model_wrapped is not None and current[0]
    current = [0]
    trainer.add_callback(Counting(current))
    trainer.train()
    assert [(step, good) for step, _, good in listener.heard] == [(2, True), (4, True), (6, True), (8, True)]
    if on_save == "wait":
        assert [live for _, live, _ in listener.heard] == [2, 4, 6, 8]


class Counting(TrainerCallback):
    def __init__(self, current: list[int]) -> None:
        self.current = current

    def on_step_end(self, args, state, control, **kwargs):
        self.current[0] = state.global_step


def test_callbacks_hear_of_the_last_checkpoint_where_the_last_epoch_is_cut(out):
    heard: list[Any] = []

    class Cut(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 3 == 0

        def on_save(self, args, state, control, **kwargs):
            heard.append(state.global_step)

        def on_train_end(self, args, state, control, **kwargs):
            heard.append("end")

    make(out, save_strategy="epoch", max_steps=-1, num_train_epochs=2, callbacks=[Cut()]).train()
    assert heard == [3, 6, "end"]


@pytest.mark.parametrize("limit", [1, 2])
def test_what_callbacks_are_still_to_hear_of_is_not_rotated(out, limit):
    listener = Listener()
    make(out, callbacks=[listener], save_total_limit=limit).train()
    assert [(step, good) for step, _, good in listener.heard] == [(2, True), (4, True), (6, True), (8, True)]
    assert checkpoints(out) == [2, 4, 6, 8][-limit:]


def test_callbacks_that_were_replaced(out, tmp_path):
    trainer = make(out)
    trainer.callback_handler.callbacks = [
        callback for callback in trainer.callback_handler.callbacks if type(callback).__name__ != "RunCallback"
    ]
    trainer.train()
    assert checkpoints(out) == [2, 4, 6, 8]
    assert same(weights(trainer), straight(tmp_path))


def test_uploads_see_complete_directories(out):
    pushed: list[tuple[int, int, bool]] = []

    class Uploading(Trainer):
        def _push_from_checkpoint(self, checkpoint_folder):
            step = int(Path(checkpoint_folder).name.partition("-")[2])
            pushed.append((step, self.state.global_step, whole(out, step)))

    trainer = make(out, Uploading)
    trainer.args.push_to_hub = True
    trainer.push_in_progress = None
    with contextlib.suppress(AttributeError):
        trainer._finish_current_push = lambda: None
    trainer.train()
    assert pushed == [(2, 2, True), (4, 4, True), (6, 6, True), (8, 8, True)]
