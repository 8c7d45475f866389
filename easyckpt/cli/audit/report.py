"""The audit's result: a document for programs, tables for the terminal, a page for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from easyckpt.cli import output
from easyckpt.cli.audit.culprit import Culprit
from easyckpt.cli.audit.findings import SPOKEN, Findings
from easyckpt.cli.audit.runs import Killed

Verdict = Literal["exact", "different", "nondeterministic"]


@dataclass(slots=True, kw_only=True)
class Audit:
    """All that an audit has found out."""

    command: list[str]
    steps: int
    at: int
    every: int
    ended: int = 0
    """The newest step that the straight run has stored."""
    killed: Killed | None = None
    twice: Findings | None = None
    """The second straight run against the first one."""
    resumed: list[tuple[Findings, Culprit | None]] = field(default_factory=list)
    """Once for each tier."""
    without: list[Findings] = field(default_factory=list)
    """Once for each part that was left out; the name says which."""
    failed_without: dict[str, str] = field(default_factory=dict)
    """Parts without which the command fails, with what it said."""
    unseeded: list[str] = field(default_factory=list)
    """Global generators that nobody has seeded."""
    aside: list[str] = field(default_factory=list)
    """Noted generators and batches that differ between straight runs whose states are equal."""
    unrepeated: list[str] = field(default_factory=list)
    """Metrics that differ between straight runs whose states are equal."""
    why: Culprit | None = None
    """What differs first between the straight runs."""
    wrong_tier: list[str] = field(default_factory=list)
    """What kept a tier from being tried, in words."""

    @property
    def verdict(self) -> Verdict:
        """What the exit code says."""
        if self.why is not None:
            return "nondeterministic"
        return "exact" if self.resumed and all(why is None for _, why in self.resumed) else "different"


def document(audit: Audit) -> dict[str, Any]:
    """For programs."""
    return {
        "verdict": audit.verdict,
        "command": audit.command,
        "steps": audit.steps,
        "at": audit.at,
        "every": audit.every,
        "ended": audit.ended,
        "killed": None if audit.killed is None else asdict(audit.killed),
        "not_compared": {
            "unseeded_generators": audit.unseeded,
            "metrics": audit.unrepeated,
            "notes": audit.aside,
        },
        "straight_runs": None if audit.twice is None else _found(audit.twice, audit.why, audit, resumed=False),
        "resumed": [_found(found, why, audit) for found, why in audit.resumed],
        "without": [_found(found, None, audit) for found in audit.without],
        "failed_without": audit.failed_without,
        "not_tried": audit.wrong_tier,
    }


def _found(found: Findings, why: Culprit | None, audit: Audit, *, resumed: bool = True) -> dict[str, Any]:
    return {
        "run": found.name,
        "restored_step": found.loaded,
        "tier": found.tier,
        "identical": why is None and (found.tier is not None or not resumed) and found.identical(audit.unrepeated),
        "compared_steps": found.steps,
        "unshared_steps": found.unshared,
        "components": [
            {
                "component": part.component,
                "equal": part.equal,
                "largest_difference": 0.0 if part.equal else part.largest,
                "first_tensor": part.first_tensor,
                "first_step": part.first_step,
                "growth": {str(step): value for step, value in part.growth.items()},
            }
            for part in found.parts.values()
        ],
        "metrics": [
            {
                "name": metric.name,
                "equal": metric.equal,
                "largest_difference": 0.0 if metric.equal else metric.largest,
                "first_step": metric.first_step,
            }
            for metric in found.metrics.values()
        ],
        "culprit": None if why is None else asdict(why),
    }


def lines(audit: Audit) -> list[str]:
    """The verdict in words, one thought a line."""
    said = [_verdict_line(audit)]
    if audit.why is not None:
        said.append(str(audit.why))
    reasons = dict.fromkeys(str(why) for _, why in audit.resumed if why is not None)
    said += list(reasons)
    if 0 < audit.ended < audit.steps:
        said.append(f"the command ended by itself at step {audit.ended} of {audit.steps}: nothing later was compared")
    said += audit.wrong_tier
    if audit.killed is not None:
        milliseconds = audit.killed.seconds * 1e3
        said.append(f"killed {milliseconds:.0f} ms into the flush of step {audit.killed.step} (SIGKILL, all processes)")
    if audit.unseeded:
        said.append(
            f"not compared: the state of the generators of {', '.join(audit.unseeded)}, which nobody has seeded (the "
            "straight runs do not share it from the first step on)"
        )
    if audit.unrepeated:
        said.append(
            f"not compared: {', '.join(audit.unrepeated)}, which differ between straight runs whose states are equal"
        )
    return said


def _verdict_line(audit: Audit) -> str:
    if audit.verdict == "nondeterministic":
        return "NONDETERMINISTIC: two straight runs differ, so no resume can be told from them"
    if audit.verdict == "exact":
        tiers = " and ".join(dict.fromkeys(str(found.tier) for found, _ in audit.resumed))
        steps = audit.resumed[0][0].steps
        logged = " and in all logged numbers" if audit.resumed[0][0].metrics.keys() - set(audit.unrepeated) else ""
        return f"EXACT: resumed from {tiers}, equal to the bit at all {len(steps)} stored steps after it{logged}"
    return "DIFFERENT: the resumed run is not what the straight one was"


def tables(audit: Audit) -> list[tuple[str, Sequence[str], list[Sequence[object]]]]:
    """(title, columns, rows)."""
    found: list[tuple[str, Sequence[str], list[Sequence[object]]]] = []
    if audit.twice is not None and audit.why is not None:
        found.append(("straight run against straight run", _COLUMNS, _rows(audit.twice, audit)))
    for resumed, _ in audit.resumed:
        title = f"resumed from {resumed.tier} at step {resumed.loaded}, against the straight run"
        found.append((title, _COLUMNS, _rows(resumed, audit)))
    rows = [_worth(each, audit) for each in audit.without]
    rows += [(spoken(name), "the command fails then", "") for name in audit.failed_without]
    if rows:
        columns = ["left out of the resume", "components that differ then, by how much at most", "logged numbers"]
        found.append(("what each part is worth", columns, rows))
    return found


_COLUMNS = ["component", "equal to the bit?", "largest difference#", "first differing tensor", "step#"]


def _rows(found: Findings, audit: Audit) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [
        (spoken(part.component), _yes(part.equal), _size(part.largest, part.equal), part.first_tensor, part.first_step)
        for part in found.parts.values()
    ]
    rows += [
        (f"metric {metric.name}", _yes(metric.equal), _size(metric.largest, metric.equal), None, metric.first_step)
        for metric in found.metrics.values()
        if metric.name not in audit.unrepeated
    ]
    return [tuple("" if cell is None else cell for cell in row) for row in rows]


def _worth(found: Findings, audit: Audit) -> Sequence[object]:
    """Each component by itself: a weight's difference and a counter's have no common unit."""
    parts = [(spoken(part.component), part.largest) for part in found.parts.values() if not part.equal]
    metrics = [(m.name, m.largest) for m in found.metrics.values() if not m.equal and m.name not in audit.unrepeated]
    return (spoken(found.name.removeprefix("without-")), _by_name(parts), _by_name(metrics))


def _by_name(sizes: Sequence[tuple[str, float | None]]) -> str:
    known = [f"{name}" if largest is None else f"{name}: {_size(largest, False)}" for name, largest in sizes]
    return ", ".join(known) or "none"


def spoken(component: str) -> str:
    """A component's name for people."""
    return SPOKEN.get(component, component)


