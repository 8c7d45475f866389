"""What an Accelerator has prepared, as components of a Checkpointer's state.

They are kept in private names, which are listed by `tests/test_private_names.py`. Supported from 1.0 on; read, and run
by the tests, on 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from packaging.version import Version
from torch import nn

from easyckpt.errors import ConfigError
from easyckpt.state.modules import unwrap

OLDEST = Version("1.0")


def check(accelerator: Any) -> None:
    """Raise ConfigError where this Accelerator's training cannot be kept."""
    if Version(accelerate.__version__).release < OLDEST.release:
        raise ConfigError(
            f"accelerate {accelerate.__version__} is installed; easyckpt needs {OLDEST} or newer: upgrade it"
        )
    if not isinstance(accelerator, accelerate.Accelerator):
        raise ConfigError(f"accelerator: must be an accelerate.Accelerator, not a {type(accelerator).__name__}")
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigError(
            f"this Accelerator trains with {kind}; easyckpt keeps models that are whole on every rank (one process, or "
            "DDP). Use accelerator.save_state() and load_state() there"
        )


def state_of(accelerator: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The components `given`, and everything else that was prepared or registered.

    accelerate's wrappers are taken off. A model that is wrapped for several ranks stays so: the wrapper says what is
    equal on all of them.
    """
    prepared = {id(_core(value)): (kind, _component(value)) for kind, value in _parts_of(accelerator)}
    state: dict[str, Any] = {}
    for name, value in given.items():
        state[name] = prepared.pop(id(_core(value)), ("", _component(value)))[1]
    for kind, value in prepared.values():
        state[_free_name(kind, state)] = value
    return state


def _parts_of(accelerator: Any) -> Iterator[tuple[str, Any]]:
    for value in accelerator._models:
        yield "model", value
    for value in accelerator._optimizers:
        yield "optimizer", value
    for value in accelerator._schedulers:
        yield "scheduler", value
    if accelerator.scaler is not None:
        yield "scaler", accelerator.scaler
    for value in accelerator._custom_objects:
        yield "registered", value


def _component(value: Any) -> Any:
    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    if isinstance(value, AcceleratedScheduler):
        return value.scheduler
    return value


def _core(value: Any) -> Any:
    """The object of the user's own, without any wrapper."""
    return unwrap(value) if isinstance(value, nn.Module) else _component(value)


def _free_name(kind: str, taken: Mapping[str, Any]) -> str:
    name, number = kind, 0
    while name in taken:
        number += 1
        name = f"{kind}_{number}"
    return name
