"""The settings as a caller of Checkpointer sees them: names and types for tools, defaults for people.

What a setting means, which values it takes and its default are said once, in `CheckpointConfig`; a test holds this
page to it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from easyckpt.config import CheckpointConfig

_F = TypeVar("_F", bound=Callable[..., Any])


class Settings(TypedDict, total=False):
    """The fields of CheckpointConfig as keyword arguments, but for `audit`, which EASYCKPT_AUDIT alone sets."""

    save_mem_interval: int
    save_storage_interval: int
    max_ckpt_num: int | None
    keep_every: int | None
    keep_best: int
    best_metric: str | None
    best_mode: Literal["min", "max"]
    overlap: bool
    slots: int
    log_file_path: str | os.PathLike[str] | None
    signals: Sequence[str | signal.Signals]
    on_failure: Literal["raise", "continue"]
    max_failures: int
    back_pressure: Literal["skip", "wait"]
    peer_timeout: float
    commit_timeout: float
    close_timeout: float
    exception_drain_timeout: float
    signal_deadline: float
    lease_timeout: float
    lease_interval: float
    memory_dir: str | os.PathLike[str] | None
    memory_checksum: bool
    direct_io: bool | None
    optimizer_factor: float | None
    min_free_bytes: int
    events: bool


def shows_settings(function: _F) -> _F:
    """Have ``help()`` and ``inspect.signature`` show every setting with its default in place of ``**settings``."""
    signature = inspect.signature(function)
    defaults = {field.name: field.default for field in dataclasses.fields(CheckpointConfig)}
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in typing.get_type_hints(Settings).items()
    ]
    given = list(signature.parameters.values())
    positional = [parameter for parameter in given if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    named = [parameter for parameter in given if parameter.kind is parameter.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=[*positional, *shown, *named])  # type: ignore[attr-defined]
    return function
