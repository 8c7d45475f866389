"""What is looked at before it is known where training goes on, as components that judge what they would be given.

A checksum says that bytes are those that were written, not that they are a state. What is none must be known before a
candidate is chosen: then the one before it still can be.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.difference import ASIDE
from easyckpt.integrations.training_data import TrainingData, require_place
from easyckpt.integrations.transformers.names import DATA, PROGRESS
from easyckpt.integrations.transformers.progress import Progress, state_json
from easyckpt.integrations.transformers.trainer_state import require_state
from easyckpt.state.components import Fetch, Saved, owned
from easyckpt.state.generators import set_own_state
from easyckpt.state.objects import ForeignComponent


class _Judged(ForeignComponent):
    """Something whose value `require` takes, with the step that it is of; it raises for what is no state."""

    def __init__(self, name: str, target: Any, require: Callable[[Any, int], None]) -> None:
        super().__init__(name, target)
        self._require = require

    @override
    def judge(self, saved: Saved, fetch: Fetch, step: int) -> None:
        value = saved.decode(saved.dynamic, owned(saved, fetch, "cpu"), self.value())
        try:
            self._require(value, step)
        except Exception as error:  # whatever nonsense leads to
            said = (
                str(error) if isinstance(error, (ValueError, DamagedCheckpoint)) else f"{type(error).__name__}: {error}"
            )
            raise saved.damaged(said[:300]) from error


def judged(trainer: Any, progress: Progress, data: TrainingData) -> dict[str, ForeignComponent]:
    """The components that say where `trainer` goes on."""
    return {
        PROGRESS: _Judged(PROGRESS, progress, lambda value, step: _require_progress(value, step, trainer)),
        DATA: _Judged(DATA, data, lambda value, _: require_place(value)),
    }


def _require_progress(value: Any, step: int, trainer: Any) -> None:
    """Everything that is made of it later is made, or tried, here."""
    log = value[ASIDE]["log"]
    text, used = log["text"], log["bytes"]
    if text.dtype != torch.uint8 or text.dim() != 1 or type(used) is not int or not 0 <= used <= text.numel():
        raise ValueError("the log is malformed")
    state = json.loads(state_json(value))
    require_state(state)
    if state["global_step"] != step:
        raise ValueError(f"it is of step {state['global_step']}")
    if not isinstance(value["state"].get("stateful_callbacks"), dict):
        raise ValueError("it has no states of callbacks")
    if not all(isinstance(tensor, torch.Tensor) for tensor in _named(value["buffers"])):
        raise ValueError("a buffer is no tensor")
    loss = value["loss"]
    if not (isinstance(loss, torch.Tensor) and loss.is_floating_point() and loss.numel() == 1):
        raise ValueError("the running loss is no number")
    for name, kinds in (("total_loss", (int, float)), ("logged_at", (int,)), ("flos", (int, float))):
        if type(value[name]) not in kinds:
            raise ValueError(f"{name} is no number")
    if value[ASIDE].get("own") is not None:
        _require_own(value[ASIDE]["own"], trainer)


def _require_own(kept: Mapping[str, Any], trainer: Any) -> None:
    """What the trainer's class keeps: its generators take their states."""
    _named(kept["values"])
    _named(kept["generators"])
    for name, state in kept["generators"].items():
        live = vars(trainer).get(name)
        if isinstance(live, torch.Generator):
            torch.Generator(live.device).set_state(state)
        elif live is not None:
            set_own_state(copy.deepcopy(live), state)


def _named(values: Any) -> Any:
    """The values of a dict by name, of which none is easyckpt's or Python's own."""
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError("there are values without a name")
    if odd := [name for name in values if name == "_easyckpt" or name.startswith("__")]:
        raise ValueError(f"{odd[0]!r} is no attribute to set")
    return values.values()
