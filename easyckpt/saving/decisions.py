"""What rank 0 has decided and not every rank has heard: numbered, and on the board until all have seen it."""

from __future__ import annotations

from easyckpt.saving.messages import Decision, Flush, Outcome
from easyckpt.saving.pace import Pace


class Decisions:
    """Part of the leader. `pace` tells from which step on all ranks raise what has failed."""

    def __init__(self, pace: Pace) -> None:
        self.on_board: tuple[Decision, ...] = ()
        self._pace = pace
        self._numbers = 0

    def take(self, flush: Flush, outcome: Outcome, *, reason: str = "", nbytes: int = 0, seconds: float = 0.0) -> None:
        """`flush` ends with `outcome`."""
        self._numbers += 1
        decision = Decision(
            number=self._numbers,
            outcome=outcome,
            due=flush.due,
            step=flush.step,
            attempt=flush.attempt or None,
            reason=reason,
            nbytes=nbytes,
            seconds=seconds,
            raise_at=self._pace.step_ahead(),
            line=flush.line,
        )
        self.on_board = (*self.on_board, decision)

    def seen(self, number: int) -> None:
        """Every rank has acted on those up to `number`."""
        self.on_board = tuple(decision for decision in self.on_board if decision.number > number)
