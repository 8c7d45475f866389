"""A Checkpointer for integrations, whose framework decides when a checkpoint is due and what training goes on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

from easyckpt import catalog, ending
from easyckpt.distributed.agree import done_by_rank_0
from easyckpt.distributed.mailbox import Json
from easyckpt.engine import Checkpointer
from easyckpt.errors import UsageError
from easyckpt.format.manifest import Timeline
from easyckpt.loading.elsewhere import restore_elsewhere
from easyckpt.loading.loader import Restored
from easyckpt.saving.line import Origin
from easyckpt.saving.policy import Policy
from easyckpt.saving.reentry import guarded
from easyckpt.state.rng import RngComponent


class FrameworkCheckpointer(Checkpointer):
    """Made by a Prospect. What it has beside a Checkpointer's methods belongs to the training thread as they do."""

    @property
    def policy(self) -> Policy:
        """Which checkpoints stay; may be replaced between two saves."""
        return self._parts.flusher.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._parts.flusher.policy = policy

    @property
    def untold(self) -> frozenset[int]:
        """Steps that somebody is still to be told of: whatever the policy says, they stay until then."""
        return self._parts.flusher.untold

    @untold.setter
    def untold(self, steps: frozenset[int]) -> None:
        self._parts.flusher.untold = steps

    @guarded
    def rotate(self) -> None:
        """Let go now of what the policy does not keep, once it may: else that goes with the next commit."""
        if self._ranks.rank == 0 and not self._inert():
            self._parts.flusher.retain(()).result()

    @guarded
    def flush(self, step: int, *, skip: bool = False) -> Future[int]:
        """As `save_if_needed`, and flush the snapshot whatever the interval says.

        The Future resolves to the step once it is durable on all ranks. Flushes queue up behind one that still runs;
        training waits where they hold all slots. With `skip` it never waits, and the Future holds SaveFailed then.
        """
        if self._inert():
            raise UsageError("a forked child cannot save: only the process that made the Checkpointer can")
        future = self._came_to(step, flush="skip" if skip else "wait")
        assert future is not None
        return future

    @guarded
    def take(self, step: int) -> None:
        """As `save_if_needed`, and take the snapshot whatever the interval says; training waits for a slot."""
        if not self._inert():
            self._came_to(step, flush="hold")

    @guarded
    def flush_taken(self, step: int) -> Future[int] | None:
        """Flush the snapshot that was taken when `step` ended, whatever the state has become since.

        All ranks call it. None where some rank has none.
        """
        return self._saver.flush_taken(self._check_step(step))

    @guarded
    def meet(self, what: str, timeout: float, work: Callable[[], Json] | None = None) -> list[Json]:
        """All ranks call it with the same `what`; returns what the `work` of each does, by rank.

        Where the work of one fails, the others get PeerFailed. PeerTimeout: some did not come, within `peer_timeout`
        at least.
        """
        self._check_open()
        try:
            done = None if work is None else work()
        except BaseException as error:
            self.give_up(f"{type(error).__name__}: {error}")
            raise
        return self._channel.exchange(what, done, max(timeout, self._config.peer_timeout))

    def give_up(self, reason: str) -> None:
        """What all ranks were to do together has failed here: those that wait for this one get PeerFailed at once."""
        if not self._inert():
            self._channel.fail(reason)

    @guarded
    def committed_before(self) -> list[int]:
        """Steps of the whole checkpoints in the past of what was restored. All ranks call it, and get the same."""
        origin = self._saver.origin

        def look() -> Json:
            record = catalog.read_root(self._opened.storage)
            if record is None or origin is None or origin.timeline is None:
                return []
            here = Timeline(id="here", parent=origin.timeline, fork_step=origin.step, explicit=False, opened=0.0)
            line = dataclasses.replace(record, timelines=(*record.timelines, here))
            found = catalog.scan(self._opened.storage, self._opened.dialect.naming).of_kind("committed")
            whole = [entry for entry in found if entry.valid and entry.manifest is not None]
            return [e.step for e in whole if e.manifest and line.is_past(e.manifest.run, e.manifest.timeline, e.step)]

        made = done_by_rank_0(self._channel, self._ranks, "checkpoints made before", look, self._config.peer_timeout)
        return [int(step) for step in made]

    @guarded
    def begin_again(self, step: int) -> None:
        """The next save is of `step` once more, and takes the place of what was saved of it.

        Waits for flushes that are on their way. Until the new checkpoint is committed, the one before stays. All ranks
        call it.
        """
        self._check_open()
        self._saver.begin_again(step)

    @guarded
    def load_found(self, found: Restored, *, explicit: bool) -> Restored:
        """Restore what a Prospect has found before. `explicit`: the user has named that very step."""
        return self._load(step=found.step, timeline=found.timeline, strict=True, components=None, explicit=explicit)

    @guarded
    def load_elsewhere(self, path: str) -> Restored:
        """Restore from the one checkpoint in the directory `path`, of any root: a new line begins at its step here.

        Where it is of this root's run, that line goes on from its own, which need not be the newest.
        """
        self._check_open()
        restored = restore_elsewhere(
            path,
            self._parts.capture.components,
            None,
            channel=self._channel,
            ranks=self._ranks,
            open_checkpoint=self._opened.dialect.open,
            timeout=self._config.peer_timeout,
        )
        line = self._known_line(restored.timeline)
        self._begin_at(Origin(restored.step, line, explicit=True, outside=line is None))
        self._generators = RngComponent().value()
        return restored

    @guarded
    def begin_at(self, step: int, *, outside: bool = False) -> None:
        """Your objects are at `step` by other means than `load` (0: from nothing): the next save opens a line.

        `outside`: by something that is not in this root, so what is here stays where it is.
        """
        self._begin_at(Origin(step, None, explicit=True, outside=outside))

    def _known_line(self, timeline: str | None) -> str | None:
        """`timeline`, if the root has such a line."""

        def look() -> list[str]:
            record = catalog.read_root(self._opened.storage)
            return [] if record is None else [line.id for line in record.timelines]

        known = done_by_rank_0(self._channel, self._ranks, "the root's lines", look, self._config.peer_timeout)
        return timeline if timeline in known else None

    def _begin_at(self, origin: Origin) -> None:
        self._check_open()
        self._saver.go_on_from(origin, adopted=None, committed=-1)
        self._step = origin.step if origin.step else -1

    @guarded
    def leave(self, *, keep_memory: bool = False) -> None:
        """End where the newest snapshot is not wanted on storage: flushes that were asked for are waited for."""
        if not (self._inert() or self._farewell.begun):
            try:
                self._saver.wait(self._config.close_timeout)
            finally:
                self._farewell.leave(keep_arena=keep_memory)
                ending.forget(self)
