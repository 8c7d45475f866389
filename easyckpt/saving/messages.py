"""What ranks tell each other while they save: one post a rank, one board by rank 0, each overwritten in place.

Both carry state, not events: whoever reads late or twice sees the same, and the store never grows. Only decisions
are events; they are numbered, and stay on the board until every rank's post says that it has seen them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["committed", "skipped", "failed", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank did for the flush in progress."""

    attempt: str
    digest: str | None = None
    """Digest of this rank's replicated leaves, asked for at the first flush."""
    files: dict[str, tuple[int, str]] | None = None
    """Name -> (size in bytes, digest) of what this rank wrote and fsynced."""
    error: str | None = None
    lost: bool = False
    """The error is that this rank does not hold the snapshot any more, which one with a single slot may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """The state of one rank."""

    line: int = 0
    """Counts the lines of training of this job (each load opens one); posts of another line are not listened to."""
    step: int = -1
    """Newest step that the training loop has handed over."""
    wanted: int = -1
    """Newest step of which a snapshot was to be taken: the job must not end well without it."""
    lack: str = ""
    """Why this rank holds no whole snapshot of `wanted`, once that is known."""
    sealed: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    """Due steps of which this rank holds no whole snapshot, and never will."""
    without_memory: bool = False
    """This rank has no memory for a snapshot: its training waits in every due save until that is decided."""
    due: tuple[int, ...] = ()
    """Due steps that this rank's training has come to, and that are not decided."""
    beat: int = 0
    """Changes from time to time while there are such: a rank whose training pauses is told from one that is gone."""
    seen: int = 0
    """Number of the newest decision that this rank has acted on."""
    report: Report | None = None
    emergency: int = 0
    """Number of the newest emergency that a signal at this rank asks for; 0: none has come."""
    closing: bool = False
    aborted: bool = False
    """The rank leaves after an exception: nothing new may be started with it."""
    left: bool = False
    """The rank has read the end of the job on the board."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """One attempt at one commit, announced before anyone creates a directory."""

    attempt: str
    step: int
    due: int | None
    """The step whose due flush this is; None for one that nobody asked for by number (signal, close)."""
    share: bool | None
    """True: only rank 0 writes replicated state. False: every rank does. None: ranks first compare digests."""
    abandoned: str | None = None
    """The reason, once given up."""
    line: int = 0
    """The line of training that it belongs to, as in `Post`: training may leave that while a flush runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How one due flush ended."""

    number: int
    outcome: Outcome
    due: int | None
    step: int
    attempt: str | None = None
    reason: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    raise_at: int = 0
    """On failure: the first step at whose save every rank raises."""
    line: int = 0
    """As in `Flush`: what is committed on a line that training has left says nothing about the line that is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What rank 0 tells all."""

    line: int = 0
    floor: int = -1
    """Newest step that every rank holds sealed; -1 for none."""
    useless: tuple[int, ...] = ()
    """Steps above the floor that some rank has passed without a whole snapshot: they never become the floor."""
    without_memory: bool = False
    """Of some rank: no other one may leave a due save before its snapshot is whole. Its training might need, to make
    it whole, the rank that waits for it."""
    flush: Flush | None = None
    decisions: tuple[Decision, ...] = ()
    emergency: int = 0
    """Number of the newest emergency: each flushes what is the newest snapshot at its begin. 0: there was none."""
    emergency_over: bool = False
    preempt_at: int = 0
    """Since the first emergency: the first step at which every rank may see that it is preempted."""
    lease_lost: str = ""
    """Why nothing is saved any more, once that is certain: another job has taken the root over."""
    lost_at: int = 0
    """Then: the first step at which every rank raises that."""
    closed: bool = False
    close_error: str = ""
    """Who did not come to the end in time."""
    not_durable: str = ""
    """At the end: which newest step is not committed, and why."""
    waited: int = 0
    """How often `peer_timeout` has passed while the next due flush waits for training to go on: who waits sees that
    rank 0 is there."""


def dump(message: Post | Board) -> dict[str, Any]:
    """As JSON values."""
    return asdict(message)


def load_post(data: dict[str, Any]) -> Post:
    """Back from JSON values."""
    report = data.pop("report")
    if report is not None and report["files"] is not None:
        report["files"] = {name: (size, digest) for name, (size, digest) in report["files"].items()}
    data |= {name: tuple(data[name]) for name in ("sealed", "missing", "due")}
    return Post(report=None if report is None else Report(**report), **data)


def load_board(data: dict[str, Any]) -> Board:
    """Back from JSON values."""
    flush = data.pop("flush")
    decisions = tuple(Decision(**decision) for decision in data.pop("decisions"))
    data["useless"] = tuple(data["useless"])
    return Board(flush=None if flush is None else Flush(**flush), decisions=decisions, **data)
