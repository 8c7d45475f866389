"""What a program writes in its own ``_save_checkpoint``: into a directory apart, in which nobody looks for checkpoints.

All ranks write into the same one, as they do with the Trainer alone. What it holds under the checkpoint's name becomes
part of the checkpoint that is made of the step's snapshot; a checkpoint that is there already is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from easyckpt.errors import PeerFailed
from easyckpt.format.trainer_names import PROGRAMS_DIRECTORY, TrainerNaming
from easyckpt.integrations.transformers import scratch

_log = logging.getLogger("easyckpt")


@contextlib.contextmanager
def written_apart(trainer: Any, root: str, added: dict[str, bytes], asked: Callable[[], bool]) -> Iterator[None]:
    """Within it ``args.output_dir`` is the directory apart; then what this rank is to carry of it is put into `added`.

    All ranks call it, and meet at its begin and at its end. Where the Trainer was not `asked` to save as well, what was
    written is a checkpoint of the program's own, and goes to where that was meant for.
    """
    args, given = trainer.args, os.path.abspath(trainer.args.output_dir)
    apart = os.path.join(root, PROGRAMS_DIRECTORY)
    folder = TrainerNaming().committed(int(trainer.state.global_step))
    first = args.process_index == 0
    _agree(lambda: _open(given, apart) if first else None)
    named, args.output_dir = args.output_dir, apart
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
        raise
    finally:
        args.output_dir = named
        _agree(lambda: None, failure)
    if not asked():
        _agree(lambda: _close(given, apart, folder) if first else None)
        return
    directory = os.path.join(apart, folder)
    seen = _exchanged(scratch.names_in(directory))
    before = set().union(*seen[: args.process_index])
    added.update(scratch.read_all(directory, set(seen[args.process_index]) - before))
    _agree(lambda: _close(given, apart) if first else None)


def make_checkpoint(trainer: Any) -> None:
    """The Trainer saves: from here on the program may expect the checkpoint's directory."""
    os.makedirs(
        os.path.join(trainer.args.output_dir, TrainerNaming().committed(int(trainer.state.global_step))), exist_ok=True
    )


def forget(root: str) -> None:
    """What a job that was killed has left of it."""
    scratch.remove(os.path.join(root, PROGRAMS_DIRECTORY))


def _open(given: str, apart: str) -> None:
    """Make it anew. What lies in the Trainer's directory is seen from there as well, but for checkpoints."""
    scratch.remove(apart)
    os.makedirs(apart)
    for name in os.listdir(given):
        if not _is_checkpoints(name):
            with contextlib.suppress(OSError):  # a file system without links
                os.symlink(os.path.join(given, name), os.path.join(apart, name))


def _close(given: str, apart: str, folder: str | None = None) -> None:
    """What was written beside the checkpoint comes to where it was meant for."""
    for name in os.listdir(apart):
        path = os.path.join(apart, name)
        free = name == folder and not os.path.lexists(os.path.join(given, name))
        if name == folder and not free:
            _log.warning("%s is there already: what the program writes of its own is left out", name)
        if free or (not _is_checkpoints(name) and not os.path.islink(path)):
            shutil.move(path, os.path.join(given, name))
    scratch.remove(apart)


def _is_checkpoints(name: str) -> bool:
    return TrainerNaming().parse_committed(name) is not None or name.startswith("_easyckpt")


def _exchanged(value: Any) -> list[Any]:
    """What each rank says."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value)
    return answers


def _agree(work: Any, failure: Exception | None = None) -> None:
    """Meet the other ranks once `work` is done; if any of them comes with a failure, every rank raises."""
    if failure is None:
        try:
            work()
        except OSError as error:
            failure = error
    answers = _exchanged(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if answer is not None:
            raise PeerFailed(f"rank {rank}: {answer}")
