"""Stops that are asked for between the batches of a step, together with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Stops:
    """Within a step nothing can be saved: the generators, and the place in the data, are ahead of the weights.

    So such a stop, which the Trainer's just-in-time saving asks for, takes place at the step's end.
    """

    def __init__(self, on_substep_end: Callable[..., Any], saves: Callable[[], bool]) -> None:
        self._on_substep_end, self._saves = on_substep_end, saves
        self._training = self._epoch = False

    def on_substep_end(self, args: Any, state: Any, control: Any) -> Any:
        """In the place of the event."""
        control = self._on_substep_end(args, state, control)
        if control.should_save or self._saves():
            self._training |= control.should_training_stop
            self._epoch |= control.should_epoch_stop
            control.should_training_stop = control.should_epoch_stop = False
        return control

    def end_step(self, control: Any) -> None:
        """The weights are those of the next step, or the pass is over."""
        control.should_training_stop |= self._training
        control.should_epoch_stop |= self._epoch
        self._training = self._epoch = False
