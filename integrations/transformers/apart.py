"""What a program writes in its own ``_save_checkpoint``: into a directory apart, in which nobody looks for checkpoints.

All ranks write into the same one, as they do with the Trainer alone. What it holds under the checkpoint's name becomes
part of the checkpoint that is made of the step's snapshot; a checkpoint that is there already is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from easyckpt.format.trainer_names import PROGRAMS_DIRECTORY, TrainerNaming
from easyckpt.integrations.transformers import scratch
from easyckpt.integrations.transformers.mirror import Mirror

_log = logging.getLogger("easyckpt")


class Meet(Protocol):
    """All ranks call it in the same order, and get what the `work` of each returns, by rank; or all raise."""

    def __call__(self, work: Callable[[], Any] | None = None, doing: str = "") -> list[Any]:
        """`doing`: what is met for, the same on all ranks."""


@contextlib.contextmanager
def written_apart(
    trainer: Any, root: str, added: dict[str, bytes], asked: Callable[[], bool], meet: Meet
) -> Iterator[None]:
    """Within it ``args.output_dir`` is the directory apart; then what this rank is to carry of it is put into `added`.

    All ranks call it, and `meet` at its begin and at its end. Where the Trainer was not `asked` to save as well, what
    was written is a checkpoint of the program's own, and goes to where that was meant for.
    """
    args, named = trainer.args, trainer.args.output_dir
    given = os.path.abspath(named)
    mirror = Mirror(given, os.path.join(root, PROGRAMS_DIRECTORY, os.path.basename(given)), leave_out=_is_checkpoints)
    folder = TrainerNaming().committed(int(trainer.state.global_step))
    first = args.process_index == 0

    def open_() -> None:
        forget(root)
        mirror.make()

    def close(*, own: bool = False) -> None:
        if own:
            _hand_over(mirror, folder)
        mirror.bring_back()
        forget(root)

    meet(open_ if first else None)
    args.output_dir = mirror.path
    try:
        yield
    finally:
        args.output_dir = named
    if not asked():
        meet((lambda: close(own=True)) if first else None, " of the program's own is written")
        return
    directory = os.path.join(mirror.path, folder)
    seen = meet(lambda: scratch.names_in(directory), " is written")
    before = set().union(*seen[: args.process_index])
    mine = set(seen[args.process_index]) - before
    meet(lambda: added.update(scratch.read_all(directory, mine)), " is read")
    meet(close if first else None, " is complete")


def make_checkpoint(trainer: Any) -> None:
    """The Trainer saves: from here on the program may expect the checkpoint's directory."""
    os.makedirs(
        os.path.join(trainer.args.output_dir, TrainerNaming().committed(int(trainer.state.global_step))), exist_ok=True
    )


def forget(root: str) -> None:
    """Remove it, or what a job that was killed has left of it."""
    scratch.remove(os.path.join(root, PROGRAMS_DIRECTORY))


def _hand_over(mirror: Mirror, folder: str) -> None:
    """A checkpoint that the program has made by itself gets its place, if that is free."""
    made, place = os.path.join(mirror.path, folder), os.path.join(mirror.given, folder)
    if os.path.lexists(made):
        if os.path.lexists(place):
            _log.warning("%s is there already: what the program writes of its own is left out", folder)
        else:
            os.rename(made, place)


def _is_checkpoints(name: str) -> bool:
    return TrainerNaming().parse_committed(name) is not None or name.startswith("_easyckpt")
