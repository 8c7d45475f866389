"""The Trainer's own state as a component: what it keeps in ``trainer_state.json``, and what it forgets there.

It is read at every step, so the log, which grows without end, is kept as text in one growing tensor: a step encodes
what it has added, and the tensor is copied while training goes on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from easyckpt.format.difference import ASIDE
from easyckpt.integrations.transformers import arguments, versions
from easyckpt.integrations.transformers.own import Own
from easyckpt.integrations.transformers.unsaved import Buffers

_FIRST_BYTES = 1 << 16


class Log:
    """``TrainerState.log_history`` as text, appended to."""

    def __init__(self) -> None:
        self.text = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        self._used = self._entries = 0
        self._newest: Any = None

    def update(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        """What is kept of `history`."""
        count = len(history)
        grown = count >= self._entries and (not self._entries or history[self._entries - 1] is self._newest)
        if not grown:
            self._used = self._entries = 0
        for entry in history[self._entries :]:
            self._append(json.dumps(entry, default=_number).encode() + b"\n")
        self._entries, self._newest = count, history[-1] if history else None
        return {"text": self.text, "bytes": self._used}

    def _append(self, line: bytes) -> None:
        end = self._used + len(line)
        if end > self.text.numel():
            longer = torch.zeros(max(end, 2 * self.text.numel()), dtype=torch.uint8)
            longer[: self._used] = self.text[: self._used]
            self.text = longer
        self.text[self._used : end] = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        self._used = end


def _history(kept: Mapping[str, Any]) -> list[Any]:
    text = bytes(kept["text"][: kept["bytes"]].numpy().tobytes())
    return [json.loads(line) for line in text.splitlines()]


def _number(value: Any) -> Any:
    """Numbers of NumPy and torch as plain ones; what is none, as text: a log must not end a training."""
    count = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 1)
    return value.item() if hasattr(value, "item") and count == 1 else repr(value)


class Progress:
    """A component. `restored` is what was loaded last, for whoever puts it into the Trainer."""

    def __init__(self) -> None:
        self.trainer: Any = None
        """Whose state it is, once there is one."""
        self.buffers: Buffers | None = None
        self.loss = torch.zeros((), dtype=torch.float64)
        """The running loss since the last log."""
        self.restored: dict[str, Any] | None = None
        self.own: Own | None = None
        """What the trainer's class keeps by itself."""
        self._log = Log()

    def state_dict(self) -> dict[str, Any]:
        """The state at this moment."""
        if self.trainer is None:
            return {}
        state: TrainerState = self.trainer.state
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        history, best = fields.pop("log_history"), fields.pop("best_model_checkpoint")
        fields["global_step"] = int(state.global_step)
        fields["stateful_callbacks"] = _callbacks(self.trainer)
        return {
            "state": fields,
            ASIDE: {  # times, a path, and what the program has set
                "log": self._log.update(history),
                "best_model_checkpoint": best,
                "own": self.own.state() if self.own is not None else None,
                "arguments": arguments.kept(self.trainer.args),
            },
            "buffers": self.buffers.changed() if self.buffers is not None else {},
            "loss": self.loss,
            "total_loss": versions.loss_in_all(self.trainer),
            "logged_at": int(self.trainer._globalstep_last_logged),
            "flos": float(self.trainer.current_flos),
        }

    def constant(self) -> list[torch.Tensor]:
        """The log's text: it is added to when the state is read, and at no other time."""
        return [self._log.text]

    def load_state_dict(self, value: dict[str, Any]) -> None:
        """Keep `value` for later."""
        self.restored = value


def _callbacks(trainer: Any) -> dict[str, Any]:
    """The states of callbacks that have one, as the Trainer collects them when it saves."""
    states: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name, state = type(callback).__name__, callback.state()
            if name not in states:
                states[name] = state
            elif isinstance(states[name], list):
                states[name].append(state)
            else:
                states[name] = [states[name], state]
    return states


def state_json(value: Mapping[str, Any]) -> bytes:
    """``trainer_state.json``, of the component's value."""
    aside = value[ASIDE]
    fields = {
        **value["state"],
        "best_model_checkpoint": aside["best_model_checkpoint"],
        "log_history": _history(aside["log"]),
    }
    return (json.dumps(fields, indent=2, sort_keys=True, default=_number) + "\n").encode()


def put_back(trainer: Any, progress: Progress) -> None:
    """What the Trainer itself does not take out of ``trainer_state.json``."""
    value = progress.restored
    assert value is not None
    if progress.buffers is not None:
        progress.buffers.put_back(value["buffers"])
    trainer._total_loss_scalar = value["total_loss"]
    trainer._globalstep_last_logged = value["logged_at"]
    trainer.current_flos = value["flos"]
    if not trainer.args.restore_callback_states_from_checkpoint:  # else the Trainer has made them anew
        _put_back_callbacks(trainer, value["state"]["stateful_callbacks"])
    if progress.own is not None and value[ASIDE].get("own"):
        progress.own.put_back(value[ASIDE]["own"])


def _put_back_callbacks(trainer: Any, states: Mapping[str, Any]) -> None:
    """What callbacks have counted, such as early stopping's patience; how they were set up is the program's."""
    left = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState) and left.get(type(callback).__name__):
            for name, value in left[type(callback).__name__].pop(0).get("attributes", {}).items():
                setattr(callback, name, value)
