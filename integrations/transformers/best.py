"""The best checkpoint, as the Trainer's state names it: it stays, and where it does not come to be, the one before."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from easyckpt import catalog
from easyckpt.distributed.agree import done_by_rank_0
from easyckpt.errors import DamagedCheckpoint, NoCheckpoint
from easyckpt.format.difference import ASIDE
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.framework import FrameworkCheckpointer
from easyckpt.integrations.transformers.resume import Origin
from easyckpt.integrations.transformers.saves import Saves
from easyckpt.prospect import Prospect

_log = logging.getLogger("easyckpt")


class Best:
    """Of one run."""

    def __init__(self, trainer: Any, checkpointer: FrameworkCheckpointer, saves: Saves) -> None:
        self._trainer, self._checkpointer, self._saves = trainer, checkpointer, saves
        self._steps: list[int] = []
        """One after the other; the one before is needed until the newest is there."""
        self.keep()

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def keep(self) -> None:
        """What the Trainer's state names now stays, and the one before it until that is there."""
        step = self._saves.step_of(self._trainer.state.best_model_checkpoint)
        if step is not None and step not in self._steps[-1:]:
            self._steps.append(step)
            self._choose()

    def forget(self, step: int) -> None:
        """The checkpoint of `step` does not come to be."""
        if step in self._steps:
            self._steps = [other for other in self._steps if other != step]
            state = self._trainer.state
            if self._saves.step_of(state.best_model_checkpoint) == step:
                state.best_model_checkpoint = self._saves.path(self._steps[-1]) if self._steps else None
            self._choose()

    def put_back(self, restored: Mapping[str, Any]) -> None:
        """What the state that was restored names stays. Where that is not there, the best of those that are.

        The newest Trainers have taken the name out of the state by now, and keep the metric that nothing else reaches.
        """
        named = restored[ASIDE]["best_model_checkpoint"]
        if named is None:
            return
        step, state = self._saves.step_of(named), self._trainer.state
        if os.path.isdir(named) if step is None else self._saves.known(step):
            state.best_model_checkpoint = named
        else:
            left = self._best_of_those_that_are_there()
            state.best_metric, state.best_global_step = left or (None, None)
            state.best_model_checkpoint = None if left is None else self._saves.path(left[1])
            _log.warning(
                "%s, the best checkpoint, is not there or not whole: %s",
                named,
                "none that is left was judged, so the best is one of those to come"
                if left is None
                else f"the best of those that are is {state.best_model_checkpoint} ({left[0]:g})",
            )
        self._steps = []
        self.keep()
        self._choose()

    def _best_of_those_that_are_there(self) -> tuple[float, int] | None:
        """(metric, step), as the Trainer has logged them."""
        args = self._trainer.args
        judged: dict[int, float] = {}
        name = args.metric_for_best_model or ""
        name = name if name.startswith("eval_") else f"eval_{name}"
        for entry in self._trainer.state.log_history:
            value, step = entry.get(name), entry.get("step")
            if type(value) in (int, float) and not math.isnan(value) and type(step) is int and self._saves.known(step):
                judged[step] = value
        sign = 1 if args.greater_is_better else -1
        step = max(judged, key=lambda step: (sign * judged[step], -step), default=None)
        return None if step is None else (judged[step], step)

    def _choose(self) -> None:
        policy = self._checkpointer.policy
        self._checkpointer.policy = dataclasses.replace(policy, chosen=tuple(self._steps))


def origin_with_its_best(prospect: Prospect, origin: Origin, looked_at: Mapping[str, Any], restored: Any) -> Origin:
    """Where a kill has prevented the best checkpoint, and its snapshot is still there, that is gone on from.

    The snapshot of a step after it has other weights: going on from there, the best would be lost. All ranks call it.
    """
    found = origin.found
    if found is None or found.tier != "memory" or restored is None:
        return origin
    named = restored[ASIDE]["best_model_checkpoint"]
    best = done_by_rank_0(
        prospect.channel, prospect.ranks, "the best checkpoint", lambda: _prevented(prospect, named), prospect.timeout
    )
    if best is None or not best < found.step:
        return origin
    try:
        earlier = prospect.look(looked_at, step=best)
    except (NoCheckpoint, DamagedCheckpoint):  # nothing was applied
        return origin
    _log.warning(
        "the best checkpoint, of step %d, was not there yet when the job ended: going on from its snapshot, and not "
        "from that of step %d",
        best,
        found.step,
    )
    return dataclasses.replace(origin, step=best, found=earlier, explicit=True)


def _prevented(prospect: Prospect, named: str | None) -> int | None:
    """Rank 0: the step of the best checkpoint of this root, where there is none of that step."""
    folder, name = os.path.split(named or "")
    step = TrainerNaming().parse_committed(name)
    if step is None or os.path.realpath(folder) != os.path.realpath(prospect.root):
        return None
    return None if catalog.inspect(prospect.storage, name, TrainerNaming()).valid else step
