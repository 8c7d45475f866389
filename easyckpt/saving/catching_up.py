"""A last snapshot that was skipped: whether it can still be taken when the job ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

from easyckpt.saving.fingerprint import Fingerprint, Fingerprints, Then
from easyckpt.saving.staging import Stager
from easyckpt.saving.window import listed
from easyckpt.state.capture import Capture, StateCapture


@dataclass(frozen=True, slots=True)
class Skipped:
    """The newest step of which a snapshot was to be taken and was not. Holds none of the user's tensors."""

    step: int
    reason: str
    state: Fingerprint | str
    """Or why nothing can be said about it."""
    optimizer_steps: int
    """How many the stager had seen by then."""


class CatchUp:
    """Remembers a skipped step, and what its state was for as long as it is the newest. Of the training thread."""

    def __init__(self, capture: StateCapture, stager: Stager) -> None:
        self._capture, self._stager = capture, stager
        self._fingerprints = Fingerprints(stager.in_background)
        self._number = 0
        """Counts what is remembered: a digest under way sees that it is not needed any more."""
        self.skipped: Skipped | None = None

    def forget(self) -> None:
        """A snapshot of a newer step is to be taken, or another line begins."""
        self.skipped = None
        self._number += 1

    def came_to(self, step: int) -> None:
        """Training has handed over `step`: the state of one that was skipped before is gone."""
        if self.skipped is not None and step > self.skipped.step:
            self.skipped = replace(self.skipped, state=f"training has gone on to step {step}")
            self._number += 1

    def remember(self, step: int, capture: Capture, reason: str) -> None:
        """The snapshot of `step` was skipped for `reason`; `capture` is of this moment."""
        self._number += 1
        number, steps = self._number, self._stager.steps_seen

        def needed() -> bool:
            return number == self._number and steps == self._stager.steps_seen

        state = self._fingerprints.of(capture, self._stager.late(capture), needed)
        self.skipped = Skipped(step, reason, state, steps)

    def state(self) -> Then | str:
        """The skipped step's state, if all large tensors are provably still what they were; else what is not.

        Whatever else belongs to it is as it was when the step was handed over. Reads every byte of the state.
        """
        assert self.skipped is not None
        state = self.skipped.state
        if isinstance(state, str):
            return state
        if self._stager.steps_seen != self.skipped.optimizer_steps:
            return "an optimizer has stepped since"
        found = state.lend(self._capture.capture())
        return found if isinstance(found, Then) else f"{listed(found)} changed since, or may have"
