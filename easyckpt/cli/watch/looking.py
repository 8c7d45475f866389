"""All that the files of a root tell of the job that writes it, and on the job's own host whether its owner lives.

The latter is asked of the record lock that the lease names. Nothing is written, and no lease is held.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from easyckpt import catalog
from easyckpt.cli.watch.following import Tail, last_record
from easyckpt.cli.watch.standing import Standing
from easyckpt.errors import EasyckptError
from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.memory.owner import OwnerLock
from easyckpt.storage.base import Storage
from easyckpt.storage.lease_chain import lives, look

#: What is read of each rank's events at first: the most, the least, and of all ranks together.
_WINDOW, _LEAST, _TOGETHER = 4 << 20, 64 << 10, 64 << 20
_WARNINGS = 5


class Watcher:
    """Looks again at each `look`, and reads only what is new."""

    def __init__(self, storage: Storage, naming: NamingScheme) -> None:
        self._storage, self._naming = storage, naming
        self._tails: dict[int, tuple[Tail, Standing]] = {}
        self._newest: tuple[str, dict[str, Any]] | None = None

    def look(self) -> dict[str, Any]:
        """How the job stands now. Raises OSError where the root cannot be listed."""
        names = self._storage.listdir("")
        self._follow()
        now = time.time()
        standings = [standing for _, (_, standing) in sorted(self._tails.items())]
        warnings = sorted((each for standing in standings for each in standing.warnings), key=lambda each: each["time"])
        metrics = last_record(self._storage, layout.METRICS)
        return {
            "root": self._storage.root,
            "time": now,
            "lease": self._lease(now),
            "ranks": [standing.document(now) for standing in standings],
            "last_commit": self._last_commit(standings, now),
            "checkpoints": self._checkpoints(names),
            "metrics": metrics,
            "warnings": [{**each, "age": max(0.0, now - each["time"])} for each in warnings[-_WARNINGS:]],
            "counted_from_the_start": not any(tail.skipped for tail, _ in self._tails.values()),
        }

    def _follow(self) -> None:
        try:
            names = self._storage.listdir(layout.EVENTS)
        except FileNotFoundError:
            return
        ranks = [rank for name in names if (rank := layout.parse_events_file(name)) is not None]
        window = max(_LEAST, min(_WINDOW, _TOGETHER // max(1, len(ranks))))
        for rank in ranks:
            if rank not in self._tails:
                self._tails[rank] = Tail(self._storage, layout.events_file(rank), window), Standing(rank)
            tail, standing = self._tails[rank]
            for record in tail.new_records():
                standing.take(record)

    def _lease(self, now: float) -> dict[str, Any] | None:
        seen = look(self._storage)
        if seen is None:
            return None
        owner = seen.owner
        if owner is None:
            return {"host": None, "pid": None, "run": None, "alive": None, "renewed_age": None}
        return {
            "host": owner.host,
            "pid": owner.pid,
            "run": owner.run,
            "alive": lives(owner, OwnerLock.is_free),  # None: nothing here can tell
            "renewed_age": max(0.0, now - owner.time),
        }

    def _last_commit(self, standings: Iterable[Standing], now: float) -> dict[str, Any] | None:
        commits = [standing.last_commit for standing in standings if standing.last_commit is not None]
        if not commits:
            return None
        newest = max(commits, key=lambda commit: float(commit["time"]))
        return {**newest, "age": max(0.0, now - newest["time"])}

    def _checkpoints(self, names: Iterable[str]) -> dict[str, Any]:
        """How many there are by their names, and the newest one's manifest, read once for each."""
        steps = sorted((step, name) for name in names if (step := self._naming.parse_committed(name)) is not None)
        if self._naming.shared:  # others are called like ours
            steps = [(step, name) for step, name in steps if self._storage.exists(f"{name}/{layout.MANIFEST}")]
        if not steps:
            return {"count": 0, "newest": None}
        step, name = steps[-1]
        if self._newest is None or self._newest[0] != name:
            try:
                manifest = catalog.read_manifest(self._storage, name)
            except (EasyckptError, OSError) as error:  # rotated away, or damaged: `verify` says more
                return {"count": len(steps), "newest": {"step": step, "problem": str(error)}}
            total = sum(file.size for file in manifest.files.values())
            self._newest = name, {"step": step, "created": manifest.created, "bytes": total}
        return {"count": len(steps), "newest": self._newest[1]}
