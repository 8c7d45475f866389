"""Trainings whose state is sharded, or is not one run's: the Trainer saves by itself, and what it saves is committed.

A checkpoint counts once its manifest is there: all ranks have written the Trainer's own files before, and they are
durable. Only then do older ones go. Resuming takes the newest of which every byte is as it was committed, on each node
where each has its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from easyckpt import catalog
from easyckpt.config import CheckpointConfig
from easyckpt.config_sources import resolve
from easyckpt.distributed.agree import done_by_all
from easyckpt.distributed.ranks import Ranks, discover
from easyckpt.distributed.rendezvous import connect
from easyckpt.errors import SaveFailed, StorageError
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.integrations.transformers import agreeing, committing, stock, versions
from easyckpt.integrations.transformers.components import ours
from easyckpt.integrations.transformers.judging import Demands
from easyckpt.integrations.transformers.options import Options
from easyckpt.integrations.transformers.stock import STATE, step_of
from easyckpt.saving.owning import owned_root
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.records_apart import place_of

_log = logging.getLogger("easyckpt")
_NAMING = TrainerNaming()
#: The run of a directory that has none: two jobs that know it by this name exclude each other.
_NO_RUN = "0" * 32
SEARCH = "a hyperparameter search"


def why(trainer: Any, trial: Any) -> str | None:
    """Why this training's state is not snapshotted; None where it is."""
    if trial is not None or trainer.hp_search_backend is not None:
        return SEARCH
    if (sharded := _sharded_by(trainer)) is not None:
        return sharded
    if trainer.args.save_on_each_node and trainer.args.world_size > 1:
        return "save_on_each_node"
    return None


def _sharded_by(trainer: Any) -> str | None:
    """Whose files a checkpoint has, where it has not those of a Trainer without sharding."""
    for name, flag in (
        ("FSDP", "is_fsdp_enabled"),
        ("DeepSpeed", "is_deepspeed_enabled"),
        ("XLA FSDP", "is_fsdp_xla_enabled"),
    ):
        if getattr(trainer, flag, False):
            return name
    if getattr(trainer, "is_tp_enabled", False) or getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "a model sharded by tensors"
    return None


