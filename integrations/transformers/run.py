"""One call of ``train()``: where it goes on, its Checkpointer, and what happens at the end of each step.

The state of a step is complete once the Trainer has logged and evaluated. Of the last step of a pass over the data it
is so only after what happens at the end of the epoch: a job that was killed in between would never do that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from easyckpt import ending
from easyckpt.dialects import of_trainer
from easyckpt.errors import UsageError
from easyckpt.framework import FrameworkCheckpointer
from easyckpt.integrations.training_data import TrainingData
from easyckpt.integrations.transformers import progress as trainer_progress
from easyckpt.integrations.transformers import scratch, versions
from easyckpt.integrations.transformers.carried_loss import CarriedLoss
from easyckpt.integrations.transformers.components import Files, state_of
from easyckpt.integrations.transformers.names import DATA, PROGRESS, STATE_FILE
from easyckpt.integrations.transformers.options import Options
from easyckpt.integrations.transformers.plan import Planner
from easyckpt.integrations.transformers.progress import Progress
from easyckpt.integrations.transformers.resume import Origin, find_origin
from easyckpt.integrations.transformers.saves import Saves
from easyckpt.prospect import Prospect

_log = logging.getLogger("easyckpt")


class TrainingRun:
    """Used with ``with`` around the Trainer's own training."""

    def __init__(self, trainer: Any, options: Options, resume: Any) -> None:
        self._trainer, self._options = trainer, options
        args = trainer.args
        self.progress, self.files, self.carried = Progress(), Files(), CarriedLoss(trainer)
        self.data = TrainingData(rank=args.process_index)
        planner = Planner(world_size=args.world_size, model_only=args.save_only_model, device=args.device.index or 0)
        limit = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else None
        self._limit = limit
        self._dialect = of_trainer(planner)
        self._prospect: Prospect | None = self._opened()
        self._checkpointer: FrameworkCheckpointer | None = None
        self._private: str | None = None
        self._in_epoch_end = self._requested = self._rescaled = False
        self._snapshot_at = self._flushed_at = self._counted_at = -1
        self._best: list[int] = []
        try:
            self.origin: Origin = find_origin(self._prospect, resume, {PROGRESS: self.progress, DATA: self.data})
            if not self.origin.ours:  # a state of ours may have been looked at, and be older than what was found
                self.data.forget()
                self.progress.restored = None
            self.path = self._path_for_trainer()
        except BaseException:
            self._prospect.close()
            raise

    def _opened(self) -> Prospect:
        root = os.path.abspath(self._trainer.args.output_dir)
        return Prospect(root, self._dialect, max_ckpt_num=self._limit, **self._options.settings())

    def _path_for_trainer(self) -> str | None:
        """What the Trainer is to resume from: its own checkpoint, or a directory that only holds its state file."""
        if not self.origin.ours:
            return self.origin.foreign
        if self.progress.restored is None:  # an audit has it left out
            raise UsageError(f"without the component {PROGRESS!r} nothing tells where training goes on")
        self._private = scratch.make("resume")
        scratch.write(self._private, STATE_FILE, trainer_progress.state_json(self.progress.restored))
        return self._private

    @property
    def restores(self) -> bool:
        """Whether this run puts everything back itself, so that the Trainer's own loading has nothing to do."""
        return self.origin.ours

    # -- hooks, in the order in which a training comes to them

    def start(self) -> None:
        """Model, optimizer and scheduler are made: take over, and restore them."""
        trainer = self._trainer
        trainer.state.global_step = int(trainer.state.global_step)
        self.progress.trainer = trainer
        self.files.learn(trainer)
        assert self._prospect is not None
        prospect = self._prospect
        state = state_of(trainer, self.progress, self.data, self.files)
        checkpointer = self._checkpointer = prospect.checkpointer(state)
        self._prospect = None
        handler = trainer.callback_handler
        self.saves = Saves(trainer, checkpointer, prospect.root, handler.on_save)
        handler.on_save = _heard_later
        self._keep_best()
        self.data.on_batch = checkpointer._position.on_batch
        if not self.restores:
            checkpointer.begin_at(self.origin.step)
            self._snapshot_at = self._flushed_at = self._counted_at = self.origin.step
            return
        if self.origin.found is not None:
            checkpointer.load_found(self.origin.found, explicit=self.origin.explicit)
        else:
            assert self.origin.elsewhere is not None
            checkpointer.load_elsewhere(self.origin.elsewhere)
        trainer_progress.put_back(trainer, self.progress)
        self.carried.put_back(self.progress)
        self.data.restore = checkpointer._restore_generators
        if trainer.args.ignore_data_skip or self._rescaled:
            self.data.resumed = None
        self._snapshot_at = self._flushed_at = self._counted_at = self.origin.step
        if trainer.args.process_index == 0:
            # A warning, as where nothing was found: of INFO a Trainer's user sees nothing by default.
            found = self.origin.found
            source = self.origin.elsewhere or (found and (found.path or found.tier)) or prospect.root
            _log.warning("resumed from step %d of %s", self.origin.step, source)
        self._make_what_was_lost()

    def _make_what_was_lost(self) -> None:
        """A checkpoint that was asked for at the step of the snapshot, and that a kill has prevented."""
        found, step = self.origin.found, self.origin.step
        assert self.progress.restored is not None
        control = self.progress.restored["state"]["stateful_callbacks"].get("TrainerControl", {})
        asked = control.get("args", {}).get("should_save", False)
        if found is not None and found.tier == "memory" and asked and not self.saves.known(step):
            assert self._checkpointer is not None
            self.saves.add(step, self._checkpointer.save(step))

    def same_batches(self, size: Any) -> bool:
        """Whether batches are of the `size` that they had. If not, the Trainer's own reckoning says where to go on."""
        self._rescaled = size is not None and size != self._trainer._train_batch_size
        return not self._rescaled

    def begin_loop(self) -> None:
        """The Trainer begins its loop; once more with smaller batches: what was trained so far counts for nothing."""
        if self._checkpointer is None:
            return
        self.progress.trainer = None
        vars(self._trainer.callback_handler).pop("on_save", None)
        checkpointer, self._checkpointer = self._checkpointer, None
        checkpointer.leave()
        self._prospect = self._opened()
        self._best, self._requested = [], False
        if self.origin.found is not None:
            found = self._prospect.look({PROGRESS: self.progress, DATA: self.data}, step=self.origin.step)
            self.origin = dataclasses.replace(self.origin, found=found)
        elif self.origin.elsewhere is not None:
            self._prospect.look_elsewhere(self.origin.elsewhere, {PROGRESS: self.progress, DATA: self.data})
        else:
            self.data.forget()

    def begin_epoch(self) -> None:
        """A pass over the data is about to begin."""
        self._in_epoch_end = False
        self.data.begin_epoch()

    def end_epoch(self) -> None:
        """The last step of a pass has ended; what belongs to the end of the epoch comes now."""
        self._in_epoch_end = True

    def log(self, values: Mapping[str, Any]) -> None:
        """The Trainer has logged `values`: they are kept with the snapshot, and beside the checkpoints."""
        if self._checkpointer is not None:
            kinds = (int, float, str, np.number)
            self._checkpointer.log(**{name: value for name, value in values.items() if isinstance(value, kinds)})

    def request_save(self, metrics: Any = None) -> None:
        """The Trainer wants a checkpoint of this step. `metrics`: up to 4.46, by which it is judged here."""
        trainer = self._trainer
        self._requested = True
        if trainer.hp_search_backend is None:
            trainer.store_flos()
        state = trainer.state
        if metrics is not None and versions.is_new_best(trainer.args, state, metrics):
            state.best_model_checkpoint = self.saves.path(state.global_step)
        best = getattr(state, "best_global_step", None)
        if best and trainer.args.save_strategy != "no" and (best == state.global_step or self.saves.known(best)):
            state.best_model_checkpoint = self.saves.path(best)
        self._keep_best()

    @contextlib.contextmanager
    def files_added(self) -> Iterator[None]:
        """Within it, the program's own ``_save_checkpoint`` finds the checkpoint's directory, and may write into it."""
        directory = self.saves.path(self._trainer.state.global_step)
        mine = self._trainer.args.should_save and not os.path.lexists(directory)
        if mine:
            scratch.make_at(directory)
        try:
            yield
        finally:
            if mine:
                self.files.added = scratch.read_all(directory)
                scratch.remove(directory)

    def _keep_best(self) -> None:
        """What the Trainer's state names as the best checkpoint stays, and the one before it until that is there."""
        step = self.saves.step_of(self._trainer.state.best_model_checkpoint)
        if step is not None and step not in self._best[-1:]:
            self._best.append(step)
            assert self._checkpointer is not None
            policy = self._checkpointer.policy
            self._checkpointer.policy = dataclasses.replace(policy, chosen=tuple(self._best))

    def end_step(self, loss: torch.Tensor) -> None:
        """The Trainer has logged and evaluated: the state of the step is complete, unless its epoch ends with it."""
        trainer, checkpointer = self._trainer, self._checkpointer
        if checkpointer is None:
            return
        self.progress.loss = loss.detach()
        step = trainer.state.global_step
        if step > self._counted_at:
            self.data.place.updates += step - self._counted_at
            self._counted_at = step
        if not self._in_epoch_end and self._epoch_ends():
            return
        preempted = step > self._snapshot_at and checkpointer.preempted
        if preempted:
            self.request_save()
        self._take(step)
        self.saves.deliver(step)
        if preempted:
            trainer.control.should_training_stop = True
        if self._in_epoch_end and self._training_ends(step):
            self.drain()

    def _training_ends(self, step: int) -> bool:
        """Whether no epoch follows this one. The last may have had fewer steps than it was thought to have."""
        state = self._trainer.state
        last: bool = self.data.place.epoch + 1 >= state.num_train_epochs
        return bool(self._trainer.control.should_training_stop or step >= state.max_steps or last)

    def _epoch_ends(self) -> bool:
        trainer = self._trainer
        control, step = trainer.control, trainer.state.global_step
        over = control.should_training_stop and step >= trainer.state.max_steps
        return self.data.at_end or control.should_epoch_stop or over

    def _take(self, step: int) -> None:
        checkpointer = self._checkpointer
        assert checkpointer is not None
        requested, self._requested = self._requested, False
        if requested and step > self._flushed_at:
            self.files.learn(self._trainer)
            skip = self._options.back_pressure == "skip" and not self._must_be_made(step)
            control = self._trainer.control
            control.should_save = True  # as it is when the Trainer writes its state
            waits = self._options.on_save == "wait"  # so the snapshot must be whole before the next optimizer step
            future = checkpointer.save(step) if waits else checkpointer.flush(step, skip=skip)
            control.should_save = False
            self.files.added = {}
            self.saves.add(step, future)
            self._flushed_at = self._snapshot_at = step
            if waits:
                self.saves.deliver(step, wait=True)
        elif step > self._snapshot_at:
            checkpointer.save_if_needed(step)
            self._snapshot_at = step

    def _must_be_made(self, step: int) -> bool:
        """Whether this checkpoint may not be skipped for the sake of speed: nothing will come in its place."""
        trainer = self._trainer
        best = step in self._best
        ends = trainer.control.should_training_stop or step >= trainer.state.max_steps
        return best or ends

    def drain(self) -> None:
        """Wait until every checkpoint is there, and tell of it."""
        if self._checkpointer is not None:
            self._checkpointer.wait(None)
            self.saves.deliver(self._trainer.state.global_step, wait=True)
            self._checkpointer.rotate()

    # -- the end

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._tidy)
            if self._prospect is not None:
                last_first.callback(self._prospect.close, error)
            if self._checkpointer is not None:
                last_first.callback(self._end_of(self._checkpointer, error))

    def _end_of(self, checkpointer: FrameworkCheckpointer, error: BaseException | None) -> Callable[[], None]:
        """How it lets go. A program that ends itself in the middle, and well, has its newest snapshot committed."""
        if error is not None:
            return checkpointer.close if ending.is_clean(error) else checkpointer.abandon
        found = self.origin.found
        idle = found is not None and found.tier == "memory" and found.step == self._counted_at
        if idle and self._trainer.args.save_strategy != "no":
            return checkpointer.close  # nothing was left to do but the checkpoint that a kill has prevented
        return checkpointer.leave

    def _tidy(self) -> None:
        self.progress.trainer = None
        vars(self._trainer.callback_handler).pop("on_save", None)
        if self._private is not None:
            scratch.remove(self._private)


def _heard_later(args: Any, state: Any, control: Any) -> Any:
    """In the place of the event on_save: the checkpoint is not there yet."""
    control.should_save = False
    return control
