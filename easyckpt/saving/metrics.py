"""Metrics that the user logs: kept with the next snapshot, and as JSON lines beside the checkpoints."""

from __future__ import annotations

import collections
import json
import math
import queue
import time
from typing import Any

import torch

from easyckpt.errors import DamagedCheckpoint, UsageError
from easyckpt.format import layout
from easyckpt.format.image import Layout
from easyckpt.state.apply import saved_value
from easyckpt.storage.base import Storage

#: The component of a snapshot that holds them.
COMPONENT = "easyckpt.metrics"
#: Enough for every step that can still be in memory and be committed.
REMEMBERED_STEPS = 256
#: What a line says by itself (resuming cuts by it), and what a value that the user gave that name is called there.
OWN_NAMES = {"step": "logged_step", "time": "logged_time"}


class Metrics:
    """`log` and `take` belong to the training thread; `write` to a background thread, which reads GPU tensors there."""

    def __init__(self) -> None:
        self._pending: dict[str, Any] = {}
        self._queue: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.latest: dict[str, float] = {}
        """What goes into the next snapshot: plain numbers only."""
        self._of_step: collections.OrderedDict[int, dict[str, float]] = collections.OrderedDict()

    def log(self, values: dict[str, Any]) -> None:
        """Keep `values` for the next step. A value is a number, a string, or a tensor with one element."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise UsageError(f"log({name}=…): a tensor must have one element, this has {value.numel()}")
                detached = value.detach()
                self._pending[name] = detached.item() if detached.device.type == "cpu" else detached.clone()
            elif isinstance(value, (bool, int, float, str)):
                self._pending[name] = value
            else:
                raise UsageError(f"log({name}=…): {type(value).__name__} is neither number, string nor tensor")

    def take(self, step: int) -> None:
        """Everything logged so far belongs to `step`."""
        if self._pending:
            values, self._pending = self._pending, {}
            self.latest = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self._queue.put((step, values))
        self.remember(step)

    def remember(self, step: int) -> None:
        """The latest values are those of `step`."""
        self._of_step[step] = self.latest
        while len(self._of_step) > REMEMBERED_STEPS:
            self._of_step.popitem(last=False)

    def of_step(self, step: int) -> dict[str, float]:
        """What was newest at `step`; empty for a step long gone."""
        return self._of_step.get(step, {})

    def write(self, storage: Storage) -> None:
        """Append what was taken to the metrics file."""
        lines = []
        while not self._queue.empty():
            step, values = self._queue.get()
            logged = {OWN_NAMES.get(name, name): _plain(value) for name, value in values.items()}
            record = {"step": step, "time": time.time()} | logged
            lines.append(json.dumps(record, separators=(",", ":")))
        if lines:
            storage.append(layout.METRICS, ("\n".join(lines) + "\n").encode())

    def state_dict(self) -> dict[str, Any]:
        """For the snapshot."""
        return dict(self.latest)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a snapshot."""
        self.latest = dict(state)


def metrics_in(image: Layout, objects: bytes) -> dict[str, float]:
    """What was newest at the step of a snapshot, out of its layout and objects. Raises DamagedCheckpoint."""
    trees = image.trees
    if not isinstance(trees, dict) or COMPONENT not in trees:
        return {}
    value = saved_value(image, trees, objects, COMPONENT, _no_tensor)
    return {name: number for name, number in value.items() if isinstance(number, (int, float))}


def _no_tensor(number: int) -> Any:
    raise DamagedCheckpoint(f"the metrics refer to tensor {number}, and they have none")


def cut(storage: Storage, step: int) -> None:
    """Drop lines of steps past `step` (and a last line that a crash left half-written)."""
    if not storage.exists(layout.METRICS):
        return
    data = storage.read(layout.METRICS)
    kept = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n") and _step_of(line) <= step]
    if sum(map(len, kept)) != len(data):
        storage.replace(layout.METRICS, b"".join(kept))


def _step_of(line: bytes) -> float:
    try:
        record = json.loads(line)
        return float(record["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
