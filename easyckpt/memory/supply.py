"""Makes, grows and removes an arena's slots in a background thread, within what memory allows."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

from easyckpt import failpoints
from easyckpt.errors import EasyckptError, OutOfSpace, StorageError
from easyckpt.memory import budget
from easyckpt.memory.header import HEADER_BYTES
from easyckpt.memory.mapping import PAGE, round_up
from easyckpt.memory.private_slot import PrivateSlot
from easyckpt.memory.slot import Slot

_REPLACED = failpoints.declare("supply.removed", "a slot that was too small is removed; the larger one is not made")
_PREPARED = failpoints.declare("supply.prepared", "a slot is made and populated, but not yet in use")

_log = logging.getLogger("easyckpt")

_LOST = {
    3: "while a flush holds one, only one whole snapshot stays beside the one that is written",
    2: "while a flush holds one, no new snapshots are taken",
    1: "a kill while a snapshot is written leaves none in memory, and none is taken during a flush",
}
#: Room to grow, as parts of an image: the first with which as many slots fit, the last at the cost of slots.
_HEADROOM = (2, 8, 32)


class Supply:
    """The slots, and the thread that works on them. `lock` guards everything; the thread never holds it for long.

    `name` gives the path of the n-th slot; `idle` tells (with `lock` held) whether nobody needs a slot or its content.
    It is taken by itself, not through `state`, the condition that waits for a change: Ctrl-C inside the latter's
    `__enter__` would leave it locked.
    """

    def __init__(
        self,
        directory: str,
        name: Callable[[int], str],
        idle: Callable[[Slot], bool],
        *,
        wanted: int,
        budget_bytes: int,
        private_budget_bytes: int | None,
        pin: bool,
        threads: int | None,
    ) -> None:
        """Nothing happens before `ensure`."""
        self.lock = threading.RLock()
        self.state = threading.Condition(self.lock)
        self.slots: dict[str, Slot] = {}
        self.need = (0, 0)  # bytes of image and tail that a slot must have
        self._growths = 0
        self.wanted = self.target = wanted
        self.private = False
        self._directory, self._name, self._idle = directory, name, idle
        self._budget, self._private_budget = budget_bytes, private_budget_bytes
        self._pin = pin
        self._threads = threads or max(1, min(4, (os.cpu_count() or 1) // 4))
        self._reserved: set[str] = set()  # names that somebody else's file has
        self._unprepared: list[Slot] = []  # taken over: usable at once, but not populated and pinned
        self._worker: threading.Thread | None = None
        self._again = False
        self._stopping = False
        self._failure: BaseException | None = None

    def add(self, slots: Iterable[Slot], reserved: Iterable[str]) -> None:
        """Bring in slots that were taken over, and paths not to touch."""
        with self.lock:
            for slot in slots:
                self.slots[slot.path] = slot
                self._unprepared.append(slot)
            self._reserved.update(reserved)

    def ensure(self, image_bytes: int, tail_bytes: int) -> None:
        """Have slots of this size made, or of the larger one that was asked for before; returns at once.

        The size never goes down: slots of several sizes would be made, of which the small ones pass for good.
        """
        with self.lock:
            before = self.need[0]
            image, tail = max(PAGE, round_up(image_bytes)), max(PAGE, round_up(tail_bytes), self.need[1])
            if image > before:
                self.need = (image, tail)
                self._growths += before > 0
                if self._growths > 1:
                    self.need = (self._roomy(image_bytes), tail)
                self._set_target()
            self.start()

    def start(self) -> None:
        """Look again at what is to be done. With `lock` held."""
        self._again = True
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="easyckpt-arena", daemon=True)
            try:
                self._worker.start()
            except BaseException:
                if self._worker.ident is None:  # no thread could be started: nobody is to wait for it
                    self._worker = None
                raise

    def wait(self, timeout: float | None) -> bool:
        """Wait until nothing is left to do."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            while self._worker is not None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self.state.wait(left)
        return True

    def stop(self) -> None:
        """End the background work; bounded by one piece of it. What it met and nobody was told of is logged."""
        self._stopping = True
        self.wait(None)
        if self._failure is not None:
            _log.warning("preparing snapshot slots failed: %s", self._failure)

    def raise_failure(self) -> None:
        """Raise what the background work met and could not handle, once; the work is begun anew."""
        failure, self._failure = self._failure, None
        if failure is not None:
            with self.lock:
                self.start()  # else whoever waits for a slot next would wait for nobody
            raise StorageError(f"preparing snapshot slots failed: {failure}") from failure

    def go_private(self, reason: str) -> None:
        """Shared memory cannot be used: private memory from here on, and where that is too small, nothing."""
        self.private = True
        _log.warning(
            "snapshots are kept in private memory: they do not survive the death of this process, and a restart goes "
            "on from storage (%s)",
            reason,
        )
        if self.need[0]:
            self._set_target()

    def _set_target(self) -> None:
        before = self.target
        self.target = self._fitting(self._private_limit() if self.private else self._budget)
        if self.target == 0 and not self.private:
            self.go_private(f"{self._budget} bytes may be used in {self._directory}, one snapshot takes {self._slot()}")
        elif self.target == 0:
            self._give_up("it does not fit private memory either")
        elif self.target < self.wanted and self.target != before:
            self._warn_fewer(f"one takes {self._slot()} bytes")

    def _roomy(self, image_bytes: int) -> int:
        """Bytes for an image that has grown again: one that grows at each step would never find a slot ready."""
        limit = self._private_limit() if self.private else self._budget
        exact, tail = self.need
        fitting = self._fitting(limit)
        for part in _HEADROOM:
            self.need = (round_up(image_bytes + image_bytes // part), tail)
            if self._fitting(limit) == fitting or (part == _HEADROOM[-1] and self._fitting(limit) > 1):
                return self.need[0]
        return exact

    def _warn_fewer(self, reason: str) -> None:
        lost = _LOST.get(self.target, "snapshots are skipped more often")
        _log.warning("%d snapshot slots instead of %d: %s (%s)", self.target, self.wanted, lost, reason)

    def _give_up(self, reason: str) -> None:
        self.target = 0
        _log.warning("no snapshot is kept in memory: every save blocks until it is on storage (%s)", reason)

    def _slot(self) -> int:
        return HEADER_BYTES + sum(self.need)

    def _fitting(self, limit: int) -> int:
        return max(0, min(self.wanted, limit // self._slot()))

    def _private_limit(self) -> int:
        if self._private_budget is not None:
            return self._private_budget
        held = sum(slot.nbytes for slot in self.slots.values() if slot.private)
        return held + budget.available(self._directory).private_usable

    # In the background.

    def _work(self) -> None:
        try:
            while self._has_work():
                self._prepare()
        except BaseException as error:  # noqa: BLE001  (raised by the next call)
            self._failure = error
            with self.lock:
                self._worker = None
                self.state.notify_all()

    def _has_work(self) -> bool:
        with self.lock:
            again, self._again = self._again and not self._stopping, False
            if not again:
                self._worker = None
                self.state.notify_all()
            return again

    def _prepare(self) -> None:
        """Remove what is too small, too much or without a name, make what is missing, prepare what was taken over."""
        self._discard_unfit()
        while self._may_make():
            if not self._make():
                break
        while self._unprepared and not self._stopping:
            slot = self._unprepared.pop()
            if slot in self.slots.values():
                slot.populate(self._threads, self._stops)
                self._pin_slot(slot)

    def _discard_unfit(self) -> None:
        with self.lock:
            idle = [slot for slot in self.slots.values() if self._idle(slot)]
            unfit = [slot for slot in idle if slot.image_capacity < self.need[0] or slot.lost]
            surplus = max(0, len(self.slots) - len(unfit) - self.target)
            unfit += [slot for slot in idle if slot not in unfit][:surplus]
            for slot in unfit:
                del self.slots[slot.path]
        for slot in unfit:
            slot.close(unlink=True)
            failpoints.hit(_REPLACED)

    def _may_make(self) -> bool:
        with self.lock:
            if self._stopping or not self.need[0] or len(self.slots) >= self.target:
                return False
            taken = sum(slot.nbytes for slot in self.slots.values() if not slot.private)
            # Otherwise wait until an older, smaller slot is not needed any more.
            return self.private or taken + self._slot() <= self._budget

    def _make(self) -> bool:
        """Make one slot; False when there is no room for it now."""
        path = self._free_path()
        try:
            slot = (PrivateSlot if self.private else Slot).create(path, *self.need)
        except FileExistsError:
            self._reserved.add(path)
            return True
        except OutOfSpace as error:
            return self._make_do(str(error))
        try:
            slot.populate(self._threads, self._stops)
            self._pin_slot(slot)
            failpoints.hit(_PREPARED)
        except OutOfSpace as error:
            slot.close(unlink=True)
            return self._make_do(str(error))
        except BaseException:
            slot.close(unlink=True)
            raise
        with self.lock:
            self.slots[path] = slot
            self.state.notify_all()
        return True

    def _stops(self) -> bool:
        return self._stopping

    def _free_path(self) -> str:
        number = 0
        while (path := self._name(number)) in self.slots or path in self._reserved:
            number += 1
        return path

    def _pin_slot(self, slot: Slot) -> None:
        if self._pin:
            try:
                slot.pin()
            except EasyckptError as error:
                self._pin = False
                _log.warning("snapshots go to memory that is not pinned: %s", error)

    def _make_do(self, reason: str) -> bool:
        """One more slot does not fit. Returns whether to try again at once."""
        with self.lock:
            fitting = [slot for slot in self.slots.values() if slot.image_capacity >= self.need[0]]
            too_small = len(self.slots) - len(fitting)
            if fitting and not too_small:
                self.target = len(fitting)
                self._warn_fewer(reason)
                return False
            if fitting or too_small > 1:
                return False  # a smaller one is given up soon, and its room tried then
            if self.private:
                self._give_up(reason)
                return False
            self.go_private(reason)
            return True
