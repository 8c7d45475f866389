"""Metrics that the user logs: kept with the next snapshot, and as JSON lines beside the checkpoints."""

from __future__ import annotations

import collections
import json
import logging
import math
import threading
import time
from typing import Any

import numpy as np
import torch

from easyckpt.errors import DamagedCheckpoint, UsageError
from easyckpt.format import layout
from easyckpt.format.image import Layout
from easyckpt.state.apply import saved_value
from easyckpt.storage.base import Storage

logger = logging.getLogger("easyckpt")

#: The component of a snapshot that holds them.
COMPONENT = "easyckpt.metrics"
#: Lines that wait for storage, and once more as many that are read and could not be written; later ones are counted.
QUEUE_LIMIT = 10_000
#: What a line says by itself (resuming cuts by it), and what a value that the user gave that name is called there.
OWN_NAMES = {"step": "logged_step", "time": "logged_time"}
#: Lines that a snapshot carries because they may be lost with this process: those of about the last second.
CARRIED = 256

Entry = tuple[int, float, dict[str, Any]]
"""Step, Unix time, values by name."""
NOTHING = (-1.0, 0.0)
"""Step and time before all lines."""


class Metrics:
    """`log` and `take` belong to the training thread, which waits during `cut`; `write` to a background thread, which
    reads GPU tensors.

    With `writes` (rank 0's), what is taken waits for `write`; else it only goes into the snapshot.
    """

    def __init__(self, *, writes: bool = True) -> None:
        self._pending: dict[str, Any] = {}
        self._writes = writes
        self._queue: collections.deque[Entry] = collections.deque()
        self._writing = threading.Lock()
        """Guards the file, `_lines`, and what is taken out of the queue."""
        self._early: collections.deque[Entry] | None = None
        """What belongs to a line of training that is not opened yet; None: one is open."""
        self._lines: list[tuple[int, bytes]] = []
        self._unwritten: collections.deque[Entry] = collections.deque()
        """Those in `_lines` and `_queue`, in order, without tensors; `_early` ones once their line is open."""
        self._restored: list[Entry] = []
        """What the snapshot that was restored has carried."""
        self._lost = self._told_lost = 0
        self.latest: dict[str, float] = {}
        """What goes into the next snapshot: plain numbers only."""

    def log(self, values: dict[str, Any]) -> None:
        """Keep `values` for the next step. A value is a real number, a string, or a tensor with one real element."""
        for name, value in values.items():
            value = value.item() if isinstance(value, (np.number, np.bool_)) else value  # noqa: PLW2901
            if isinstance(value, torch.Tensor):
                if value.numel() != 1 or value.is_complex():
                    kind = f"{value.numel()} of {value.dtype}"
                    raise UsageError(f"log({name}=…): a tensor must have one element, a real number; this has {kind}")
                detached = value.detach()
                self._pending[name] = detached.item() if detached.device.type == "cpu" else detached.clone()
            elif isinstance(value, (bool, int, float, str)):
                self._pending[name] = value
            else:
                raise UsageError(f"log({name}=…): {type(value).__name__} is neither number, string nor tensor")

    def take(self, step: int) -> None:
        """Everything logged so far belongs to `step`."""
        if not self._pending:
            return
        values, self._pending = self._pending, {}
        self.latest = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        early = self._early
        queue = self._queue if early is None else early
        if self._writes and len(queue) < QUEUE_LIMIT:
            entry = (step, time.time(), values)
            if early is None:
                self._unwritten.append(_without_tensors(entry))  # first: `write` takes it away once it is written
            queue.append(entry)
        elif self._writes:
            self._lost += 1

    def hold_back(self) -> None:
        """Training goes on from another state: what is taken from now on is written once its line is open (`cut`)."""
        self._early = collections.deque()

    def write(self, storage: Storage) -> None:
        """Append what was taken to the metrics file. What storage refuses is kept for the next time."""
        with self._writing:
            while self._queue and len(self._lines) < QUEUE_LIMIT:
                step, moment, values = self._queue.popleft()
                self._lines.append((step, _line(step, moment, values)))
            if self._lines:
                storage.append(layout.METRICS, b"".join(line for _, line in self._lines))
                written, self._lines = len(self._lines), []
                for _ in range(min(written, len(self._unwritten))):
                    self._unwritten.popleft()
        if self._lost > self._told_lost:
            self._told_lost = self._lost
            logger.warning("%d lines of metrics were dropped: they came faster than they were written", self._lost)

    @property
    def unwritten(self) -> int:
        """Lines that were taken and are not in the file."""
        return len(self._queue) + len(self._lines) + len(self._early or ())

    def cut(self, storage: Storage, step: int) -> None:
        """A line of training begins at `step`: drop what others have left past it, written or not (and a last line that
        a crash left half-written), and write again what was lost with the process that has logged it.
        """
        with self._writing:
            self._lines = [line for line in self._lines if line[0] <= step]
            self._queue = collections.deque(entry for entry in self._queue if entry[0] <= step)
            kept = [entry for entry in self._unwritten if entry[0] <= step]
            written = max(_cut_file(storage, step), max((entry[:2] for entry in kept), default=NOTHING))
            again = [entry for entry in self._restored if written < entry[:2] and entry[0] <= step]
            self._lines += [(entry[0], _line(*entry)) for entry in again]
            early, self._early = self._early or (), None  # first: training may go on taking
            self._queue.extend(early)
            self._unwritten = collections.deque([*kept, *again, *map(_without_tensors, early)])
            self._restored = []

    def state_dict(self) -> dict[str, Any]:
        """For the snapshot."""
        return {"newest": dict(self.latest), "unwritten": list(self._unwritten)[-CARRIED:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a snapshot."""
        self.latest = dict(state["newest"])
        self._restored = list(state["unwritten"])


def metrics_in(image: Layout, objects: bytes) -> dict[str, float]:
    """What was newest at the step of a snapshot, out of its layout and objects. Raises DamagedCheckpoint."""
    trees = image.trees
    if not isinstance(trees, dict) or COMPONENT not in trees:
        return {}
    latest = saved_value(image, trees, objects, COMPONENT, _no_tensor)["newest"]
    return {name: number for name, number in latest.items() if isinstance(number, (int, float))}


def _no_tensor(number: int) -> Any:
    raise DamagedCheckpoint(f"the metrics refer to tensor {number}, and they have none")


def _without_tensors(entry: Entry) -> Entry:
    """What of an entry can be carried in a snapshot: reading a tensor could mean waiting for a GPU."""
    step, moment, values = entry
    return step, moment, {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}


def _cut_file(storage: Storage, step: int) -> tuple[float, float]:
    """Drop the lines past `step`; returns step and time of the newest one that is left."""
    if not storage.exists(layout.METRICS):
        return NOTHING
    data = storage.read(layout.METRICS)
    kept = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n") and _moment_of(line)[0] <= step]
    if sum(map(len, kept)) != len(data):
        storage.replace(layout.METRICS, b"".join(kept))
    return max(map(_moment_of, kept), default=NOTHING)


def _moment_of(line: bytes) -> tuple[float, float]:
    """Step and time of a line; infinity where it is none."""
    try:
        record = json.loads(line)
        return float(record["step"]), float(record.get("time", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return math.inf, math.inf


def _line(step: int, moment: float, values: dict[str, Any]) -> bytes:
    fields = {"step": json.dumps(step), "time": json.dumps(moment)}
    for name, value in values.items():
        try:
            fields[OWN_NAMES.get(name, name)] = json.dumps(_plain(value))
        except Exception as error:  # noqa: BLE001 - a GPU is read here; one value must not take the others with it
            logger.warning("log(%s=…) of step %d cannot be written down and is left out: %s", name, step, error)
    return ("{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in fields.items()) + "}\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
