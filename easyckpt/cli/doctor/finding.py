"""What a check has found, and which guarantee that is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "bad"]

#: What a user can rely on, by the name that a finding refers to it by.
GUARANTEES = {
    "commit": "a kill, a power cut or a full disk leaves the last checkpoint whole",
    "memory": "snapshots in memory survive kill -9, and a restart goes on from them",
    "owner": "one job at a time writes a root, and one owns its memory",
    "pace": "training is not held up",
    "exact": "resumed equals uninterrupted, with the versions that were tested",
}
_ORDER: Sequence[State] = ("ok", "warning", "bad")
_VERDICTS = {"ok": "holds", "warning": "holds with limits, see the warnings", "bad": "DOES NOT HOLD"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    area: str
    what: str
    finding: str
    state: State
    guarantee: str
    """A key of `GUARANTEES`."""
    meaning: str = ""
    """What follows from it."""
    advice: str = ""
    """What to do; empty where nothing needs doing."""


def verdicts(findings: Sequence[Finding]) -> dict[str, tuple[State, str]]:
    """Guarantee -> (its worst state, that in words), of those that were looked at."""
    worst: dict[str, State] = {}
    for finding in findings:
        before = worst.get(finding.guarantee, "ok")
        worst[finding.guarantee] = max(before, finding.state, key=_ORDER.index)
    return {name: (worst[name], _VERDICTS[worst[name]]) for name in GUARANTEES if name in worst}
