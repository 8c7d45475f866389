"""A slow background thread for what no one waits for: event logs, metrics, the lease, files that somebody removes."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable

from easyckpt.errors import LeaseLost
from easyckpt.events import EventLog
from easyckpt.saving.metrics import Metrics
from easyckpt.saving.waking import Bell, Latch
from easyckpt.saving.worker import give_way
from easyckpt.storage.base import Storage
from easyckpt.storage.lease import Lease

logger = logging.getLogger("easyckpt")

PERIOD_SECONDS = 0.2
MEMORY_PERIOD_SECONDS = 5.0


class Housekeeper:
    """Runs until `stop`. It has a thread of its own so that a storage that hangs holds up neither saves nor ranks."""

    def __init__(
        self,
        events: EventLog,
        metrics: Metrics | None,
        storage: Storage,
        *,
        lease: Lease | None,
        lease_interval: float,
        on_lease_lost: Callable[[LeaseLost], None],
        look_after_memory: Callable[[], None],
    ) -> None:
        self._events, self._metrics, self._storage = events, metrics, storage
        self._lease, self._lease_interval, self._on_lease_lost = lease, lease_interval, on_lease_lost
        self._look_after_memory = look_after_memory
        self._renewed = self._looked = time.monotonic()
        self._failing: set[str] = set()
        self._stopping = False
        self._last: Callable[[], None] | None = None
        self._bell, self._written, self._ended = Bell(), Latch(), Latch()
        threading.Thread(target=self._run, name="easyckpt-housekeeper", daemon=True).start()

    def ask_to_stop(self, last: Callable[[], None] | None = None) -> None:
        """Have it write out what is left, do `last` and end."""
        self._last = last
        self._stopping = True
        self._bell.ring()

    def stop(self, timeout: float | None, last: Callable[[], None] | None = None) -> bool:
        """`ask_to_stop`, and wait; False when storage does not let it end within `timeout` seconds."""
        self.ask_to_stop(last)
        return self._ended.wait(timeout)

    def write_now(self, timeout: float) -> bool:
        """Have everything written that was said so far; False when storage does not let it within `timeout` seconds."""
        self._written = written = Latch()
        self._bell.ring()
        return written.wait(timeout)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def _work(self) -> None:
        give_way()
        while not self._stopping:
            self._bell.wait(PERIOD_SECONDS)
            written = self._written
            self._once()
            written.set()
        self._once()
        if self._metrics is not None and self._metrics.unwritten:
            logger.warning("%d lines of metrics could not be written and are lost", self._metrics.unwritten)
        if self._last is not None:
            self._last()

    def _once(self) -> None:
        # First, since what is written goes into the root.
        if self._lease is not None and (not self._lease.held or self._since_renewal() >= self._lease_interval):
            self._renewed = time.monotonic()
            self._do("renewing the lease", functools.partial(self._renew, self._lease))
        self._do("writing events", self._events.drain)
        if self._metrics is not None and self._lease is not None:
            self._do("writing metrics", functools.partial(self._metrics.write, self._storage))
        if time.monotonic() - self._looked >= MEMORY_PERIOD_SECONDS:
            self._looked = time.monotonic()
            self._do("looking after the memory tier", self._look_after_memory)

    def _since_renewal(self) -> float:
        return time.monotonic() - self._renewed

    def _do(self, what: str, duty: Callable[[], object]) -> None:
        """Whatever one duty meets, the others go on: the lease is lost without them. Said once, until it has passed."""
        try:
            duty()
        except Exception as error:  # noqa: BLE001 - see above
            if what not in self._failing:
                self._failing.add(what)
                logger.warning("%s failed, will try again: %s", what, error if str(error) else repr(error))
        else:
            self._failing.discard(what)

    def _renew(self, lease: Lease) -> None:
        try:
            lease.renew()
        except LeaseLost as error:
            self._lease = None
            self._on_lease_lost(error)
