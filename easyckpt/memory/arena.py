"""The arena: all slots of one rank, and which of them may be written next.

Slots are made and grown by a background thread; until one is ready, snapshots are skipped by the caller and counted.
Shared memory first; private memory where not one slot fits there; no slot at all (`count` is 0, the caller saves
blocking) where that does not fit either.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection

from easyckpt import failpoints
from easyckpt.errors import RootInUse, UsageError
from easyckpt.format import memory_names
from easyckpt.memory.adoption import find_slots, take_over
from easyckpt.memory.owner import OwnerLock
from easyckpt.memory.place import user_name
from easyckpt.memory.slot import Slot, SlotMeta, SlotView
from easyckpt.memory.supply import Supply

__all__ = ["Arena", "OwnerLock", "find_slots"]

_log = logging.getLogger("easyckpt")
_REMOVED = (
    "rank %d: somebody has removed files of this job in %s: the snapshots in them do NOT survive the death of this "
    "process, and a restart would go on from storage. New files are made as far as possible. systemd-logind removes a "
    "user's shared memory when the last session ends: have `loginctl enable-linger %s` run, or RemoveIPC=no set in "
    "logind.conf"
)

_OWNED = failpoints.declare("arena.owned", "the arena is owned; nothing in it was looked at")
_ADOPTED = failpoints.declare("arena.adopted", "the slots of the dead owner are taken over")
_REMOVING = failpoints.declare("arena.removing", "the slots are removed; the owner file is still there")


class Arena:
    """The slots of rank `rank` in the arena `arena_id`; owning it needs its record lock. Thread-safe.

    `budget_bytes` bounds what the slots take in `directory`, adopted ones included; `private_budget_bytes` what they
    take as private memory (default: measured when it comes to that). With `pin`, images are page-locked for the GPU.
    `note` is left for whoever finds the arena after this process has died.
    In a forked child an arena is inert: no slots, nothing to acquire, `close` does nothing.
    """

    def __init__(
        self,
        directory: str,
        user: str,
        arena_id: str,
        rank: int,
        count: int,
        *,
        run: str,
        incarnation: str,
        budget_bytes: int,
        private_budget_bytes: int | None = None,
        pin: bool = False,
        populate_threads: int | None = None,
        note: bytes | None = None,
    ) -> None:
        """Own the arena. Raises RootInUse when another live process, or another arena of this one, does."""
        self.directory, self.user, self.arena_id, self.rank = directory, user, arena_id, rank
        self.run, self.incarnation = run, incarnation
        self._pid = os.getpid()
        self._busy: dict[Slot, int] = {}  # acquired -> its sequence then
        self._closing = False
        self._renews = self._warned = False
        """Slots without a name are replaced; it was said that there are such."""
        self._supply = Supply(
            directory,
            self._slot_path,
            lambda slot: self._is_free(slot, None, ()),
            wanted=count,
            budget_bytes=budget_bytes,
            private_budget_bytes=private_budget_bytes,
            pin=pin,
            threads=populate_threads,
        )
        self._lock = self._supply.lock
        self._owner = OwnerLock(os.path.join(directory, memory_names.owner_file(user, arena_id, rank)), note)
        self._own()
        failpoints.hit(_OWNED)

    @property
    def count(self) -> int:
        """How many slots the arena means to have; 0 when memory does not hold one."""
        return self._supply.target

    @property
    def survives(self) -> bool:
        """Whether snapshots survive the death of this process: False once a slot is private memory."""
        return not self._supply.private and all(slot.survives for slot in self._all())

    def adopt(self) -> list[SlotView]:
        """Take over what dead processes of this arena left; its whole snapshots, by ascending step.

        They are found by what their headers say. Call it once, before `ensure`. A file that cannot be trusted is
        named in a warning and left alone, unless it is certainly this arena's own: then it is used anew or removed.
        """
        if self._inert() or self._supply.private:
            return []
        identity = (self.run, self.arena_id, self.rank)
        found = take_over(self.directory, self.user, identity)
        self._supply.add(found.slots, found.reserved)
        views = [slot.view() for slot in found.slots if slot.meta is not None]
        failpoints.hit(_ADOPTED)
        return sorted(views, key=lambda view: (view.meta.step, view.meta.sealed_at))

    def ensure(self, image_bytes: int, tail_bytes: int) -> None:
        """Have slots for such snapshots made or grown in the background; returns at once."""
        if self._inert():
            return
        self._check_usable()
        self._supply.ensure(image_bytes, tail_bytes)

    def ready(self, image_bytes: int) -> bool:
        """Whether a slot for `image_bytes` exists, free or not, and smaller ones are to be replaced by such."""
        return self._supply.need[0] >= image_bytes and any(slot.image_capacity >= image_bytes for slot in self._all())

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until the background work that `ensure` or `acquire` asked for has ended. Raises what it met."""
        if self._inert():
            return False
        ended = self._supply.wait(timeout)
        self._supply.raise_failure()
        return ended

    def acquire(self, step: int, image_bytes: int, keep_from: int | None, held: Collection[int]) -> Slot | None:
        """A slot to write the snapshot of `step` into, or None: then it is skipped (and counted by the caller).

        It is empty, or holds a step below `keep_from` (None: nothing may be given up) that is not in `held`. Until
        the caller's `begin` it keeps that older snapshot. It is the caller's until it is sealed or released.
        """
        if self._inert():
            return None
        self._check_usable()
        with self._lock:
            free = self._by_preference(keep_from, held)
            lost = [slot for slot in free if slot.lost and self._renews]  # of no use to a restart: replaced
            fitting = [slot for slot in free if slot.image_capacity >= image_bytes and slot not in lost]
            chosen = fitting[0] if fitting else None
            surplus = len(self._supply.slots) - self._supply.target
            for slot in free:
                unfit = slot.image_capacity < self._supply.need[0] or slot in lost
                if slot is not chosen and (unfit or surplus > 0):
                    surplus -= 1
                    self._give_up(slot)
            if chosen is not None:
                self._busy[chosen] = chosen.sequence
            return chosen

    def release(self, slot: Slot) -> None:
        """Give back an acquired slot that was not sealed; a snapshot that was begun in it is given up."""
        if self._inert():
            return
        with self._lock:
            self._busy.pop(slot, None)
            if slot.writing and not self._closing:
                slot.clear()

    def sealed(self) -> list[SlotMeta]:
        """What the sealed slots hold, by ascending step."""
        metas = [slot.meta for slot in self._all()]
        return sorted((meta for meta in metas if meta is not None), key=lambda meta: (meta.step, meta.sealed_at))

    def view(self, step: int, timeline: str) -> SlotView:
        """The sealed snapshot of `step` on `timeline`. Raises UsageError when there is none.

        Keep the step in `held` while its image is in use.
        """
        # The training thread may begin another slot at any moment: each one's `meta` is read once.
        metas = [(slot.meta, slot) for slot in self._all()]
        matching = [
            (meta.sealed_at, slot)
            for meta, slot in metas
            if meta is not None and (meta.step, meta.timeline) == (step, timeline)
        ]
        if not matching:
            raise UsageError(f"no sealed snapshot of step {step} on timeline {timeline} is in memory")
        return max(matching, key=lambda pair: pair[0])[1].view()

    def drop(self, predicate: Callable[[SlotMeta], bool]) -> list[SlotMeta]:
        """Give up every sealed snapshot for which `predicate` holds; returns them. Not while one is written."""
        dropped: list[SlotMeta] = []
        if self._inert():
            return dropped
        with self._lock:  # between the two halves of a clear the supply could take the slot for idle, and close it
            for slot in self._all():
                sequence, meta = slot.sequence, slot.meta
                if meta is not None and predicate(meta):
                    if self._busy.get(slot) != sequence:
                        self._busy.pop(slot, None)  # sealed since it was acquired
                    dropped.append(meta)
                    slot.clear()
        return dropped

    def look_after(self) -> None:
        """Notice that somebody has removed files of this arena, and have new ones made. Costs a look at each file."""
        if self._inert() or self._closing or self._supply.private:
            return
        owned = self._owner.is_in_place()
        lost = [slot for slot in self._all() if not slot.private and not slot.lost and not slot.is_in_place()]
        if owned and not lost:
            return
        for slot in lost:
            slot.lost = True
        # Whoever starts this job a second time must not take slots over that are in use here.
        self._renews = os.path.isdir(self.directory) and (owned or self._owner.take_again())
        if not self._warned:
            self._warned = True
            _log.warning(_REMOVED, self.rank, self.directory, user_name())

    def close(self, remove: bool, *, keep_owner: bool = False) -> None:
        """Stop the background work and let go of the slots; `remove` their files, else they stay for a restart.

        With `keep_owner` other processes see the owner alive until this process ends.
        """
        if self._inert():
            return
        self._closing = True
        self._supply.stop()
        with self._lock:
            slots = list(self._supply.slots.values())
            self._supply.slots.clear()
            self._busy.clear()
        for slot in slots:
            slot.close(unlink=remove)
        if remove:
            failpoints.hit(_REMOVING)
        if not keep_owner:
            self._owner.release(unlink=remove)

    # Ownership.

    def _own(self) -> None:
        if not os.path.isdir(self.directory):
            self._supply.go_private(f"{self.directory} is not a directory")
            return
        try:
            owned = self._owner.try_acquire()
        except OSError as error:
            self._supply.go_private(f"{self._owner.path}: {error.strerror}")
            return
        if not owned:
            raise RootInUse(
                f"the memory of rank {self.rank} of this run belongs to {OwnerLock.describe_holder(self._owner.path)} "
                f"({self._owner.path} is locked): end that first, or choose another root"
            )

    def _inert(self) -> bool:
        return os.getpid() != self._pid

    def _check_usable(self) -> None:
        if self._closing:
            raise UsageError("this arena is closed")
        self._supply.raise_failure()

    def _slot_path(self, number: int) -> str:
        return os.path.join(self.directory, memory_names.slot_file(self.user, self.arena_id, self.rank, number))

    def _all(self) -> list[Slot]:
        if self._inert():  # (in a child, `_lock` may be locked for ever)
            return []
        with self._lock:
            return list(self._supply.slots.values())

    # Choosing a slot. With the lock held.

    def _by_preference(self, keep_from: int | None, held: Collection[int]) -> list[Slot]:
        """The slots that may be written, the best first.

        Two whole snapshots stay beside the one that is written, as long as there is a slot for that. Among the others
        the one written last: its memory is the one that the machine still has at hand, and in a training without
        flushes one slot of the four is then never touched.
        """
        free = [slot for slot in self._supply.slots.values() if self._is_free(slot, keep_from, held)]
        # Whoever has acquired a slot may begin or seal it just now: each is read once.
        metas = {slot: slot.meta for slot in self._supply.slots.values()}
        newest = sorted((meta.step for meta in metas.values() if meta is not None), reverse=True)[:2]

        def rank(slot: Slot) -> tuple[int, int]:
            meta = metas[slot]
            if meta is None:
                return 1, -slot.sequence
            return (2, meta.step) if meta.step in newest else (0, -meta.step)

        return sorted(free, key=rank)

    def _is_free(self, slot: Slot, keep_from: int | None, held: Collection[int]) -> bool:
        # Whoever has acquired it may begin or seal it just now: each is read once, and in this order.
        sequence, meta = slot.sequence, slot.meta
        if sequence % 2:
            return False  # being written
        if slot in self._busy:
            if meta is None or sequence == self._busy[slot]:
                return False
            del self._busy[slot]  # sealed since
        return meta is None or (keep_from is not None and meta.step < keep_from and meta.step not in held)

    def _give_up(self, slot: Slot) -> None:
        """Let the background thread replace or remove a slot that nobody needs."""
        if slot.meta is not None:
            slot.clear()
        self._supply.start()
