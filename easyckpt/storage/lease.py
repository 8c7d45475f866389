"""Who may write a root.

The lease is a file whose owner renews a counter in it. What counts for others is whether that counter moves while they
watch, by their own clock: clocks of different hosts are never compared.

Succession is decided by exclusive creation, not by overwriting: whoever wants to take over from the owner of token T
creates T's *successor file*, which can happen once. The owner of a root is the end of that chain, so two contenders
that both hold T for dead cannot both take over, and an owner that wakes up late finds its successor and stops. A
contender that dies in between is itself succeeded by the same rule.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from easyckpt import failpoints
from easyckpt.errors import LeaseLost, RootInUse
from easyckpt.format import layout
from easyckpt.format.manifest import LeaseRecord
from easyckpt.storage import process
from easyckpt.storage.base import Storage
from easyckpt.storage.lease_chain import (
    Seen,
    claim,
    describe,
    lived_here,
    lives,
    look,
    place_of,
    remove_leftovers,
    successor_file,
    why_unknown,
)

CREATED = failpoints.declare("lease.acquire.created", "the lease on a free root is durable")
CLAIMED = failpoints.declare(
    "lease.takeover.claimed", "a dead owner's successor is named, the lease is still the old one"
)
TAKEN = failpoints.declare("lease.takeover.taken", "the lease names the new owner, the successor file is still there")
RENEWED = failpoints.declare("lease.renew.after", "the lease was renewed")
RELEASING = failpoints.declare("lease.release.before", "the lease is about to be removed")

#: Seconds between two looks at a lease that somebody else holds, and between two messages about it.
POLL_SECONDS = 1.0
MESSAGE_SECONDS = 10.0
_MAX_ROUNDS = 1000

#: Leases that live in this process, by token. A record lock cannot tell two owners in one process apart.
_living: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()


class Clock(Protocol):
    """The part of the module ``time`` that a lease needs."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def time(self) -> float:
        """Seconds since 1970, shown to people and never compared."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


class Lease:
    """The right of a job to write the root of `storage`; only rank 0 has one.

    Args:
        root_lock_path: the record lock file that this process holds for its life (None: it has none), looked at in
            ``acquire``. Found free, it proves to a later job on the same host that this one is dead; if it turns out
            not to be held, nothing is ever proven by it.
        incarnation: nonce of this start of the job.
        run: identity of the run, from the root's record.
        timeout: seconds without a renewal after which an owner counts as dead.
        is_free: tells of a record lock file whether no live process holds it; None when that cannot be known.
        environ: where TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT are looked up.

    Calls may come from several threads.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        root_lock_path: str | None,
        incarnation: str,
        run: str,
        timeout: float,
        clock: Clock = time,
        is_free: Callable[[str], bool | None] | None = None,
        environ: os._Environ[str] | dict[str, str] = os.environ,
    ) -> None:
        self._storage = storage
        self._timeout = timeout
        self._clock = clock
        self._is_free = is_free or (lambda path: None)
        self._guard = threading.RLock()
        self._held = False
        self._loss = ""
        elastic_run = environ.get("TORCHELASTIC_RUN_ID", "none")
        restart_count = environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self._record = LeaseRecord(
            host=socket.gethostname(),
            boot="",
            pid=os.getpid(),
            run=run,
            incarnation=incarnation,
            token=secrets.token_hex(16),
            process=process.identity(),
            lock=root_lock_path or "",
            elastic_run=None if elastic_run in ("", "none") else elastic_run,
            restart_count=int(restart_count) if restart_count.isdecimal() else 0,
            time=clock.time(),
        )

    def acquire(self, on_wait: Callable[[str], None] | None = None) -> None:
        """Become the owner: at once where nobody is, or where the owner is proven dead, else after the timeout.

        `on_wait` hears what is waited for. Raises RootInUse, which names the owner, as soon as a sign of life is seen.
        """
        self._record = replace(self._record, boot=self._held_place())
        try:
            for _ in range(_MAX_ROUNDS):
                if self._held:
                    remove_leftovers(self._storage, self._record.token)
                    return
                self._try_acquire(on_wait or (lambda message: None))
        finally:
            if not self._held:
                self._end()
        raise RootInUse(f"{self._storage.root}: other jobs keep creating and removing its lease; try again")

    @property
    def held(self) -> bool:
        """Whether this job owns the root, as far as it knows."""
        return self._held

    def renew(self) -> None:
        """Show that this job lives. To be called well within the timeout. Raises LeaseLost."""
        with self._guard:
            self.check()
            self._record = replace(self._record, renewed=self._record.renewed + 1, time=self._clock.time())
            self._storage.replace(layout.LEASE, self._record.to_bytes())
            failpoints.hit(RENEWED)

    def check(self) -> None:
        """Look at the storage whether the root is still this job's. Raises LeaseLost, then and ever after."""
        with self._guard:
            if not self._held:
                raise LeaseLost(self._loss or f"this job does not own {self._storage.root}: its lease is not taken")
            seen = self._look()
            if seen is not None and seen.tokens == [self._record.token]:
                return
            self._end()
            self._loss = self._why_lost(seen)
            raise LeaseLost(self._loss)

    def release(self) -> None:
        """Give the root back. Does nothing if it is not this job's (any more)."""
        with self._guard:
            if not self._held:
                return
            try:
                with contextlib.suppress(LeaseLost, FileNotFoundError):
                    self.check()
                    failpoints.hit(RELEASING)
                    self._storage.remove(layout.LEASE)
                    self._storage.sync_dir("")
            finally:
                self._end()  # also where storage refuses: this object renews no more

    # -- inside

    def _try_acquire(self, on_wait: Callable[[str], None]) -> None:
        seen = self._look()
        if seen is not None:
            if self._proven_dead(seen.owner) or self._silent(seen, on_wait):
                self._take_over(seen)
        elif claim(self._storage, layout.LEASE, self._fresh().to_bytes()):
            failpoints.hit(CREATED)
            self._held = True

    def _why_lost(self, seen: Seen | None) -> str:
        root = self._storage.root
        if seen is not None:
            return (
                f"{root} was taken over by another job while this one did not renew its lease; it now "
                f"belongs to {describe(seen.owner)}. This job writes nothing there any more: stop it, or restart it "
                "after the other."
            )
        what = "has lost its lease: somebody removed it"
        if not self._storage.exists(layout.ROOT_FILE):
            what = "is not what it was: it was removed, renamed or unmounted"
        return f"{root} {what}. This job writes nothing there any more; what is in memory stays for a restart."

    def _end(self) -> None:
        self._held = False
        _living.pop(self._record.token, None)

    def _held_place(self) -> str:
        """Where the own record lock is; '' where it is not held: an old, free file may lie there."""
        lock = self._record.lock
        return (lock and self._is_free(lock) is False and place_of(lock)) or ""

    def _fresh(self) -> LeaseRecord:
        """A record under a new token: each token is an owner once, so that it has one successor at most."""
        _living.pop(self._record.token, None)
        self._record = replace(self._record, token=secrets.token_hex(16), renewed=0, time=self._clock.time())
        _living[self._record.token] = self  # before anybody can see it
        return self._record

    def _look(self) -> Seen | None:
        return look(self._storage)

    def _proven_dead(self, owner: LeaseRecord | None) -> bool:
        """Whether it is certain, without waiting, that `owner` writes no more."""
        if owner is None or owner.token in _living:
            return False
        mine = self._record
        same_run = mine.elastic_run is not None and owner.elastic_run == mine.elastic_run
        if same_run and owner.restart_count < mine.restart_count:
            return True  # the agent has killed all workers of one round before it starts the next
        # The own lock is held by this very process, so whoever held it before has died.
        before_me = owner.boot == mine.boot and lived_here(owner)
        return before_me or lives(owner, self._is_free) is False

    def _silent(self, seen: Seen, on_wait: Callable[[str], None]) -> bool:
        """Watch for up to the timeout; False where the root is to be looked at afresh, RootInUse where it lives."""
        owner = seen.owner
        if owner is not None and owner.token in _living:
            raise self._in_use(owner, "by another Checkpointer of this process")
        begun = self._clock.monotonic()
        said = begun - MESSAGE_SECONDS
        while (waited := self._clock.monotonic() - begun) < self._timeout:
            if self._clock.monotonic() - said >= MESSAGE_SECONDS:
                said = self._clock.monotonic()
                on_wait(
                    f"waiting for {self._storage.root}: it belongs to {describe(owner)}, which has not renewed its "
                    f"lease for {waited:.0f} s; {why_unknown(owner)}: after {self._timeout:.0f} s without a renewal it "
                    "counts as dead"
                )
            self._clock.sleep(min(POLL_SECONDS, self._timeout - waited))
            now = self._look()
            if now is None:
                return False
            if now != seen:
                raise self._in_use(now.owner, "which renewed its lease while this job watched")
            if self._proven_dead(owner):  # it may die while we wait
                return True
        return True

    def _in_use(self, owner: LeaseRecord | None, sign: str) -> RootInUse:
        return RootInUse(
            f"{self._storage.root} is in use by {describe(owner)}, {sign}. Stop that job first, or give this one "
            "another root; reading (restore, the command line) needs no lease."
        )

    def _take_over(self, seen: Seen) -> None:
        """Succeed the owner that was seen, unless somebody is quicker or it proves alive at the last moment."""
        record = self._fresh().to_bytes()
        successor = successor_file(seen.tokens[-1])
        if not claim(self._storage, successor, record):
            return
        failpoints.hit(CLAIMED)
        if self._look() != Seen((*seen.chain, record)):
            with contextlib.suppress(FileNotFoundError):
                self._storage.remove(successor)
            return
        self._storage.replace(layout.LEASE, record)
        failpoints.hit(TAKEN)
        self._held = True
