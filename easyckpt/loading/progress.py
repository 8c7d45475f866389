"""How far training had come before a load, as memory and the run's own logs tell: what a resume says it has lost.

Logs are hints. They are written behind the training, so the figure is a lower bound; a missing, damaged or hostile log
tells nothing, and no decision of a load rests on one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from easyckpt.errors import EasyckptError
from easyckpt.event_kinds import Restored, SnapshotBegun, SnapshotDiscarded, SnapshotSealed, SnapshotSkipped
from easyckpt.format import layout
from easyckpt.storage.base import Storage

#: The end of a log that is looked at: hundreds of steps, of which the newest is wanted.
TAIL_BYTES = 64 << 10

_RESTORED = Restored.__name__
_SNAPSHOT = [kind.__name__ for kind in (SnapshotBegun, SnapshotDiscarded, SnapshotSealed, SnapshotSkipped)]


def newest_step_logged(storage: Storage) -> int | None:
    """The newest finished step that rank 0's event log tells of since its last load, else the metrics; None: neither.

    For a thread that may wait for storage. Never raises for what the files hold or for files that cannot be read.
    """
    newest: int | None = None
    for record in _records(storage, layout.events_file(0)):
        step, kind = _step(record), record.get("event")
        if step is not None and kind == _RESTORED:
            newest = step
        elif step is not None and kind in _SNAPSHOT:
            newest = step if newest is None else max(newest, step)
    if newest is None:  # they may be switched off
        for record in _records(storage, layout.METRICS):
            newest = _step(record)
    return newest


def steps_lost(restored: int, tried: Iterable[int], seen: Iterable[int]) -> int | None:
    """Finished steps after the `restored` one; None where nothing tells.

    `tried` are the candidates' steps, `seen` steps that were finished for certain. An older one than what was restored
    says nothing about what came after it.
    """
    later = [*(step for step in tried if step > restored), *(step for step in seen if step >= restored)]
    return max(later) - restored if later else None


def _records(storage: Storage, path: str) -> Iterable[dict[str, Any]]:
    for line in _tail(storage, path).splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # cut by a crash, or no line of ours
            continue
        if isinstance(record, dict):
            yield record


def _tail(storage: Storage, path: str) -> bytes:
    """The end of a log, which may begin in the middle of a line; nothing where it cannot be read."""
    try:
        with storage.reader(path) as reader:
            buffer = bytearray(min(reader.size, TAIL_BYTES))
            return bytes(buffer[: reader.read_into(buffer, reader.size - len(buffer))])
    except (EasyckptError, OSError):
        return b""


def _step(record: dict[str, Any]) -> int | None:
    step = record.get("step")
    return step if type(step) is int and 0 <= step <= layout.MAX_STEP else None
