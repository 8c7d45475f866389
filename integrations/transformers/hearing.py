"""How a run hears of what the Trainer does: events, and passes over the training data."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from easyckpt.integrations import tracked_loader
from easyckpt.integrations.training_data import TrainingData
from easyckpt.integrations.transformers import versions

_log = logging.getLogger("easyckpt")


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Has the run that is on hear of the Trainer's events, before anybody else does."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        if self._trainer._easyckpt.run is not None:
            self._trainer._easyckpt.run.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        if self._trainer._easyckpt.run is not None:
            self._trainer._easyckpt.run.begin_step()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        if self._trainer._easyckpt.run is not None:
            self._trainer._easyckpt.run.begin_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        if self._trainer._easyckpt.run is not None:
            self._trainer._easyckpt.run.come_to_end()
            self._trainer._easyckpt.run.stops.end_step(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: D102
        if self._trainer._easyckpt.run is not None:
            self._trainer._easyckpt.run.log(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        if self._trainer._easyckpt.run is not None:
            self._trainer._easyckpt.run.end_training()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        if self._trainer._easyckpt.run is not None:
            self._trainer._easyckpt.run.end_epoch(cut=control.should_epoch_stop)
            self._trainer._easyckpt.run.stops.end_step(control)  # of half a step, which never comes to its end


def listen(trainer: Any) -> None:
    """Have `trainer` tell its runs of its events, before anybody else, whatever became of its callbacks meanwhile."""
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(callback, RunCallback) for callback in callbacks):
        callbacks.insert(0, RunCallback(trainer))


def track(loader: Any, data: TrainingData) -> Any:
    """Have the passes over the training data reported to `data`."""
    versions.leave_skipping(tracked_loader.skip_batches)
    tracked = tracked_loader.track(loader, data)
    data.counted = has_length(loader)  # up to 4.57, a resumed epoch asks for as many as a whole one
    if not tracked_loader.is_tracked(tracked):
        _log.warning(
            "the training data come from a %s, whose position is not known exactly: a resumed run skips batches as the "
            "Trainer itself does",
            type(loader).__name__,
        )
    return tracked
