"""Signals that have come to this rank, each until the emergency that answers it is over."""

from __future__ import annotations

import threading
from collections import deque

from easyckpt.saving.messages import Board


class Alarms:
    """Belongs to the coordinator's thread, but for `ring`. Emergencies are numbered; rank 0 has one at a time.

    A signal asks for the emergency after the one that is known here: what that one flushes was chosen before. So ranks
    that are signalled together ask for the same one.
    """

    def __init__(self) -> None:
        self.asked = 0
        """The newest emergency that a signal here asks for; 0: none."""
        self._new: deque[threading.Event] = deque()
        self._waiting: list[tuple[int, threading.Event]] = []
        self._ended = False

    def ring(self) -> threading.Event:
        """A signal has come; the Event is set once its emergency is over. From any thread; takes no lock."""
        over = threading.Event()
        self._new.append(over)
        if self._ended:
            over.set()
        return over

    @property
    def waiting(self) -> bool:
        """Whether a signal has no answer yet."""
        return bool(self._new or self._waiting)

    def ask(self, board: Board) -> int:
        """The emergency to ask for, given what rank 0 says."""
        while self._new:
            self.asked = board.emergency + 1
            self._waiting.append((self.asked, self._new.popleft()))
        return self.asked

    def hear(self, board: Board) -> None:
        """Answer those whose emergency is over."""
        newest_over = board.emergency if board.emergency_over else board.emergency - 1
        for _, over in [alarm for alarm in self._waiting if alarm[0] <= newest_over]:
            over.set()
        self._waiting = [alarm for alarm in self._waiting if alarm[0] > newest_over]

    def give_up(self) -> None:
        """Nobody waits any longer."""
        while self._new:
            self._new.popleft().set()
        for _, over in self._waiting:
            over.set()
        self._waiting = []

    def end(self) -> None:
        """From now on signals have nothing to wait for."""
        self._ended = True
        self.give_up()
