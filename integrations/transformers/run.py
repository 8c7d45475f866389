"""One call of ``train()``: where it goes on, its Checkpointer, and what happens at the end of each step.

The state of a step is complete once the Trainer has logged and evaluated. Of the last step of a pass over the data it
is so only after what happens at the end of the epoch: a job that was killed in between would never do that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from easyckpt import ending
from easyckpt.dialects import of_trainer
from easyckpt.distributed.agree import all_good, done_by_rank_0
from easyckpt.errors import EasyckptError, NoCheckpoint, PeerFailed, UsageError
from easyckpt.format.difference import ASIDE
from easyckpt.framework import FrameworkCheckpointer
from easyckpt.integrations.training_data import TrainingData
from easyckpt.integrations.transformers import apart, arguments, committing, overridden, scratch, unsaved
from easyckpt.integrations.transformers import progress as trainer_progress
from easyckpt.integrations.transformers.best import origin_with_its_best
from easyckpt.integrations.transformers.carried_loss import CarriedLoss
from easyckpt.integrations.transformers.components import Files, state_of
from easyckpt.integrations.transformers.judged import judged
from easyckpt.integrations.transformers.names import PROGRESS, STATE_FILE
from easyckpt.integrations.transformers.options import Options
from easyckpt.integrations.transformers.own import Own
from easyckpt.integrations.transformers.plan import Planner
from easyckpt.integrations.transformers.progress import Progress
from easyckpt.integrations.transformers.resume import Origin, find_origin
from easyckpt.integrations.transformers.saves import Saves
from easyckpt.integrations.transformers.stops import Stops
from easyckpt.integrations.transformers.taking import Moment, Taking
from easyckpt.loading.loader import Restored
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
        self.taking: Taking | None = None
        self._in_epoch_end = self._rescaled = self._within_step = False
        self._counted_at = -1
        try:
            self._looked_at = judged(trainer, self.progress, self.data)
            self._put_back(self._prospect)
            self.origin: Origin = find_origin(self._prospect, resume, self._looked_at)
            if args.load_best_model_at_end and not self.origin.explicit:
                self.origin = origin_with_its_best(self._prospect, self.origin, self._looked_at, self.progress.restored)
            if not self.origin.ours:  # a state of ours may have been looked at, and be older than what was found
                self.data.forget()
                self.progress.restored = None
            self.path = self._agreed_path(self._prospect)
        except BaseException as error:
            self._prospect.close(error)
            raise

    def _opened(self) -> Prospect:
        root = os.path.abspath(self._trainer.args.output_dir)
        return Prospect(root, self._dialect, max_ckpt_num=self._limit, **self._options.settings())

    def _put_back(self, prospect: Prospect) -> None:
        """A training before may have been killed while the Trainer itself saved a step once more."""
        work = functools.partial(committing.put_back, prospect.storage)
        done_by_rank_0(prospect.channel, prospect.ranks, "what a kill has cut short", work, prospect.timeout)

    def _agreed_path(self, prospect: Prospect) -> str | None:
        """What the Trainer is to resume from. All ranks have it, or none goes on."""
        path, failure = None, None
        try:
            path = self._path_for_trainer()
        except (EasyckptError, OSError) as error:
            failure = error
        try:
            all_good(prospect.channel, "the Trainer's own state", failure, prospect.timeout)
        except PeerFailed as error:  # another rank may have ended already, for the failure that this one has told it
            raise failure or error from None
        return path

    def _path_for_trainer(self) -> str | None:
        """What the Trainer is to resume from: its own checkpoint, or a directory that only holds its state file."""
        if not self.origin.ours:
            return self.origin.foreign
        if self.progress.restored is None:  # an audit has it left out
            raise UsageError(f"without the component {PROGRESS!r} nothing tells where training goes on")
        self._private = scratch.make("resume")
        self._tell_trainer()
        return self._private

    def _tell_trainer(self) -> None:
        """Write the state that the Trainer reads."""
        assert self._private is not None
        assert self.progress.restored is not None
        scratch.write(self._private, STATE_FILE, trainer_progress.state_json(self.progress.restored))

    @property
    def restores(self) -> bool:
        """Whether this run puts everything back itself, so that the Trainer's own loading has nothing to do."""
        return self.origin.ours

    @property
    def started(self) -> bool:
        """Whether the loop has made all that it works with."""
        return self._checkpointer is not None

    # -- hooks, in the order in which a training comes to them

    def start(self) -> None:
        """Model, optimizer and scheduler are made: take over, and restore them."""
        trainer = self._trainer
        self._forget_private()  # the Trainer has read it; a kill would leave it for good
        overridden.warn_of_own_loop(trainer, in_epoch=False)
        trainer.state.global_step = int(trainer.state.global_step)
        self.progress.trainer, self.progress.own = trainer, Own(trainer)
        self.progress.buffers = trainer._easyckpt.buffers = unsaved.buffers_of(trainer)
        self.files.learn_early(trainer)
        assert self._prospect is not None
        prospect = self._prospect
        state = state_of(trainer, self.progress, self.data, self.files)
        checkpointer = self._checkpointer = prospect.checkpointer(state)
        self._prospect = None
        handler = trainer.callback_handler
        self.saves = Saves(trainer, checkpointer, prospect.root, handler.on_save)
        if trainer.args.process_index == 0:
            apart.forget(prospect.root)
        handler.on_save = _heard_later
        taking = self.taking = Taking(trainer, checkpointer, self._options, self.files, self.saves, root=prospect.root)
        self.stops = Stops(handler.on_substep_end, lambda: taking.requested)
        handler.on_substep_end = self.stops.on_substep_end
        self.data.on_batch = checkpointer._position.on_batch
        if not self.restores:
            checkpointer.begin_at(self.origin.step, outside=self.origin.is_outside(prospect.root))
            self._counted_at = self.origin.step
            taking.taken = self.origin.step or -1
            taking.moment = "begun" if self.origin.step else "still"
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
        taking.taken = self._counted_at = self.origin.step
        self.saves.found(checkpointer.committed_before())
        if trainer.args.process_index == 0:
            # A warning, as where nothing was found: of INFO a Trainer's user sees nothing by default.
            found = self.origin.found
            source = self.origin.elsewhere or (found and (found.path or found.tier)) or prospect.root
            _log.warning("resumed from step %d of %s", self.origin.step, source)
            self._warn_of_arguments()
        self._make_what_was_lost()
        assert self.progress.restored is not None
        taking.best.put_back(self.progress.restored)

    def _warn_of_arguments(self) -> None:
        """Rank 0; once, also where the loop begins anew with smaller batches."""
        assert self.progress.restored is not None
        before, trainer = self.progress.restored[ASIDE].get("arguments"), self._trainer
        trainer._easyckpt.warn_once("arguments", lambda: arguments.warn_of_changes(before, trainer.args))

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
        self._let_go_of_events()
        checkpointer, self._checkpointer = self._checkpointer, None
        found = self.origin.found
        checkpointer.leave(keep_memory=found is not None and found.tier == "memory")
        self._prospect = self._opened()
        self.taking = None
        if found is not None:
            self._look_again(self._prospect, found)
        elif self.origin.elsewhere is not None:
            self._prospect.look_elsewhere(self.origin.elsewhere, self._looked_at)
        else:
            self.data.forget()
        if self._private is not None:
            self._tell_trainer()

    def _look_again(self, prospect: Prospect, found: Restored) -> None:
        """Go on from where the loop before did; where newer steps have taken its place, from the newest of them."""
        try:
            again = prospect.look(self._looked_at, step=found.step, timeline=found.timeline)
        except NoCheckpoint:
            again = prospect.look(self._looked_at)
        self.origin = dataclasses.replace(self.origin, step=again.step, found=again)

    def begin_step(self) -> None:
        """A step is about to begin."""
        overridden.warn_of_own_loop(self._trainer, in_epoch=True)
        if self.taking is not None:
            self.taking.begin_step()
        self.check_told()

    def check_told(self) -> None:
        """Whether this run was told of all that was trained. Called at a step's begin, and at the end."""
        overridden.warn_of_what_was_not_told(self._trainer, None if self._checkpointer is None else self._counted_at)

    def begin_epoch(self) -> None:
        """A pass over the data is about to begin."""
        self._in_epoch_end = False
        self._come_to("begun")
        self.data.begin_epoch()

    def _come_to(self, moment: Moment) -> None:
        if self.taking is not None:
            self.taking.moment = moment

    def come_to_end(self) -> None:
        """A step was made: what is asked for from here on is done when it has been logged and evaluated."""
        self._come_to("end")

    def end_training(self) -> None:
        """No step follows: what is asked for from here on is done at once."""
        self._come_to("still")
        if self.taking is not None:
            self.taking.over = True

    def end_epoch(self, *, cut: bool) -> None:
        """The last step of a pass has ended; what belongs to the end of the epoch comes now.

        `cut`: a callback has ended the epoch. Where training as a whole ends early, the pass is not over.
        """
        self._in_epoch_end = True
        self._come_to("end")
        self.data.cut = cut

    def log(self, values: Mapping[str, Any]) -> None:
        """The Trainer has logged `values`: they are kept with the snapshot, and beside the checkpoints."""
        if self._checkpointer is not None:
            kinds = (int, float, str, np.number)
            self._checkpointer.log(**{name: value for name, value in values.items() if isinstance(value, kinds)})

    def trained(self, loss: torch.Tensor) -> torch.Tensor:
        """A batch was trained on. Returns what the Trainer is to take for its `loss`."""
        self._within_step = True
        return self.carried.added_to(loss)

    def end_step(self, loss: torch.Tensor) -> None:
        """The Trainer has logged and evaluated: the state of the step is complete, unless its epoch ends with it."""
        trainer, checkpointer, taking = self._trainer, self._checkpointer, self.taking
        if checkpointer is None or taking is None:
            return
        taking.moment = "end"  # also where no event has said so
        self.progress.loss = loss.detach()
        step = trainer.state.global_step
        if step > self._counted_at:
            self.data.place.updates += step - self._counted_at
            self._counted_at = step
        half, self._within_step = self._within_step and self._in_epoch_end, False
        if not self._in_epoch_end and self._epoch_ends():
            return
        preempted = step > taking.taken and checkpointer.preempted
        if preempted:
            taking.request()
        taking.take(step, half=half)
        taking.moment = "begun"
        self.saves.deliver(step)
        if preempted:
            trainer.control.should_training_stop = True
        if self._in_epoch_end and self._training_ends(step):
            taking.drain()

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

    def _let_go_of_events(self) -> None:
        for name in ("on_save", "on_substep_end"):
            vars(self._trainer.callback_handler).pop(name, None)

    def _tidy(self) -> None:
        self.progress.trainer = None
        self._let_go_of_events()
        self._forget_private()

    def _forget_private(self) -> None:
        if self._private is not None:
            scratch.remove(self._private)


def _heard_later(args: Any, state: Any, control: Any) -> Any:
    """In the place of the event on_save: the checkpoint is not there yet."""
    control.should_save = False
    return control
