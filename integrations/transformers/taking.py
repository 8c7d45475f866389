"""What is taken of each step: its snapshot, and the checkpoints that were asked for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from easyckpt.framework import FrameworkCheckpointer
from easyckpt.integrations.transformers import apart, versions
from easyckpt.integrations.transformers.best import Best
from easyckpt.integrations.transformers.components import Files
from easyckpt.integrations.transformers.options import Options
from easyckpt.integrations.transformers.saves import Saves
from easyckpt.integrations.transformers.unsaved import OwnState

_log = logging.getLogger("easyckpt")

#: When the program asks for a save. At the "end" of a step it is made with the step's snapshot. Where a step has
#: "begun", its batches are read, and the state of the step before is in its snapshot alone. Else all is "still".
Moment = Literal["still", "begun", "end"]


class Taking:
    """Of one loop."""

    def __init__(
        self,
        trainer: Any,
        checkpointer: FrameworkCheckpointer,
        options: Options,
        files: Files,
        saves: Saves,
        *,
        root: str,
    ) -> None:
        self._trainer, self._checkpointer, self._options = trainer, checkpointer, options
        self._files, self._saves, self._root = files, saves, root
        self.best = saves.best = Best(trainer, checkpointer, saves)
        self.moment: Moment = "begun"
        self.taken = -1
        """The step that was snapshotted last."""
        self.over = False
        """No step follows."""
        self.requested = False
        """A checkpoint is to be made of the step."""
        self._requests = 0
        self._apart = False
        """The program's own ``_save_checkpoint`` is running."""
        self._own_state: OwnState | None = None
        self._must_be_taken = self._may_end_with_half_a_step()

    def begin_step(self) -> None:
        """A step is about to begin."""
        if self._own_state is None:
            self._own_state = OwnState(self._trainer.callback_handler.callbacks)

    def request(self, metrics: Any = None) -> None:
        """The Trainer wants a checkpoint of this step. `metrics`: up to 4.46, by which it is judged here."""
        trainer = self._trainer
        self.requested = True
        if self._apart:
            apart.make_checkpoint(trainer)
        self._requests += 1
        if trainer.hp_search_backend is None:
            self._meet()
            trainer.store_flos()
        state = trainer.state
        if metrics is not None and versions.is_new_best(trainer.args, state, metrics):
            state.best_model_checkpoint = self._saves.path(state.global_step)
        best = getattr(state, "best_global_step", None)
        if best and trainer.args.save_strategy != "no" and (best == state.global_step or self._saves.known(best)):
            state.best_model_checkpoint = self._saves.path(best)
        self.best.keep()

    def _meet(self, work: Callable[[], Any] | None = None, doing: str = "") -> list[Any]:
        """A save is all ranks'. What counts floating point operations is a collective: alone, it would meet another's.

        That of another call breaks the job, or what it trains, without a word of why. Returns what the `work` of each
        rank does; an error of one ends it on all.
        """
        args, step = self._trainer.args, self._trainer.state.global_step
        what = (
            f"the checkpoint of step {step}{doing}, which this rank was asked for (a callback must set "
            "control.should_save on all ranks, or on none)"
        )
        return self._checkpointer.meet(what, args.ddp_timeout, work)

    def asked(self, save: Callable[[], None], *, own: bool) -> None:
        """``_save_checkpoint`` is called, by whomever, and `save` goes on with it; `own`: it is the program's."""
        step = int(self._trainer.state.global_step)
        self._apart = own
        try:
            with self._written_apart(step) if own else contextlib.nullcontext():
                save()
        except BaseException as error:
            self._checkpointer.give_up(f"the checkpoint of step {step}: {type(error).__name__}: {error}")
            raise
        finally:
            self._apart = False
        if self.requested and self.moment != "end":
            self._save_between(step)

    def _written_apart(self, step: int) -> contextlib.AbstractContextManager[None]:
        before, added = self._requests, self._files.added_at(step)
        return apart.written_apart(self._trainer, self._root, added, lambda: self._requests > before, self._meet)

    def make_way(self) -> None:
        """The checkpoint's directory may have been made already, with nothing in it."""
        self._saves.make_way(self._trainer.state.global_step)

    def _save_between(self, step: int) -> None:
        """A save that is asked for elsewhere than at the end of a step, as of the step that was made last."""
        if self.moment == "still":
            self.take(step, half=False)
            if self.over:
                self.drain()
            return
        self._lose_what_is_added(step)
        if self._saves.known(step):
            self.requested = False
            return
        future = self._checkpointer.flush_taken(step)
        if future is None:
            _log.warning("there is no snapshot of step %d any more: the step that has begun is saved at its end", step)
        else:
            self.requested = False
            self._saves.add(step, future)

    def _lose_what_is_added(self, step: int) -> None:
        """Its snapshot is there already."""
        if self._files.added_at(step):
            _log.warning("step %d: files that _save_checkpoint adds after its end are in no checkpoint", step)
            self._files.added.clear()

    def take(self, step: int, *, half: bool) -> None:
        """Snapshot the step, and flush it where that was asked for. `half`: gradients of the next one are there.

        These are no state, so what was taken when the step ended is flushed then: resumed, the half step is done again.
        """
        checkpointer = self._checkpointer
        requested, self.requested = self.requested, False
        if requested:
            taken = checkpointer.flush_taken(step) if half and step == self.taken else None
            if taken is not None:
                self._lose_what_is_added(step)
            elif step <= self.taken:  # as with the Trainer itself, the later save counts
                checkpointer.begin_again(step)
                self._saves.deliver(step, wait=True)
            self._saves.add(step, self._flush(step) if taken is None else taken)
            self._files.let_go()
            self.taken = step
            if self._options.on_save == "wait":
                self._saves.deliver(step, wait=True)
        elif step > self.taken:
            (checkpointer.take if self._must_be_taken else checkpointer.save_if_needed)(step)
            self.taken = step

    def _may_end_with_half_a_step(self) -> bool:
        """Whether each step may turn out to be the last whole one of its pass, with a checkpoint at the pass's end."""
        args, loader = self._trainer.args, self._trainer.callback_handler.train_dataloader
        with contextlib.suppress(TypeError, NotImplementedError):
            if len(loader) >= 0:
                return False
        at_the_end = args.save_strategy in ("epoch", "best") and self._options.back_pressure == "wait"
        return bool(at_the_end and args.gradient_accumulation_steps > 1)

    def _flush(self, step: int) -> Future[int]:
        """Snapshot the step as it is now, and flush that."""
        checkpointer, control = self._checkpointer, self._trainer.control
        self._files.learn(self._trainer)
        if self._own_state is not None:
            self._own_state.tell()
        control.should_save = True  # as it is when the Trainer writes its state
        try:
            if self._options.on_save == "wait":  # so the snapshot must be whole before the next optimizer step
                return checkpointer.save(step)
            skip = self._options.back_pressure == "skip" and not self._must_be_made(step)
            return checkpointer.flush(step, skip=skip)
        finally:
            control.should_save = False

    def _must_be_made(self, step: int) -> bool:
        """Whether this checkpoint may not be skipped for the sake of speed: nothing will come in its place."""
        trainer = self._trainer
        best = step in self.best
        ends = trainer.control.should_training_stop or step >= trainer.state.max_steps
        return best or ends

    def drain(self) -> None:
        """Wait until every checkpoint is there, and tell of it."""
        self._checkpointer.wait(None)
        self._saves.deliver(self._trainer.state.global_step, wait=True)
        self._checkpointer.rotate()
