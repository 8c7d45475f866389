"""Which checkpoints stay, and why: the policy of retention. Pure; `retention` does what it says."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from easyckpt.catalog import Catalog, Entry
from easyckpt.config import CheckpointConfig
from easyckpt.format.manifest import RootRecord

Reason = Literal[
    # Why one stays:
    "newest", "every", "best", "chosen", "pinned", "held", "not valid", "other line", "set aside",
    # Why one goes:
    "replaced", "stale", "excess",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is to stay. One that several rules keep stays once and counts for each of them."""

    newest: int | None
    """How many of the newest steps; None: all of them."""
    every: int | None = None
    """Steps that are a multiple of this stay for ever."""
    best: int = 0
    """How many of those whose `metric` is best."""
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    """Which value of `metric` is best."""
    chosen: tuple[int, ...] = ()
    """Steps that somebody else chose as the best, one after the other. The last of them that is there stays whatever
    its age, and counts as if it were the newest: so the one before stays until its successor is committed."""

    @classmethod
    def of(cls, config: CheckpointConfig) -> Policy:
        """The policy that a job's settings ask for."""
        return cls(
            newest=config.max_ckpt_num,
            every=config.keep_every,
            best=config.keep_best,
            metric=config.best_metric,
            mode=config.best_mode,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one checkpoint."""

    entry: Entry
    goes: bool
    reasons: tuple[Reason, ...]


def decide(
    record: RootRecord | None,
    found: Catalog,
    policy: Policy,
    *,
    pinned: Collection[int] = (),
    held: Collection[int] = (),
    stale: bool = False,
) -> list[Verdict]:
    """Judge every committed and every stale checkpoint of `found`, in its order.

    Only what is valid and lies in the past of the newest timeline of `record` counts (None: all that is valid). Of what
    was set aside goes what an automatic fallback has left and training has replaced, with `stale` all of it; never a
    pinned step. (`held` says nothing about it: it is the committed one under that number that is held.)
    """
    line = [entry for entry in found.committed() if record is None or on_line(record, entry)]
    verdicts = {verdict.entry.name: verdict for verdict in judge(line, policy, pinned=pinned, held=held)}
    for entry in found.entries:
        if entry.kind == "stale":
            verdicts[entry.name] = _judge_stale(record, entry, line, pinned=pinned, stale=stale)
        elif entry.kind == "committed" and entry.name not in verdicts:
            verdicts[entry.name] = Verdict(entry, False, ("other line" if entry.valid else "not valid",))
    return [verdicts[entry.name] for entry in found.entries if entry.name in verdicts]


def judge(
    entries: Sequence[Entry], policy: Policy, *, pinned: Collection[int] = (), held: Collection[int] = ()
) -> list[Verdict]:
    """Judge the valid committed ones of `entries`, oldest first; all others stay and count for nothing.

    Pinned steps stay and count for nothing either; held ones (being read) stay as long as they are held. Whatever the
    numbers say, the newest stays.
    """
    valid = sorted((entry for entry in entries if entry.kind == "committed" and entry.valid), key=_step)
    countable = [entry for entry in valid if entry.step not in pinned]
    there = {entry.step for entry in valid}
    chosen = [step for step in policy.chosen if step in there][-1:]
    ordered = sorted(countable, key=lambda entry: entry.step in chosen)  # stable: by step, the one that stays last
    newest = ordered if policy.newest is None else ordered[max(0, len(ordered) - policy.newest) :]
    kept: dict[Reason, Collection[int]] = {
        "newest": {entry.step for entry in [*newest, *valid[-1:]]},
        "every": {entry.step for entry in valid if policy.every is not None and entry.step % policy.every == 0},
        "best": {entry.step for entry in best_of(countable, policy)},
        "chosen": chosen,
        "pinned": pinned,
        "held": held,
    }
    verdicts = []
    for entry in valid:
        reasons = tuple(reason for reason, steps in kept.items() if entry.step in steps)
        verdicts.append(Verdict(entry, not reasons, reasons or ("excess",)))
    return verdicts


def best_of(entries: Sequence[Entry], policy: Policy) -> list[Entry]:
    """Those of `entries` (oldest first) that the policy keeps for their metric, best first.

    Of equal ones the earlier is better: a metric that was not logged again has come with the later ones unchanged.
    """
    measured = [(value, entry) for entry in entries if (value := measure(entry, policy.metric)) is not None]
    measured.sort(key=lambda pair: pair[0], reverse=policy.mode == "max")  # stable, also in reverse
    return [entry for _, entry in measured[: policy.best]]


def measure(entry: Entry, metric: str | None) -> float | None:
    """The value of `metric` at that step; None where it was not logged or is no finite number: such are never best."""
    value = None if entry.manifest is None or metric is None else entry.manifest.metrics.get(metric)
    if isinstance(value, int):  # of any size: most have no place in a float
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None


def _step(entry: Entry) -> int:
    return entry.step


def on_line(record: RootRecord, entry: Entry) -> bool:
    """Whether training may go on from `entry`: it lies in the past of the newest timeline."""
    manifest = entry.manifest
    return manifest is not None and record.is_past(manifest.run, manifest.timeline, entry.step)


def _judge_stale(
    record: RootRecord | None, entry: Entry, line: Sequence[Entry], *, pinned: Collection[int], stale: bool
) -> Verdict:
    if entry.step in pinned:
        return Verdict(entry, False, ("pinned",))
    if record is not None and _is_replaced(record, entry, line):
        return Verdict(entry, True, ("replaced",))
    return Verdict(entry, stale, ("stale" if stale else "set aside",))


def _is_replaced(record: RootRecord, stale: Entry, line: Sequence[Entry]) -> bool:
    """Whether `stale` was set aside by an automatic fallback, and training has committed something since then."""
    order = {timeline.id: number for number, timeline in enumerate(record.timelines)}
    if stale.timeline not in order or record.timelines[order[stale.timeline]].explicit:
        return False
    return any(order.get(entry.timeline or "", -1) >= order[stale.timeline] for entry in line)
