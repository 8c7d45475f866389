"""Waiting and waking through C alone.

threading's Event and Condition are Python: Ctrl-C on the training thread, at the wrong line inside of them, leaves
their lock locked, and whoever waits next waits for ever.
"""

from __future__ import annotations

import queue
import time


class Bell:
    """Wakes one thread that looks for work from time to time."""

    def __init__(self) -> None:
        self._rung: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Have the thread look at once. From any thread."""
        if self._rung.empty():
            self._rung.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for a ring, which is answered by that; False when none has come."""
        try:
            self._rung.get(timeout=seconds)
        except queue.Empty:
            return False
        return True


class Latch:
    """Something that happens once."""

    def __init__(self) -> None:
        self._happened = False
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """It has happened. From any thread."""
        if not self._happened:
            self._happened = True
            self._told.put(None)

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._happened

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has happened; False when it has not within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            try:
                self._told.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return self._happened
            self._told.put(None)  # for whoever else waits
        return True
