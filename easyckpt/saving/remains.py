"""What is left where not all is committed, in words: without them a loss of nothing looks like one of everything."""

from __future__ import annotations

import logging
import shlex

from easyckpt.saving.parts import SaverParts

logger = logging.getLogger("easyckpt")


def after_signal(parts: SaverParts) -> str:
    """What there is to go on from, should the signal end this process."""
    steps = _uncommitted(parts)
    if not steps or not parts.arena.survives:
        return _newest_committed(parts)
    return f"{_newest_committed(parts)}; {_snapshots(steps, 'stay')} in memory for a restart on this machine"


def say_after_exception(parts: SaverParts, error: BaseException | None) -> None:
    """Log what becomes of the snapshots that are not committed, if there are any; `error` is what has ended the job."""
    steps = _uncommitted(parts)
    if not steps:
        return
    reason = "abandon()" if error is None else type(error).__name__
    if parts.arena.survives:
        common = "" if parts.ranks.alone else " (what is newest on all ranks counts)"
        rescue = f", or commit with `easyckpt rescue {shlex.quote(parts.storage.root)}`"
        left = f"{_snapshots(steps, 'stay')} in memory, {_newest_committed(parts)}"
        text = f"{left}; start again on this machine{'' if parts.naming.shared else rescue}{common}"
    else:
        left = _snapshots(steps, "are")
        text = f"{left} lost with this process's private memory; {_newest_committed(parts)}"
    logger.warning("rank %d: ended by %s: %s", parts.ranks.rank, reason, text)


def _uncommitted(parts: SaverParts) -> list[int]:
    """Steps of this rank's snapshots that are newer than what is committed."""
    sealed = parts.coordinator.ledger.on_line(parts.arena.sealed())
    return sorted({meta.step for meta in sealed if meta.step > parts.coordinator.committed})


def _newest_committed(parts: SaverParts) -> str:
    newest = parts.coordinator.committed
    return f"the newest committed step is {newest if newest >= 0 else 'none'}"


def _snapshots(steps: list[int], verb: str) -> str:
    """E.g. "the snapshots of steps 12 to 15 stay"."""
    if len(steps) == 1:
        return f"the snapshot of step {steps[0]} {'is' if verb == 'are' else verb + 's'}"
    row = steps == list(range(steps[0], steps[-1] + 1))
    return f"the snapshots of steps {f'{steps[0]} to {steps[-1]}' if row else ', '.join(map(str, steps))} {verb}"
