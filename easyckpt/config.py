"""Every setting of a Checkpointer in one place; where settings come from is told in `config_sources`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import os
import signal
import types
import typing
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from easyckpt.errors import ConfigError

_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
_AT_LEAST_ONE = ("save_mem_interval", "save_storage_interval", "slots", "max_failures", "max_ckpt_num", "keep_every")
_C = TypeVar("_C", bound=type)


def _explained(cls: _C) -> _C:
    """Have ``help()`` show each field's default and the text below it, which Python itself throws away."""
    try:
        (definition,) = ast.parse(inspect.getsource(cls)).body
    except (OSError, TypeError):  # installed without its sources
        return cls
    assert isinstance(definition, ast.ClassDef)
    lines = [inspect.cleandoc(cls.__doc__ or ""), ""]
    for field, below in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            default = "" if field.value is None else f" = {ast.unparse(field.value)}"
            lines += [f"{ast.unparse(field.target)}{default}", f"    {ast.literal_eval(below.value)}"]
    cls.__doc__ = "\n".join(lines)
    return cls


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What EASYCKPT_AUDIT asks of a run beside plain settings."""

    root: str | None = None
    """Checkpoint root that takes the place of the script's own; None: the script's."""

    stop_step: int | None = None
    """Finished steps after which the run is to be stopped; None: never."""

    search_from: int = 0
    """Finished steps after which the process is searched for generators that are not part of the state."""

    left_out: tuple[str, ...] = ()
    """Names of state components that a load of this run leaves as they are."""

    def __post_init__(self) -> None:
        root, stop = self.root, self.stop_step
        _check(root is None or isinstance(root, str), "audit.root", "a path or null", root)
        _check(stop is None or _is_int(stop, 0), "audit.stop_step", "a number of steps or null", stop)
        _check(_is_int(self.search_from, 0), "audit.search_from", "a number of steps", self.search_from)
        names = self.left_out
        good = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        _check(good, "audit.left_out", "a list of component names", names)
        object.__setattr__(self, "left_out", tuple(names))


@_explained
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """All settings of a Checkpointer. Immutable; a wrong value raises ConfigError naming the field."""

    save_mem_interval: int = 1
    """Steps between two snapshots into host memory."""

    save_storage_interval: int = 100
    """Steps between two flushes to storage."""

    max_ckpt_num: int | None = 5
    """Committed, valid, unpinned checkpoints of the current line that are kept; None keeps all."""

    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this stay for ever, beside the newest max_ckpt_num; None: none."""

    keep_best: int = 0
    """Checkpoints with the best `best_metric` that stay, beside the newest max_ckpt_num; needs best_metric."""

    best_metric: str | None = None
    """Name under which the training logs (ckpt.log) what keep_best goes by; NaN and infinity are never best."""

    best_mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest best_metric is best; of equal ones the earlier step."""

    overlap: bool = True
    """Copy what only the optimizer writes during the next forward and backward."""

    slots: int = 4
    """Snapshots that the memory of one rank has room for; fewer are used when memory is short."""

    log_file_path: str | None = None
    """File that the readable log is appended to; None: only Python's logging."""

    signals: tuple[str, ...] = ("SIGTERM",)
    """Names of the signals that start an emergency flush; empty: none."""

    on_failure: Literal["raise", "continue"] = "raise"
    """What a failed background save does at the next call: raise, or go on for `max_failures` in a row."""

    max_failures: int = 3
    """With on_failure="continue": failed saves in a row after which the failure is raised all the same."""

    back_pressure: Literal["skip", "wait"] = "skip"
    """What happens when no slot is free or a flush is still running: skip (counted), or hold the training up."""

    peer_timeout: float = 300.0
    """Seconds without a sign of life that one rank waits for another outside of a commit."""

    commit_timeout: float = 600.0
    """Seconds from the announcement of an attempt until it is committed or abandoned."""

    close_timeout: float = 600.0
    """Seconds that close() gives pending saves to become durable."""

    exception_drain_timeout: float = 30.0
    """Seconds that pending saves get when the training ended in an exception."""

    signal_deadline: float = 20.0
    """Seconds from a signal until the emergency flush is given up."""

    lease_timeout: float = 60.0
    """Seconds without a renewal after which another job's lease on the root counts as dead."""

    lease_interval: float = 10.0
    """Seconds between two renewals of the own lease; below half of lease_timeout."""

    memory_dir: str | None = None
    """Directory of the memory tier (a tmpfs); None: /dev/shm where it can be used."""

    memory_checksum: bool = False
    """Checksum the bulk of every memory snapshot too; costs a pass over memory for each."""

    direct_io: bool | None = None
    """Write and read storage with O_DIRECT; None: where a probe shows that the file system really takes it."""

    optimizer_factor: float | None = None
    """Bytes of the whole state per byte of parameters, for reserving memory; None: found from the optimizers."""

    min_free_bytes: int = 0
    """Bytes that a flush must leave free on storage; a flush that would not is refused before it begins."""

    events: bool = True
    """Write events/rank-*.jsonl into the root."""

    audit: Audit | None = None
    """Set from EASYCKPT_AUDIT only."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, converted(field.name, getattr(self, field.name)))
        _check(
            self.lease_interval * 2 < self.lease_timeout,
            "lease_interval",
            f"below half of lease_timeout ({self.lease_timeout:g} s)",
            self.lease_interval,
        )
        if self.best_metric is None:
            _check(
                self.keep_best == 0,
                "keep_best",
                "0 without best_metric (which says what is best: give it too)",
                self.keep_best,
            )
        else:
            _check(self.keep_best > 0, "keep_best", f"at least 1 with best_metric={self.best_metric!r}", self.keep_best)


def kinds_of(name: str) -> tuple[type, ...]:
    """The classes that a field may hold."""
    hint = _HINTS[name]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(str if typing.get_origin(part) is Literal else typing.get_origin(part) or part for part in parts)


def converted(name: str, value: Any) -> Any:
    """`value` in the field's exact type; ConfigError where it cannot be meant, or is out of the field's range."""
    value = _typed(name, value)
    if value is None:
        return None
    if name in _AT_LEAST_ONE:
        _check(value >= 1, name, "at least 1", value)
    elif name == "min_free_bytes":
        _check(value >= 0, name, "0 or more bytes", value)
    elif name == "keep_best":
        _check(value >= 0, name, "0 or more", value)
    elif name == "best_metric":
        _check(value != "", name, "the name of a metric or None", value)
    elif name == "optimizer_factor":
        _check(value >= 1, name, "at least 1 or None", value)
    elif kinds_of(name) == (float,):
        _check(value > 0, name, "a positive number of seconds", value)
    return value


def _typed(name: str, value: Any) -> Any:
    kinds = kinds_of(name)
    choices = typing.get_args(_HINTS[name]) if typing.get_origin(_HINTS[name]) is Literal else ()
    if value is None and type(None) in kinds:
        return None
    if choices:
        _check(value in choices, name, " or ".join(repr(choice) for choice in choices), value)
    elif bool in kinds:
        _check(isinstance(value, bool), name, "True or False", value)
    elif int in kinds:
        _check(_is_int(value), name, "a whole number", value)
    elif float in kinds:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _check(number and math.isfinite(value), name, "a finite number", value)
        return float(value)
    elif tuple in kinds:
        return _signal_names(name, value)
    elif name == "best_metric":
        _check(isinstance(value, str), name, "the name of a metric or None", value)
    elif str in kinds:
        _check(isinstance(value, (str, os.PathLike)), name, "a path", value)
        return os.fspath(value)
    else:
        _check(isinstance(value, kinds), name, " or ".join(kind.__name__ for kind in kinds), value)
    return value


def _signal_names(name: str, value: Any) -> tuple[str, ...]:
    _check(isinstance(value, (list, tuple)), name, "a sequence of names such as ('SIGTERM',)", value)
    names = tuple(item.name if isinstance(item, signal.Signals) else item for item in value)
    for item in names:
        known = isinstance(item, str) and item in signal.Signals.__members__
        _check(known and item not in _UNCATCHABLE, name, "names of signals that can be caught", item)
    return tuple(dict.fromkeys(names))


def _is_int(value: Any, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def _check(good: bool, name: str, expected: str, value: Any) -> None:
    if not good:
        raise ConfigError(f"{name} must be {expected}, not {value!r}")


_HINTS: Final[dict[str, Any]] = typing.get_type_hints(CheckpointConfig)
