"""Whether what ``trainer_state.json`` holds can be what a Trainer has written, before anything is made of it.

Checksums say that bytes are those that were written, and nothing of what they mean. transformers is not imported here:
checkpoints can be looked at without.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from easyckpt.errors import DamagedCheckpoint


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_path(value: Any) -> bool:
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeError:
        return False


def _is_log(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _is_callbacks(value: Any) -> bool:
    """The state of each, or of each of several that have one name."""
    if not isinstance(value, dict):
        return False
    control = value.get("TrainerControl", {})  # there is one
    if not isinstance(control, dict) or not all(map(_is_flag, _part(control, "args").values())):
        return False
    states = [state for each in value.values() for state in (each if isinstance(each, list) else [each])]
    return all(
        isinstance(state, dict) and all(isinstance(state.get(part, {}), dict) for part in ("args", "attributes"))
        for state in states
    )


def _part(state: dict[str, Any], name: str) -> dict[str, Any]:
    part = state.get(name, {})
    return part if isinstance(part, dict) else {}


#: name -> (what it is, in words; the test; whether it may be null). Any other field is for people alone.
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool], bool]] = {
    **dict.fromkeys(
        ("epoch", "logging_steps", "eval_steps", "save_steps", "best_metric"), ("number", _is_number, True)
    ),
    **dict.fromkeys(
        ("max_steps", "num_train_epochs", "num_input_tokens_seen", "total_flos"), ("number", _is_number, False)
    ),
    **dict.fromkeys(("best_global_step", "train_batch_size"), ("count", _is_count, True)),
    **dict.fromkeys(
        ("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"), ("flag", _is_flag, False)
    ),
    "best_model_checkpoint": ("path", _is_path, True),
    "trial_params": ("object", lambda value: isinstance(value, dict), True),
    "log_history": ("list of objects", _is_log, True),
    "stateful_callbacks": ("object of callbacks' states", _is_callbacks, True),
}


def require_state(state: Any) -> None:
    """Raise DamagedCheckpoint where `state`, of JSON's values, is none that the Trainer could go on with.

    A field that is not there has its default: older versions of transformers have had fewer.
    """
    if not isinstance(state, dict):
        raise DamagedCheckpoint("the Trainer's state is no object")
    if not _is_count(state.get("global_step")):
        raise DamagedCheckpoint("the Trainer's state has no global_step")
    for name, (what, fits, may_be_null) in _FIELDS.items():
        if name in state and not fits(state[name]) and not (may_be_null and state[name] is None):
            raise DamagedCheckpoint(f"the Trainer's state: {name} is no {what}")
    if state.get("train_batch_size") == 0:
        raise DamagedCheckpoint("the Trainer's state: train_batch_size is 0")
    _require_known(state)


def _require_known(state: Mapping[str, Any]) -> None:
    """Where there is a Trainer, it takes the fields that it knows, and no others."""
    kind = getattr(sys.modules.get("transformers.trainer_callback"), "TrainerState", None)
    if kind is not None and (odd := sorted(state.keys() - {field.name for field in dataclasses.fields(kind)})):
        raise DamagedCheckpoint(
            f"the Trainer's state has fields that this version of transformers does not know: {', '.join(odd[:5])}"
        )
