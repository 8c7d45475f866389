"""A slow background thread for what no one waits for: event logs, metrics, the lease, files that somebody removes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from easyckpt.errors import EasyckptError, LeaseLost
from easyckpt.events import EventLog
from easyckpt.saving.metrics import Metrics
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
        on_lease_lost: Callable[[EasyckptError], None],
        look_after_memory: Callable[[], None],
    ) -> None:
        self._events, self._metrics, self._storage = events, metrics, storage
        self._lease, self._lease_interval, self._on_lease_lost = lease, lease_interval, on_lease_lost
        self._look_after_memory = look_after_memory
        self._renewed = self._looked = time.monotonic()
        self._stopping = threading.Event()
        self._hurry, self._written = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="easyckpt-housekeeper", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None) -> bool:
        """Write out what is left and end; False when storage does not let it within `timeout` seconds."""
        self._stopping.set()
        self._hurry.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def write_now(self, timeout: float) -> bool:
        """Have everything written that was said so far; False when storage does not let it within `timeout` seconds."""
        self._written.clear()
        self._hurry.set()
        return self._written.wait(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            asked = self._hurry.wait(PERIOD_SECONDS)
            self._hurry.clear()
            self._once()
            if asked:
                self._written.set()
        self._once()

    def _once(self) -> None:
        self._events.drain()
        if self._metrics is not None:
            try:
                self._metrics.write(self._storage)
            except (EasyckptError, OSError) as error:
                logger.warning("writing metrics failed: %s", error)
        if time.monotonic() - self._looked >= MEMORY_PERIOD_SECONDS:
            self._looked = time.monotonic()
            try:
                self._look_after_memory()
            except (EasyckptError, OSError) as error:
                logger.warning("looking after the memory tier failed, will try again: %s", error)
        if self._lease is not None and time.monotonic() - self._renewed >= self._lease_interval:
            self._renewed = time.monotonic()
            self._renew(self._lease)

    def _renew(self, lease: Lease) -> None:
        try:
            lease.renew()
        except LeaseLost as error:
            self._lease = None
            self._on_lease_lost(error)
        except (EasyckptError, OSError) as error:
            logger.warning("renewing the lease failed, will try again: %s", error)
