"""The best checkpoint, as the Trainer's state names it: it stays, and where it does not come to be, the one before."""

from __future__ import annotations

import dataclasses
from typing import Any

from easyckpt.framework import FrameworkCheckpointer
from easyckpt.integrations.transformers.saves import Saves


class Best:
    """Of one run."""

    def __init__(self, trainer: Any, checkpointer: FrameworkCheckpointer, saves: Saves) -> None:
        self._trainer, self._checkpointer, self._saves = trainer, checkpointer, saves
        self._steps: list[int] = []
        """One after the other; the one before is needed until the newest is there."""
        self.keep()

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def keep(self) -> None:
        """What the Trainer's state names now stays, and the one before it until that is there."""
        step = self._saves.step_of(self._trainer.state.best_model_checkpoint)
        if step is not None and step not in self._steps[-1:]:
            self._steps.append(step)
            self._choose()

    def forget(self, step: int) -> None:
        """The checkpoint of `step` does not come to be."""
        if step in self._steps:
            self._steps = [other for other in self._steps if other != step]
            state = self._trainer.state
            if self._saves.step_of(state.best_model_checkpoint) == step:
                state.best_model_checkpoint = self._saves.path(self._steps[-1]) if self._steps else None
            self._choose()

    def _choose(self) -> None:
        policy = self._checkpointer.policy
        self._checkpointer.policy = dataclasses.replace(policy, chosen=tuple(self._steps))
