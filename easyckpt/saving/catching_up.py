"""A last snapshot that was skipped: whether it can still be taken when the job ends."""

from __future__ import annotations

from dataclasses import dataclass

from easyckpt.saving.fingerprint import Fingerprint, Fingerprints, what_changed
from easyckpt.saving.staging import Stager
from easyckpt.saving.window import listed
from easyckpt.state.capture import Capture, StateCapture


@dataclass(frozen=True, slots=True)
class Skipped:
    """The newest step that was handed over, of which no snapshot was taken. Holds nothing of the state."""

    step: int
    reason: str
    state: Fingerprint
    optimizer_steps: int
    """How many the stager had seen by then."""


class CatchUp:
    """Remembers a skipped step for as long as it is the newest. Belongs to the training thread."""

    def __init__(self, capture: StateCapture, stager: Stager) -> None:
        self._capture, self._stager = capture, stager
        self._fingerprints = Fingerprints()
        self.skipped: Skipped | None = None

    def forget(self) -> None:
        """A newer step has been handed over, or another line begins."""
        self.skipped = None

    def remember(self, step: int, capture: Capture, reason: str) -> None:
        """The snapshot of `step` was skipped for `reason`; `capture` is of this moment."""
        self.skipped = Skipped(step, reason, self._fingerprints.of(capture), self._stager.steps_seen)

    def capture(self) -> Capture | str:
        """The state now, if it is provably still that of the skipped step; else what is not."""
        assert self.skipped is not None
        if self._stager.steps_seen != self.skipped.optimizer_steps:
            return "an optimizer has stepped since"
        capture = self._capture.capture()
        changed = what_changed(self.skipped.state, self._fingerprints.of(capture))
        return f"{listed(changed)} changed since, or may have" if changed else capture
