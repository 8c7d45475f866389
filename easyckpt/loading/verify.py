"""One rank's verdict about one candidate: can it be read, is every byte right, does it fit the live objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from easyckpt import errors
from easyckpt.errors import DamagedCheckpoint, FormatError, OutOfSpace, StateError, StateMismatch, StorageError
from easyckpt.format.canonical import Json
from easyckpt.loading.resolve import Candidate
from easyckpt.loading.snapshot import Snapshot

#: Opens a candidate for this rank; every byte that it gives out is verified.
Open = Callable[[Candidate], Snapshot]
#: What keeps a snapshot from being applied, in words; changes nothing.
Check = Callable[[Snapshot], list[str]]

_SHOWN_PROBLEMS = 20

Verdict = Literal["good", "damaged", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Vote:
    """What a rank tells the others about a candidate."""

    verdict: Verdict
    """``damaged``: try the next candidate. ``refused``: whole, but not for these objects or this number of ranks.
    ``failed``: anything else."""
    reason: str = ""
    error: str = ""
    """Name of the error's class."""

    def to_json(self) -> dict[str, Json]:
        """As JSON values."""
        return {"verdict": self.verdict, "reason": self.reason, "error": self.error}

    @classmethod
    def from_json(cls, value: Any) -> Vote:
        """Back from :meth:`to_json`, sent by another rank."""
        return cls(value["verdict"], value["reason"], value["error"])

    def rebuilt(self, rank: int) -> errors.EasyckptError:
        """The error of the rank that voted, for the other ranks: of the same class if it is one of ours."""
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, errors.EasyckptError):
            return kind(f"rank {rank}: {self.reason}")
        return errors.PeerFailed(f"rank {rank}: {self.error}: {self.reason}")


def verify(candidate: Candidate, open_candidate: Open, check: Check) -> tuple[Vote, Snapshot | None, Exception | None]:
    """Open and check `candidate`: the vote, and the open snapshot (good) or the error (all others).

    Never raises: whatever happens here, the other ranks are waiting for the vote.
    """
    snapshot = None
    try:
        if candidate.problem is not None:
            raise DamagedCheckpoint(f"{candidate}: {candidate.problem}")
        snapshot = open_candidate(candidate)
        if (snapshot.step, snapshot.timeline) != (candidate.step, candidate.timeline):
            raise DamagedCheckpoint(f"{candidate} holds step {snapshot.step} of timeline {snapshot.timeline}")
        if problems := check(snapshot):
            raise StateMismatch(_mismatch(candidate, problems))
    except Exception as error:  # noqa: BLE001 - raised by the caller, on all ranks
        vote, failure = Vote(_verdict(error), str(error), type(error).__name__), error
        if snapshot is not None:
            snapshot.close()
        return vote, None, failure
    return Vote("good"), snapshot, None


def _verdict(error: Exception) -> Verdict:
    if isinstance(error, StateError):
        return "refused"
    # Too little memory to read into says nothing about the candidate.
    if isinstance(error, (FormatError, StorageError, OSError)) and not isinstance(error, OutOfSpace):
        return "damaged"
    return "failed"


def _mismatch(candidate: Candidate, problems: Sequence[str]) -> str:
    shown = [*problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    listed = "".join(f"\n  - {problem}" for problem in shown)
    one_sided = any("and not here" in problem or "and not in the checkpoint" in problem for problem in problems)
    advice = ", or leave out what only one side has with strict=False" if one_sided else ""
    return (
        f"{candidate} does not fit the objects of this job; nothing was applied:{listed}\n"
        f"Build the objects as they were when it was saved{advice}, or choose with components=[...] what is restored."
    )