def _yes(equal: bool) -> str:
    return "yes" if equal else "NO"


def _size(largest: float | None, equal: bool) -> str:
    if equal:
        return "0"
    return "-" if largest is None else "nan" if math.isnan(largest) else f"{largest:.3g}"


def views(audit: Audit) -> list[Any]:
    """For the terminal."""
    shown: list[Any] = []
    for title, columns, rows in tables(audit):
        shown += [output.table(columns, rows, title=title), ""]
    return [*shown, *lines(audit)]


def page(audit: Audit, plot: str | None) -> str:
    """``report.md``."""
    parts = [
        f"# Audit: {audit.verdict}",
        f"`{' '.join(audit.command)}`",
        f"{audit.steps} steps, stopped at {audit.at}; the state was stored and compared every {audit.every} steps.",
        "\n".join(f"- {line}" for line in lines(audit)),
    ]
    for title, columns, rows in tables(audit):
        head = [column.removesuffix("#") for column in columns]
        rule = ["---:" if column.endswith("#") else "---" for column in columns]
        body = [head, rule, *([output.clean(cell).replace("|", "\\|") for cell in row] for row in rows)]
        parts += [f"## {title[0].upper()}{title[1:]}", "\n".join(f"| {' | '.join(row)} |" for row in body)]
    if plot is not None:
        parts.append(f"![Losses of all runs, and how their states part]({plot})")
    return "\n\n".join(parts) + "\n"
