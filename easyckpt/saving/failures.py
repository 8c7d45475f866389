"""What has gone wrong in the background: what is tolerated, and at which step the rest is raised."""

from __future__ import annotations

from collections.abc import Sequence

from easyckpt.config import CheckpointConfig
from easyckpt.errors import EasyckptError, OutcomeUnknown, SaveError, SaveFailed
from easyckpt.saving.messages import Decision, Post


class Failures:
    """Not thread-safe: part of the ledger."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._in_a_row = 0
        self._pending: tuple[int, EasyckptError] | None = None
        """To be raised once, by every rank at the same step."""
        self.unsaved: EasyckptError | None = None
        """The newest failure, if nothing was committed since."""
        self.fatal: EasyckptError | None = None
        """What has ended all saving: raised at every call, by all ranks from step `fatal_at` on."""
        self.fatal_at = -1
        self.refused = False
        """A flush that was due has got `fatal` for its answer: so it has on every rank that waits for it."""

    def record(self, decision: Decision) -> None:
        """A flush has ended."""
        if decision.outcome == "committed":
            self._in_a_row, self.unsaved = 0, None
        elif decision.outcome != "skipped":
            self._in_a_row += 1
            self.unsaved = error = error_of(decision)
            tolerated = self._config.on_failure == "continue" and self._in_a_row <= self._config.max_failures
            if not tolerated and error is not None and self._pending is None:
                self._pending = (decision.raise_at, error)

    def end_all(self, error: EasyckptError, at: int = -1) -> None:
        """Nothing can be saved any more; the first reason stays. All ranks raise it at step `at`; -1: at once."""
        if self.fatal is None or self.fatal_at >= 0:
            self.fatal_at = at
        self.fatal = self.fatal or error

    def take(self, step: int | None, came_to: int) -> EasyckptError | None:
        """What is to be raised now; `step`: only if every rank raises it at this step or before.

        None where training has waited at step `came_to` for what it has asked for: what has ended all saving is raised
        there only if the others cannot come past it either, whether they have heard of it so far or not.
        """
        if self.fatal is not None and (
            (came_to if step is None else step) >= self.fatal_at or (step is None and self.refused)
        ):
            return self.fatal
        error = None
        if self._pending is not None and (step is None or step >= self._pending[0]):
            error, self._pending = self._pending[1], None
        return error


def error_of(decision: Decision) -> SaveError | None:
    """The error of a flush that is not durable; None if it is."""
    if decision.outcome == "committed":
        return None
    kind = OutcomeUnknown if decision.outcome == "unknown" else SaveFailed
    return kind(f"step {decision.step} was not committed ({decision.outcome}): {decision.reason}")


def missing_at_the_end(posts: Sequence[Post], committed: int) -> str:
    """What of that which training has handed over will be lost, and why; empty if nothing is."""
    wanted = max(post.wanted for post in posts)
    if wanted <= committed:
        return ""
    left = "it has left after an exception"
    lacking = [
        f"rank {rank}: {left if post.aborted else post.lack or 'it holds no whole snapshot of it'}"
        for rank, post in enumerate(posts)
        if post.aborted or wanted not in post.sealed
    ]
    why = "; ".join(lacking) or "its flush has failed"
    newest = f"the newest committed step is {committed}" if committed >= 0 else "nothing is committed"
    return (
        f"step {wanted}, the last that was handed over, is not durable ({why}); {newest}. "
        "A job whose last step has to be kept ends with save(step, wait=True), which never skips"
    )
