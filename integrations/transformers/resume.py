"""Where a call of ``train()`` goes on from."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from easyckpt.errors import ConfigError
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.prospect import Prospect

_log = logging.getLogger("easyckpt")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run goes on from."""

    step: int | None = None
    """Finished steps; None: it begins anew."""
    foreign: str | None = None
    """The directory of a checkpoint that the Trainer itself is to load; None: ours."""


def find_origin(prospect: Prospect, resume: Any, state: Mapping[str, Any]) -> Origin:
    """Find what `resume` (as ``train(resume_from_checkpoint=…)`` takes it) means; `state` is restored from it.

    All ranks call it and get the same. Raises as Checkpointer.load does.
    """
    if resume is None or resume is False:
        return Origin()
    if resume is True:
        restored = prospect.look(state)
        if restored.tier is None:
            _log.warning("nothing to resume from in %s: training starts from scratch", prospect.root)
            return Origin()
        return Origin(restored.step)
    path = os.fspath(resume)
    parent, name = os.path.split(os.path.realpath(path))
    step = TrainerNaming().parse_committed(name)
    if parent == os.path.realpath(prospect.root) and step is not None:
        return Origin(prospect.look(state, step=step).step)
    raise ConfigError(f"resume_from_checkpoint={path!r} is no checkpoint of {prospect.root}")
