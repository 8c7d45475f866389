"""Checkpointer: what users hold in their hands. It wires the rooms and does no I/O itself."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from easyckpt import ending, farewell, wiring
from easyckpt.config import CheckpointConfig
from easyckpt.config_sources import resolve
from easyckpt.dialects import native
from easyckpt.errors import EasyckptError, PartlyApplied, StepError, UsageError
from easyckpt.events import Restored as RestoredEvent
from easyckpt.events import Stats, Warned
from easyckpt.format.layout import MAX_STEP
from easyckpt.ground import Ground
from easyckpt.loading.loader import Outcome, Restored
from easyckpt.saving.line import Origin
from easyckpt.saving.metrics import COMPONENT as METRICS
from easyckpt.saving.metrics import Metrics
from easyckpt.saving.reentry import guarded
from easyckpt.saving.saver import Saver
from easyckpt.settings import Settings, shows_settings
from easyckpt.state.capture import StateCapture
from easyckpt.state.components import check_names
from easyckpt.state.data_position import DataComponent, DataPosition
from easyckpt.state.rng import RNG, RngComponent, put_back

logger = logging.getLogger("easyckpt")

DATA = "easyckpt.data"


class Checkpointer:
    """Snapshots training state into host memory, commits it to storage, and restores it bit for bit.

    Args:
        root: directory of this run's checkpoints; made if it is not there. One job at a time may own it.
        state: name -> nn.Module, optimizer, LR scheduler, GradScaler, generator (of torch, NumPy, or Python), anything
            with ``state_dict`` and ``load_state_dict``, or a plain dict or list (filled in place on load). Global
            generators and the position of `batches` are saved without being asked.
        config: path of a YAML file with settings, or a mapping of them.
        process_group: the ranks that save together; the default group where one is initialised.
        settings: every field of CheckpointConfig, by name; its docstring explains each.

    One thread at a time may call it; `preempted` and `stats()` may be looked at from any.

    A signal handler may look at these two. Whatever else it calls raises UsageError where it interrupts
    another call, or the hook before an optimizer step: set a flag there, and save in the training loop.

    Raises ConfigError for a wrong setting, UnsupportedValue for a state that cannot be kept exactly, RootInUse when
    another job owns the root, UsageError for WORLD_SIZE > 1 without a process group.
    """

    @shows_settings
    def __init__(
        self,
        root: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **settings: Unpack[Settings],
    ) -> None:
        self._build_on(
            Ground(resolve(settings, config), process_group), lambda ground: ground.open(root, native()), state
        )

    def _build_on(self, ground: Ground, open_root: Callable[[Ground], None], state: Mapping[str, Any]) -> None:
        """Stand on `ground`, whose root `open_root` opens; where this fails, all that was taken is let go of."""
        self._pid = os.getpid()
        with ground:
            self._build(ground, open_root, state)
            ground.keep()
        ending.watch(self)

    def _build(self, ground: Ground, open_root: Callable[[Ground], None], state: Mapping[str, Any]) -> None:
        """Join the rooms. A state that cannot be kept is refused before anything on disk is touched.

        What is taken and what is started is entered into the ground's `undo`.
        """
        config = self._config = ground.config
        ranks, self._channel, mailbox, undo = ground.ranks, ground.channel, ground.mailbox, ground.undo
        self._metrics, self._position = Metrics(writes=ranks.rank == 0), DataPosition()
        own = {RNG: RngComponent(), DATA: DataComponent(DATA, self._position), METRICS: self._metrics}
        capture = StateCapture(state, rank=ranks.rank, world_size=ranks.world_size, extra=own)
        first = capture.capture()
        open_root(ground)
        self._opened, self._ranks, self._events = ground.opened, ground.ranks, ground.events
        wiring.reserve(first, capture, self._opened, config)
        self._parts = wiring.join(
            self._opened,
            config=config,
            ranks=self._ranks,
            channel=self._channel,
            mailbox=mailbox,
            capture=capture,
            scalers=[value for value in state.values() if isinstance(value, torch.amp.GradScaler)],
            events=self._events,
            metrics=self._metrics,
            undo=undo,
        )
        self._housekeeper = wiring.keep_house(self._parts, self._opened)
        undo.callback(self._housekeeper.stop, farewell.FAREWELL_SECONDS)
        self._saver, self._loader = Saver(self._parts), wiring.make_loader(self._parts, self._opened)
        self._auditor = wiring.audit(self._parts, self._position)
        self._inside = self._parts.stager.inside
        self._step = -1
        self._generators: Any = None
        self._broken: EasyckptError | None = None
        self._watches_preempted = False
        self._farewell = farewell.Farewell(self._parts, self._saver, self._opened, self._housekeeper)
        self._farewell.signals = wiring.watch_signals(
            self._parts,
            self._housekeeper,
            takes_over=lambda: self._watches_preempted,
            ends=lambda: self._farewell.begun,
        )
        if self._farewell.signals is not None:
            undo.callback(self._farewell.signals.pass_on)
            undo.callback(self._farewell.signals.stop)

    @guarded
    def load(
        self, *, step: int | None = None, strict: bool = True, components: Collection[str] | None = None
    ) -> Restored:
        """Restore the newest state that is whole on all ranks, from memory or from storage.

        Args:
            step: this step and no other; where it cannot be had, DamagedCheckpoint or NoCheckpoint.
            strict: refuse components and names that only the checkpoint or only the live state has.
            components: restore these only.

        Returns what was restored; ``step`` 0 and ``tier`` None where there was nothing. Nothing on disk changes, and
        none of your objects, before all ranks have verified all that they will apply. Raises StateMismatch,
        WorldSizeChanged, DamagedCheckpoint (nothing was applied) or PartlyApplied (build the objects anew).
        """
        return self._load(step=step, strict=strict, components=components, explicit=step is not None)

    def _load(
        self,
        *,
        step: int | None,
        strict: bool,
        components: Collection[str] | None,
        explicit: bool,
        timeline: str | None = None,
    ) -> Restored:
        self._check_open()
        check_names(components)
        begun = time.perf_counter()
        if self._saver.identity is not None:
            self._saver.wait(None)
        try:
            wanted = components if self._auditor is None else self._auditor.wanted(components)
            outcome = self._loader.load(step=step, timeline=timeline, strict=strict, components=wanted)
        except PartlyApplied as error:
            self._broken = error
            raise
        restored = dataclasses.replace(outcome.restored, metrics=dict(self._metrics.latest))
        adopted = (str(restored.timeline), restored.step) if restored.tier == "memory" else None
        self._saver.go_on_from(
            Origin(restored.step, restored.timeline, explicit), adopted=adopted, committed=outcome.newest_committed
        )
        self._step = restored.step if restored.tier is not None else -1
        self._generators = RngComponent().value()
        self._say_restored(outcome, time.perf_counter() - begun)
        if self._auditor is not None:
            self._auditor.loaded(restored.step, restored.tier)
        return restored

    def _say_restored(self, outcome: Outcome, seconds: float) -> None:
        restored = outcome.restored
        self._events.emit(
            RestoredEvent(
                step=restored.step,
                bytes=outcome.nbytes,
                tier=restored.tier or "none",
                path=restored.path,
                timeline=restored.timeline,
                steps_lost=outcome.steps_lost,
                seconds=seconds,
            )
        )
        if restored.tier is None and self._ranks.rank == 0:
            self._events.emit(Warned(message=f"nothing to restore in {self._opened.storage.root}: starting at step 0"))

    @guarded
    def save_if_needed(self, step: int) -> None:
        """Snapshot and flush as the intervals say. `step` is the number of finished steps, the same on all ranks.

        Returns without waiting for any copy to storage. May skip, which is counted. Raises what a background save
        has failed with, at the same step on all ranks.
        """
        if not self._inert():
            self._came_to(step, flush="no")

    def _came_to(self, given: int, *, flush: Literal["no", "hold", "skip", "wait"]) -> Future[int] | None:
        begun, future = time.perf_counter(), None
        step = self._check_step(given)
        due = flush == "skip" or step % self._config.save_storage_interval == 0
        self._saver.came_to(step)
        if flush == "wait":
            future = self._saver.flush(step)
        elif flush == "hold":
            self._saver.snapshot(step, due=False, wait=True)
        elif flush == "skip" or (step != self._step and (due or step % self._config.save_mem_interval == 0)):
            future = self._saver.snapshot(step, due=due)
        self._step = step
        stager = self._parts.stager
        hook, stager.blocked_in_hook = stager.blocked_in_hook, 0.0
        self._events.blocked(time.perf_counter() - begun + hook)
        if self._auditor is not None and self._auditor.after(step):
            self._saver.save(step).result()
            raise SystemExit(0)  # as if the program had ended here; what is in memory stays for the next one
        return future

    @guarded
    def save(self, step: int, *, wait: bool = False) -> Future[int]:
        """Save `step` for certain: waits for a slot, never skips.

        The Future resolves to the step when it is durable on all ranks, or holds SaveFailed, OutcomeUnknown, or what
        has ended all saving (such as LeaseLost); with `wait` that is waited for and raised. A step that is committed
        already resolves at once.
        """
        if self._inert():
            raise UsageError("a forked child cannot save: only the process that made the Checkpointer can")
        step = self._check_step(step)
        future = self._saver.save(step)
        self._step = step
        audited_end = self._auditor is not None and self._auditor.after(step)
        if wait or audited_end:
            future.result()  # the coordinator resolves it in bounded time
        if audited_end:
            raise SystemExit(0)
        return future

    def batches(self, loader: Any, epoch: int, name: str = "train") -> Iterator[Any]:
        """Iterate the batches of `epoch` that were not consumed yet; yields nothing for a finished epoch.

        A batch counts as consumed when it is yielded, however far the loader has read ahead. After a load the
        consumed ones are skipped, and the generators are put back at the first batch that is fetched. Work that is
        done once for each epoch needs the epoch in the state, else a resumed job does it again for finished ones::

            for epoch in range(progress["epoch"], epochs):  # progress = {"epoch": 0} is a component of the state
                progress["epoch"] = epoch
                for batch in ckpt.batches(loader, epoch):
                    ...  # and save_if_needed
                scheduler.step()

        Resumed exactly at an epoch's end it yields nothing, so names that only the loop's body binds (such as
        ``loss``) may not exist in the work that follows it.
        """
        return self._position.batches(loader, epoch, name, self._restore_generators)

    def log(self, **metrics: Any) -> None:
        """Keep `metrics` with the next `save_if_needed`; tensors are read later, without holding the GPU up."""
        if not self._inert():
            self._metrics.log(metrics)

    @guarded
    def wait(self, timeout: float | None = None) -> None:
        """Wait until every flush so far has ended; raises what went wrong, TimeoutError after `timeout` seconds."""
        self._check_open()
        self._saver.wait(timeout)

    def stats(self) -> Stats:
        """Counters since the construction: events by kind, blocked seconds, bytes, newest steps."""
        return self._events.stats()

    @property
    def preempted(self) -> bool:
        """A signal has come to some rank: end the loop cleanly. All ranks see it after the same step.

        A program that looks here is given until the signal's deadline to end by itself.
        """
        self._watches_preempted = True
        return self._parts.coordinator.preempted(self._step)

    @guarded
    def close(self) -> None:
        """Commit the newest snapshot and let go of everything. Raises what is not durable, whatever the policy.

        Interrupted (by Ctrl-C) it ends as after an exception; called again, it raises if that lost the newest step.
        """
        if self._inert():
            return
        if not self._farewell.begun:
            stopped = self._auditor is not None and self._auditor.stopping
            # After a load that was half applied nothing was saved, and that was raised before.
            self._farewell.close(owes=self._broken is None, keep_arena=stopped)
        ending.forget(self)
        undurable, self._farewell.undurable = self._farewell.undurable, None
        if undurable is not None:
            raise undurable

    @guarded
    def abandon(self) -> None:
        """End after an exception: start nothing new, drain for a bounded time, keep what is in memory."""
        if not (self._inert() or self._farewell.begun):
            try:
                self._farewell.abandon()
            finally:  # it has let go of everything, however it ended
                ending.forget(self)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if ending.is_clean(error):
            self.close()
        else:
            self.abandon()

    def _inert(self) -> bool:
        """In a forked child (a loader's worker) nothing is ours."""
        return os.getpid() != self._pid

    def _check_open(self) -> None:
        if self._inert():
            raise UsageError("a forked child cannot use its parent's Checkpointer")
        if self._farewell.begun:
            raise UsageError("this Checkpointer is closed")

    def _check_step(self, given: int) -> int:
        """The step as a plain int: NumPy's are welcome."""
        self._check_open()
        if self._broken is not None:
            raise UsageError(f"saving is refused, the state is only partly restored: {self._broken}")
        step = -1 if isinstance(given, bool) else _as_int(given)
        if step < 0:
            raise StepError(f"step must be the number of finished steps (0, 1, 2, ...), not {given!r}")
        if step > MAX_STEP:
            raise StepError(f"step must be the number of finished steps, at most {MAX_STEP}; this is no such number")
        if step < self._step:
            raise StepError(
                f"step {step} comes after step {self._step}, which was saved or restored before: start the loop at "
                "load().step and hand over the number of finished steps; steps go backwards only by load(step=...)"
            )
        self._parts.coordinator.raise_failure(step)
        ending.goes_on()
        return step

    def _restore_generators(self) -> None:
        if self._generators is not None:
            put_back(self._generators)


def _as_int(value: Any) -> int:
    """`value` if it is a whole number, of whatever class; else -1."""
    try:
        return operator.index(value)
    except TypeError:
        return -1


__all__ = ["CheckpointConfig", "Checkpointer", "Restored"]
