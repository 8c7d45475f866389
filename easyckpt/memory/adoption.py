"""What dead processes left in the memory directory: whose it is, and whether it is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat

from easyckpt.errors import DamagedCheckpoint, EasyckptError, ForeignFormat, FormatError
from easyckpt.format import memory_names
from easyckpt.memory.header import SlotMeta
from easyckpt.memory.reading import peek
from easyckpt.memory.slot import Slot

_log = logging.getLogger("easyckpt")


@dataclasses.dataclass(slots=True)
class Found:
    """Slots that are now this arena's, and paths with its names that are somebody else's."""

    slots: list[Slot] = dataclasses.field(default_factory=list)
    reserved: set[str] = dataclasses.field(default_factory=set)


def find_slots(directory: str, user: str | None) -> list[tuple[str, SlotMeta | str]]:
    """Every slot of `user` (None: of everybody) with what it holds, or the reason why it holds nothing; by path."""
    found: list[tuple[str, SlotMeta | str]] = []
    for path in _slot_paths(directory, user):
        try:
            meta = peek(path, user_only=user is not None)
        except (FormatError, OSError) as error:
            found.append((path, str(error)))
            continue
        if meta is not None:
            found.append((path, meta))
        elif os.path.lexists(path):
            found.append((path, f"{path}: not sealed: empty, being written, or left half-written by a killed process"))
    return found


def take_over(directory: str, user: str, identity: tuple[str, str, int]) -> Found:
    """Open every slot of `identity` (run, arena id, rank). The caller holds the arena's owner lock."""
    found = Found()
    elsewhere: dict[int, str] = {}
    for path in _slot_paths(directory, None):
        # Another rank's slot is in use by its owner: it is judged by its header alone, and never touched.
        mine = memory_names.is_slot_file(os.path.basename(path), user, *identity[1:])
        try:
            meta = peek(path)
            if meta is None and not mine:
                continue
            if meta is not None and (meta.run, meta.arena_id, meta.rank) != identity:
                if mine:
                    found.reserved.add(path)
                    _log.warning("%s: left alone: it holds a snapshot of another run (%s)", path, meta.run)
                elif (meta.run, meta.rank) == (identity[0], identity[2]):
                    elsewhere[meta.step] = path
                continue
            found.slots.append(Slot.open(path))
        except FileNotFoundError:
            continue
        except (DamagedCheckpoint, ForeignFormat) as error:
            if mine:
                _set_aside(path, error, found)
        except (EasyckptError, OSError) as error:  # newer than this version, or not readable just now
            if mine:
                found.reserved.add(path)
            if mine or isinstance(error, OSError):
                _log.warning("a snapshot slot is ignored: %s", error)
    if elsewhere:
        step = max(elsewhere)
        _log.warning(
            "shared memory holds snapshots of this run up to step %d (%s) that were taken when its root had another "
            "path: they are left alone, since a copy may be going on there. Move the root back to go on from them",
            step,
            elsewhere[step],
        )
    return found


def _set_aside(path: str, error: Exception, found: Found) -> None:
    """A file with our name that cannot be used: removed if it is a plain file of ours, else left alone."""
    if _is_plain_and_ours(path):
        _log.warning("a snapshot slot is damaged and is removed: %s", error)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    else:
        found.reserved.add(path)
        _log.warning("a snapshot slot is ignored: %s", error)


def _is_plain_and_ours(path: str) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and not stat.S_IMODE(found.st_mode) & 0o077
        and found.st_nlink == 1
    )


def _slot_paths(directory: str, user: str | None) -> list[str]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    # Owner files are never opened here: closing one would drop this process's own lock on it.
    return [os.path.join(directory, name) for name in sorted(names) if memory_names.is_slot_file(name, user)]