class SynchronousRun:
    """One call of ``train()`` that the Trainer saves by itself. Used with ``with`` around it."""

    restores = False

    def __init__(self, trainer: Any, reason: str, options: Options, resume: Any) -> None:
        self._trainer = trainer
        args = trainer.args
        self._directory = os.path.abspath(args.output_dir)
        if args.process_index == 0:
            _log.warning(
                "%s: the state is saved by the Trainer itself, while training waits, and each checkpoint is committed "
                "and verified; snapshots in memory and exact resuming are for trainings on one device or with DDP",
                reason,
            )
        settings = resolve(options.engine, options.config)
        self._timeout = max(settings.peer_timeout, float(args.ddp_timeout))
        together = dist.is_available() and dist.is_initialized()
        self._ranks = discover() if together else Ranks(0, 1, 0, 1)
        self._is_first = True
        self._told = False  # that an error has ended this run: all ranks have agreed on it
        self._check: Callable[[], None] = lambda: None
        self._leaving = contextlib.ExitStack()
        self._channel, mailbox = connect(self._ranks, "checkpoints of the Trainer's own", self._timeout)
        mailbox.close()
        self._leaving.callback(self._channel.close)
        try:
            storage = place_of(_NAMING, args.output_dir)
            self._demands = self._demanded(storage)
            if reason != SEARCH:  # whose trials may run side by side, each in a directory of its own
                self._all("the lease", (lambda: self._own(storage, settings)) if self._commits else None)
            self.path = agreeing.where_to_go_on(self._all, storage, resume, self._demands)
            has_state = bool(self.path) and os.path.exists(os.path.join(self.path or "", STATE))
            self._begins_at = step_of(self.path or "") if has_state else 0  # without one, the Trainer raises
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def _demanded(self, storage: LocalStorage) -> Demands | None:
        """What this rank has to look for: the one that commits, for all whose directory it is."""
        args = self._trainer.args
        ranks: Sequence[int] = range(args.world_size)
        if args.save_on_each_node and not self._ranks.alone:
            ranks = agreeing.sharers(self._all, storage, args.process_index, saves=args.should_save)
            self._commits = ranks[0] == args.process_index
        else:
            self._commits = bool(args.should_save)
        looks = self._commits or self._ranks.alone  # where ranks cannot talk, each looks for itself
        plain = _sharded_by(self._trainer) is None
        return Demands(args.world_size, ranks, plain, self._channel.busy) if looks else None

    def _own(self, storage: LocalStorage, settings: CheckpointConfig) -> None:
        record = catalog.read_root(storage)
        owned = owned_root(storage, _NO_RUN if record is None else record.run, settings, _log.warning)
        self._check = self._leaving.enter_context(owned)
        committing.put_back(storage)

    def _all(self, what: str, work: Callable[[], Any] | None, /) -> list[Any]:
        """See `agreeing.Everybody`. By the store: a rank that fails within the Trainer's saving leaves the others in
        whatever collectives there are in it, and one of ours would be taken for those.
        """
        try:
            return done_by_all(self._channel, what, work, self._timeout)
        except Exception:
            self._told = True
            raise

    def save(self, write: Callable[[], None], trial: Any) -> None:
        """Have the Trainer `write` its checkpoint, then commit it; older ones go after that."""
        args, step = self._trainer.args, self._trainer.state.global_step
        limit, output_dir = args.save_total_limit, args.output_dir
        if os.path.abspath(output_dir) != self._directory:  # it is relative, and the program has gone elsewhere
            args.output_dir = self._directory
        each_node = versions.weights_on_each_node(self._trainer.model) if args.save_on_each_node else nullcontext()
        try:
            storage = place_of(_NAMING, self._trainer._get_output_dir(trial=trial))
            self._all("a checkpoint begins", (lambda: self._prepare(storage, step)) if self._commits else None)
            args.save_total_limit = None
            with each_node:
                self._written(write, step)
        finally:
            args.save_total_limit, args.output_dir = limit, output_dir
        self._all("a checkpoint is written", None)
        self._all("a checkpoint is committed", (lambda: self._commit(storage, step)) if self._commits else None)

    def _written(self, write: Callable[[], None], step: int) -> None:
        try:
            write()
        except BaseException as error:
            self._channel.fail(f"the Trainer could not save step {step}: {type(error).__name__}: {error}")
            raise

    def _prepare(self, storage: LocalStorage, step: int) -> None:
        self._check()
        storage.makedirs("")
        committing.put_back(storage)  # also of a save that has failed, where training goes on: no rank writes now
        if self._is_first:
            committing.make_room(storage)
        committing.begin(storage, step)

    def _commit(self, storage: LocalStorage, step: int) -> None:
        self._check()
        name, args = _NAMING.committed(step), self._trainer.args
        by_the_trainer = "_save_checkpoint" in self._trainer._easyckpt.reached
        if not by_the_trainer or not storage.exists(name):  # a program's own saving, or one that had no wish to save
            if storage.exists(name):
                self._take_over(storage, step)
            committing.leave(storage, step)
            return
        problem = self._lacking(os.path.join(storage.root, name))
        if problem is not None:
            raise SaveFailed(f"{name} was not committed: {problem}")
        try:
            committing.commit(storage, step, world_size=args.world_size, busy=self._channel.busy)
        except OSError as error:
            raise SaveFailed(f"{name} was not committed: {error}") from error
        self._check()
        self._take_over(storage, step)
        try:
            committing.end(storage, step)
            committing.rotate(storage, args.save_total_limit, self._trainer.state.best_model_checkpoint)
        except (OSError, StorageError) as error:  # which costs space, and no checkpoint
            _log.warning("what is old in %s cannot be removed: %s", storage.root, error)

    def _take_over(self, storage: LocalStorage, step: int) -> None:
        """There is a checkpoint of this training's: from now on the newest is its own."""
        if self._is_first:
            committing.set_aside(storage, self._begins_at, step)
            self._is_first = False

    def _lacking(self, path: str) -> str | None:
        """What of a checkpoint was not written, where it is known what should be there."""
        trainer, demands = self._trainer, self._demands
        known = demands is not None and demands.plain and not trainer.args.save_only_model
        if not known or not versions.saves_as_ever(trainer, ours(trainer)):
            return None
        assert demands is not None
        return stock.lacks(path, world_size=demands.world_size, ranks=demands.ranks)

    def __enter__(self) -> SynchronousRun:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not self._told:
            self._channel.fail(f"training has ended there: {type(error).__name__}: {error}")
        self._leaving.close()
