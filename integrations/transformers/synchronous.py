"""Trainings whose state is sharded, or is not one run's: the Trainer saves by itself, and what it saves is committed.

A checkpoint counts once its manifest is there: all ranks have written the Trainer's own files before, and they are
durable. Only then do older ones go. Resuming takes the newest of which every byte is as it was committed.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from typing import Any

import torch.distributed as dist

from easyckpt import catalog
from easyckpt.errors import DamagedCheckpoint, EasyckptError
from easyckpt.format import layout
from easyckpt.format.checksum import ChunkHasher, file_digest
from easyckpt.format.manifest import FileRecord, Manifest
from easyckpt.format.trainer_names import TrainerNaming
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify

_log = logging.getLogger("easyckpt")
_NAMING = TrainerNaming()
_PIECE = 8 << 20


def why(trainer: Any, trial: Any) -> str | None:
    """Why this training's state is not snapshotted; None where it is."""
    if trial is not None or trainer.hp_search_backend is not None:
        return "a hyperparameter search"
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
    """One call of ``train()`` that the Trainer saves by itself."""

    restores = False

    def __init__(self, trainer: Any, reason: str, resume: Any) -> None:
        self._trainer = trainer
        _log.warning(
            "%s: the state is saved by the Trainer itself, while training waits, and each checkpoint is committed and "
            "verified; snapshots in memory and exact resuming are for trainings on one device or with DDP",
            reason,
        )
        self.path = _agreed(lambda: newest_whole(trainer.args.output_dir)) if resume is True else resume
        if resume is True and self.path is None and trainer.args.process_index == 0:
            _log.warning("nothing to resume from in %s: training starts from scratch", trainer.args.output_dir)

    def save(self, write: Any, trial: Any) -> None:
        """Have the Trainer `write` its checkpoint, then commit it; older ones go after that."""
        trainer = self._trainer
        args, limit = trainer.args, trainer.args.save_total_limit
        args.save_total_limit = None
        try:
            write()
        finally:
            args.save_total_limit = limit
        _meet()
        if args.should_save:
            storage = LocalStorage(trainer._get_output_dir(trial=trial))
            commit(storage, trainer.state.global_step, world_size=args.world_size)
            rotate(storage, limit, trainer.state.best_model_checkpoint)
        _meet()


def commit(storage: LocalStorage, step: int, *, world_size: int) -> None:
    """Make every file of ``checkpoint-<step>`` durable, and say in a manifest what they are."""
    name = _NAMING.committed(step)
    manifest = Manifest(
        run=secrets.token_hex(16),
        timeline=layout.FOREIGN_LINE,
        step=step,
        world_size=world_size,
        attempt=f"{secrets.token_hex(4)}-000001",
        created=time.time(),
        files={path: _durable(storage, f"{name}/{path}") for path in _files(storage, name)},
    )
    for folder in sorted({name, *(f"{name}/{path}".rpartition("/")[0] for path in manifest.files)}, reverse=True):
        storage.sync_dir(folder)
    storage.replace(f"{name}/{layout.MANIFEST}", manifest.to_bytes())
    storage.sync_dir("")


def rotate(storage: LocalStorage, limit: int | None, best: str | None) -> None:
    """Remove the oldest of the committed ones beyond `limit`; the newest and the `best` stay."""
    if not limit or limit < 1:
        return
    kept = os.path.basename(best or "")
    found = [entry for entry in catalog.scan(storage, _NAMING).of_kind("foreign") if entry.valid]
    found.sort(key=lambda entry: (entry.name == kept, entry.step))
    newest = max((entry.step for entry in found), default=-1)
    for entry in found[: max(0, len(found) - limit)]:
        if entry.step != newest and entry.name != kept:
            trash = _NAMING.trash(entry.name, secrets.token_hex(4))
            storage.rename(entry.name, trash)
            storage.sync_dir("")
            storage.remove_tree(trash)


def newest_whole(output_dir: str) -> str | None:
    """The newest checkpoint whose bytes are as committed; where none has a manifest, the newest as it is.

    Raises DamagedCheckpoint where there are committed ones, and none is whole.
    """
    storage = LocalStorage(output_dir)
    found = catalog.scan(storage, _NAMING).of_kind("foreign")
    committed = [entry for entry in found if entry.manifest is not None]
    damaged = []
    for entry in reversed(committed or found):
        problems = [str(entry.problem)] if entry.problem else [problem.message for problem in verify(storage, entry)]
        if not problems or not committed:
            if not committed:
                _log.warning("%s has no manifest: nothing tells whether it is whole", entry.name)
            return os.path.join(storage.root, entry.name)
        _log.warning("%s cannot be resumed from and is passed over: %s", entry.name, problems[0])
        damaged.append(f"{entry.name}: {problems[0]}")
    if damaged:
        raise DamagedCheckpoint(f"{storage.root}: no checkpoint is whole: {'; '.join(damaged)}")
    return None


def _files(storage: LocalStorage, name: str) -> list[str]:
    root = os.path.join(storage.root, name)
    found = []
    for folder, _, names in os.walk(root):
        found += [os.path.relpath(os.path.join(folder, each), root) for each in names if each != layout.MANIFEST]
    return sorted(found)


def _durable(storage: LocalStorage, path: str) -> FileRecord:
    """Sync a file, and read it as it is on storage then."""
    storage.drop_cache(path)
    hasher, memory = ChunkHasher(), memoryview(bytearray(_PIECE))
    with storage.reader(path) as reader:
        for begin in range(0, reader.size, _PIECE):
            hasher.update(memory[: reader.read_into(memory, begin)])
        size = reader.size
    return FileRecord(size, file_digest(size, hasher.finish()))


def _meet() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _agreed(work: Any) -> Any:
    """What rank 0 finds; its error is raised on all."""
    if not (dist.is_available() and dist.is_initialized()):
        return work()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [work(), None]
        except (EasyckptError, OSError) as error:
            answer = [None, str(error)]
    dist.broadcast_object_list(answer, 0)
    if answer[1] is not None:
        raise DamagedCheckpoint(answer[1])
    return answer[0]
