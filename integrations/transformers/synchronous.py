"""Trainings whose state is sharded, or is not one run's: the Trainer saves by itself, and what it saves is committed.

A checkpoint counts once its manifest is there: all ranks have written the Trainer's own files before, and they are
durable. Only then do older ones go. Resuming takes the newest of which every byte is as it was committed, on each node
where each has its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from easyckpt import catalog, errors
from easyckpt.config_sources import resolve
from easyckpt.errors import DamagedCheckpoint, EasyckptError, PeerFailed
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.integrations.transformers import committing, versions
from easyckpt.integrations.transformers.options import Options
from easyckpt.integrations.transformers.stock import STATE, step_of
from easyckpt.saving.owning import owned_root
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.records_apart import place_of

_log = logging.getLogger("easyckpt")
_NAMING = TrainerNaming()
#: The run of a directory that has none: two jobs that know it by this name exclude each other.
_NO_RUN = "0" * 32
_NOTHING = -1
SEARCH = "a hyperparameter search"


def why(trainer: Any, trial: Any) -> str | None:
    """Why this training's state is not snapshotted; None where it is."""
    if trial is not None or trainer.hp_search_backend is not None:
        return SEARCH
    for name, flag in (
        ("FSDP", "is_fsdp_enabled"),
        ("DeepSpeed", "is_deepspeed_enabled"),
        ("XLA FSDP", "is_fsdp_xla_enabled"),
    ):
        if getattr(trainer, flag, False):
            return name
    if getattr(trainer, "is_tp_enabled", False) or getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "a model sharded by tensors"
    if trainer.args.save_on_each_node and trainer.args.world_size > 1:
        return "save_on_each_node"
    return None


class SynchronousRun:
    """One call of ``train()`` that the Trainer saves by itself. Used with ``with`` around it."""

    restores = False

    def __init__(self, trainer: Any, reason: str, options: Options, resume: Any) -> None:
        self._trainer = trainer
        self.path: Any = None
        args = trainer.args
        self._directory = os.path.abspath(args.output_dir)
        self._is_first = True
        if args.process_index == 0:
            _log.warning(
                "%s: the state is saved by the Trainer itself, while training waits, and each checkpoint is committed "
                "and verified; snapshots in memory and exact resuming are for trainings on one device or with DDP",
                reason,
            )
        self._owning = contextlib.ExitStack()
        self._check: Callable[[], None] = lambda: None
        try:
            self._commits = self._is_the_one_that_commits()
            if reason != SEARCH:  # whose trials may run side by side, each in a directory of its own
                _all(self._own if self._commits else None, options)
            self.path = self._newest() if resume is True else resume
            has_state = bool(self.path) and os.path.exists(os.path.join(self.path, STATE))
            self._begins_at = step_of(self.path) if has_state else 0  # without one, the Trainer raises
        except BaseException:
            self._owning.close()
            raise

    def _is_the_one_that_commits(self) -> bool:
        """Rank 0 does; where each node has a directory of its own, one rank of each."""
        args = self._trainer.args
        if not args.save_on_each_node or args.world_size == 1:
            return bool(args.should_save)
        storage = place_of(_NAMING, args.output_dir)
        probe = _all(self._leave_probe if args.process_index == 0 else None, storage)[0]
        sees_that_of_rank_0 = storage.exists(probe)
        _all(None)
        if args.process_index == 0:
            storage.remove_tree(probe)
        return bool(args.should_save and (args.process_index == 0 or not sees_that_of_rank_0))

    def _leave_probe(self, storage: LocalStorage) -> str:
        probe = _NAMING.trash("probe", secrets.token_hex(8))
        storage.makedirs(probe)
        return probe

    def _own(self, options: Options) -> None:
        storage = place_of(_NAMING, self._trainer.args.output_dir)
        record = catalog.read_root(storage)
        settings = resolve(options.engine, options.config)
        owned = owned_root(storage, _NO_RUN if record is None else record.run, settings, _log.warning)
        self._check = self._owning.enter_context(owned)

    def _newest(self) -> str | None:
        """The newest checkpoint that is whole on every node."""
        directory = self._trainer.args.output_dir
        storage, below = place_of(_NAMING, directory), None
        while True:
            answers = _all(self._look if self._commits else None, storage, below)
            steps = {answer for answer in answers if answer is not None}
            if len(steps) == 1 or _NOTHING in steps:
                break
            below = min(steps) + 1
        if steps != {_NOTHING}:
            if _NOTHING in steps:
                raise DamagedCheckpoint(f"{directory}: there is no checkpoint that is whole on every node")
            return os.path.join(directory, _NAMING.committed(steps.pop()))
        if self._trainer.args.process_index == 0:
            _log.warning("nothing to resume from in %s: training starts from scratch", directory)
        return None

    def _look(self, storage: LocalStorage, below: int | None) -> int:
        step = committing.newest_whole(storage, below=below)
        return _NOTHING if step is None else step

    def save(self, write: Callable[[], None], trial: Any) -> None:
        """Have the Trainer `write` its checkpoint, then commit it; older ones go after that."""
        args, step = self._trainer.args, self._trainer.state.global_step
        limit, output_dir = args.save_total_limit, args.output_dir
        if os.path.abspath(output_dir) != self._directory:  # it is relative, and the program has gone elsewhere
            args.output_dir = self._directory
        each_node = versions.weights_on_each_node(self._trainer.model) if args.save_on_each_node else nullcontext()
        storage = place_of(_NAMING, self._trainer._get_output_dir(trial=trial))
        try:
            _all(self._prepare if self._commits else None, storage, step)
            args.save_total_limit = None  # older ones go after the commit
            with each_node:
                write()
        except Exception:
            _say_unfinished(storage, step)
            raise
        finally:
            args.save_total_limit, args.output_dir = limit, output_dir
        _all(None)
        _all(self._commit if self._commits else None, storage, step)

    def _prepare(self, storage: LocalStorage, step: int) -> None:
        self._check()
        storage.makedirs("")
        if self._is_first:
            committing.set_aside(storage, self._begins_at)
            self._is_first = False
        committing.begin(storage, step)

    def _commit(self, storage: LocalStorage, step: int) -> None:
        self._check()
        committing.commit(storage, step, world_size=self._trainer.args.world_size)
        self._check()
        committing.rotate(storage, self._trainer.args.save_total_limit, self._trainer.state.best_model_checkpoint)

    def __enter__(self) -> SynchronousRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._owning.close()


def _say_unfinished(storage: LocalStorage, step: int) -> None:
    free = storage.free_bytes() if os.path.isdir(storage.root) else 0
    _log.warning(
        "checkpoint-%d was not written to its end and counts for nothing; those before stay (%d bytes are free in %s)",
        step,
        free,
        storage.root,
    )


def _all(work: Callable[..., Any] | None, *given: Any) -> list[Any]:
    """What `work` has given on each rank that has some; an error of one is raised on all. All ranks call it."""
    failure: Exception | None = None
    answer: Any = None
    try:
        answer = None if work is None else work(*given)
    except (EasyckptError, OSError) as error:
        failure = error
    if not (dist.is_available() and dist.is_initialized()):
        if failure is not None:
            raise failure
        return [answer]
    said = None if failure is None else (type(failure).__name__, str(failure))
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (answer, said))
    if failure is not None:
        raise failure
    for rank, (_, said) in enumerate(answers):
        if said is not None:
            kind = getattr(errors, said[0], PeerFailed)
            raise kind(f"rank {rank}: {said[1]}" if kind is not PeerFailed else f"rank {rank}: {said[0]}: {said[1]}")
    return [answer for answer, _ in answers]
