"""How fast training goes, to name a step that all ranks still have ahead of them."""

from __future__ import annotations

import math

#: What all ranks do at the same step is done this many steps and seconds from now.
MARGIN_STEPS = 2
MARGIN_SECONDS = 0.3


class Pace:
    """Of the newest step that any rank has come to."""

    def __init__(self) -> None:
        self._step, self._per_second = -1, 0.0
        self._time: float | None = None
        """When `_step` was come to; None: training has begun there anew since."""

    def go_on_from(self, step: int) -> None:
        """Training goes on from `step` at another time, as fast as before."""
        self._step, self._time = step, None

    def update(self, step: int, now: float) -> None:
        """The newest step is `step` at time `now`."""
        if step > self._step:
            if self._step >= 0 and self._time is not None and now > self._time:
                rate = (step - self._step) / (now - self._time)
                self._per_second = rate if self._per_second == 0 else 0.7 * self._per_second + 0.3 * rate
            self._step, self._time = step, now

    def step_ahead(self) -> int:
        """A step that no rank has come to yet."""
        return self._step + MARGIN_STEPS + math.ceil(self._per_second * MARGIN_SECONDS)
