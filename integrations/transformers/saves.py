"""Checkpoints on their way to storage, and who is told once they are there."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from easyckpt.errors import SaveError
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.framework import FrameworkCheckpointer
from easyckpt.integrations.transformers import scratch, stock
from easyckpt.saving.promises import known_to_all

_log = logging.getLogger("easyckpt")


@dataclass(slots=True)
class _Pending:
    step: int
    future: Future[int]
    state: Any
    """The Trainer's state at that step; None where nobody wants to see it."""


class Saves:
    """Of one run. Callbacks hear of a checkpoint when it is complete: on all ranks at the end of the same step."""

    def __init__(
        self, trainer: Any, checkpointer: FrameworkCheckpointer, root: str, on_save: Callable[..., Any]
    ) -> None:
        self.best: Any = None
        """Hears of a checkpoint that does not come to be."""
        self._trainer, self._checkpointer, self._root, self._on_save = trainer, checkpointer, root, on_save
        self._given, self._output_dir = trainer.args.output_dir, os.path.abspath(trainer.args.output_dir)
        self._made: set[int] = set()
        self._pending: list[_Pending] = []

    def path(self, step: int) -> str:
        """The checkpoint's directory, as the Trainer knows it; an audit has its runs' checkpoints elsewhere."""
        given = self._given
        stays = os.path.abspath(given) == self._output_dir  # else it is relative, and the program has gone elsewhere
        return os.path.join(given if stays else self._output_dir, TrainerNaming().committed(step))

    def step_of(self, path: str | None) -> int | None:
        """The step of the checkpoint at `path`; None for what is none of this directory's."""
        folder, name = os.path.split(path or "")
        ours = folder == self._given or os.path.realpath(folder) == os.path.realpath(self._output_dir)
        return TrainerNaming().parse_committed(name) if ours else None

    def known(self, step: int) -> bool:
        """Whether this training has the checkpoint of `step`, or it is on its way. All ranks say the same.

        What else has that name (of another training, damaged, made by the program) is none.
        """
        return step in self._made or any(save.step == step for save in self._pending)

    def found(self, steps: Iterable[int]) -> None:
        """The training goes on from one that has made the checkpoints of `steps`."""
        self._made.update(steps)

    def make_way(self, step: int) -> None:
        """Remove the checkpoint's directory where the Trainer's just-in-time saving has made it, with a mark in it."""
        path = self.path(step)
        with contextlib.suppress(OSError):
            if self._trainer.args.should_save and set(os.listdir(path)) <= {stock.UNFINISHED}:
                scratch.remove(path)

    def add(self, step: int, future: Future[int]) -> None:
        """A checkpoint is on its way."""
        state = _frozen(self._trainer.state) if self._has_listeners() else None
        self._pending.append(_Pending(step, future, state))
        self._hold()

    def deliver(self, step: int, *, wait: bool = False) -> None:
        """Tell, at the end of `step`, of what every rank knows to be complete; `wait`: of all, when they are.

        No rank is asked for anything here: each may have listeners, and checkpoints, that others do not have.
        """
        alone = self._trainer.args.world_size == 1
        ready = 0
        for save in self._pending:
            if wait:
                save.future.exception()  # resolved in bounded time
            elif not (save.future.done() if alone else known_to_all(save.future, step)):
                break
            ready += 1
        done, self._pending = self._pending[:ready], self._pending[ready:]
        while done:
            try:
                self._tell(done[0])
            finally:
                del done[0]
                self._hold(done)

    def _hold(self, telling: Sequence[_Pending] = ()) -> None:
        """Nothing is rotated away before those were told of it who want to see it."""
        waiting = [*telling, *self._pending]
        self._checkpointer.untold = frozenset(save.step for save in waiting if save.state is not None)

    def _tell(self, save: _Pending) -> None:
        error = save.future.exception()
        if error is None and save.future.result() == save.step:
            self._made.add(save.step)
        elif not self.known(save.step):  # else the first save of the step was made, or a later one is on its way
            self.best.forget(save.step)
        if error is not None:
            if not isinstance(error, SaveError):  # those are raised by the engine, as its settings say
                raise error
            _log.warning("no checkpoint-%d: %s", save.step, error)
            return
        if save.future.result() != save.step:
            _log.warning("no checkpoint-%d: that of step %d took its place", save.step, save.future.result())
            return
        if save.state is None:
            return
        trainer, live = self._trainer, self._trainer.state
        wanted = trainer.control.should_save
        trainer.state = save.state
        try:
            if trainer.args.push_to_hub and self._root == self._output_dir:
                trainer._push_from_checkpoint(self.path(save.step))
            trainer.control = self._on_save(trainer.args, save.state, trainer.control)
        finally:
            trainer.state = live
        trainer.control.should_save = wanted or trainer.control.should_save

    def _has_listeners(self) -> bool:
        callbacks = self._trainer.callback_handler.callbacks
        return bool(self._trainer.args.push_to_hub) or any(
            type(callback).on_save is not TrainerCallback.on_save for callback in callbacks
        )


def _frozen(state: Any) -> Any:
    kept = copy.copy(state)
    kept.log_history = list(state.log_history)
    kept.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    return kept
