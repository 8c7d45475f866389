"""What lies in the memory directory, arena by arena: alive or left by the dead, of which root, and its removal.

Nothing is opened that is not this user's own, a link is never followed, and headers are verified before belief.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from easyckpt.errors import DamagedCheckpoint, ForeignFormat, FormatError
from easyckpt.format import memory_names
from easyckpt.memory.files import open_checked
from easyckpt.memory.header import SlotMeta
from easyckpt.memory.owner import OwnerLock
from easyckpt.memory.reading import peek


@dataclass(frozen=True, slots=True)
class OwnerNote:
    """What the owner of an arena leaves in its owner file."""

    root: str
    """The real path of the root that it saves into."""
    device: int
    """Of the root's file system: where it is another one now, the root may lie on one that is not mounted."""

    @classmethod
    def of(cls, root: str) -> OwnerNote:
        """Of a root that exists."""
        real = os.path.realpath(root)
        return cls(real, os.stat(real).st_dev)

    def to_bytes(self) -> bytes:
        """As it stands in the file."""
        return json.dumps({"root": self.root, "device": self.device}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, arena_id: str) -> OwnerNote | None:
        """What the file says; None where that is no note, or not of the arena `arena_id`, whose name holds a hash."""
        try:
            fields = json.loads(data)
            note = cls(fields["root"], fields["device"])
            place = memory_names.arena_id(arena_id.partition("-")[0], note.root)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        sound = type(note.device) is int and os.path.isabs(note.root) and "\0" not in note.root
        return note if sound and place == arena_id else None


@dataclass(slots=True)
class Arena:
    """All files of one arena (of all ranks) that belong to this user."""

    arena_id: str
    user: str
    """As the names of its files say."""
    ranks: set[int] = field(default_factory=set)
    paths: list[str] = field(default_factory=list)
    """Of slots; owner files are not among them."""
    owners: dict[str, bool | None] = field(default_factory=dict)
    """Owner file of each rank -> whether a live process holds it; None: there is no such file, or it cannot be told."""
    note: OwnerNote | None = None
    metas: list[SlotMeta] = field(default_factory=list)
    """What is sealed."""
    unsealed: int = 0
    """Slots that hold nothing whole: empty, half-written or damaged."""
    problems: list[str] = field(default_factory=list)
    """Why files are not looked into: not trusted, or of a newer version."""
    nbytes: int = 0
    changed: float = 0.0
    """Unix time of the newest change of one of the files that their file system knows of."""

    @property
    def alive(self) -> bool:
        """Whether any of its ranks lives."""
        return any(held is True for held in self.owners.values())

    @property
    def dead(self) -> bool:
        """Whether all of its ranks have certainly died."""
        return all(held is False for held in self.owners.values())


def find(directory: str) -> list[Arena]:
    """Every arena of this user in `directory`, by id."""
    arenas: dict[tuple[str, str], Arena] = {}
    for name, path in _ours(directory):
        user, arena_id, rank, slot = memory_names.parse_arena_file(name) or ("", "", 0, None)
        arena = arenas.setdefault((arena_id, user), Arena(arena_id, user))
        arena.ranks.add(rank)
        owner = os.path.join(directory, memory_names.owner_file(user, arena_id, rank))
        if owner not in arena.owners:
            free = OwnerLock.is_free(owner)
            arena.owners[owner] = None if free is None else not free
            arena.note = arena.note or OwnerNote.from_bytes(OwnerLock.note_at(owner) or b"", arena_id)
        if slot is not None:
            arena.paths.append(path)
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            arena.nbytes += status.st_blocks * 512
            arena.changed = max(arena.changed, status.st_mtime)
    for arena in arenas.values():
        _look_into(arena)
    return [arena for _, arena in sorted(arenas.items())]


def of_others(directory: str) -> tuple[int, int]:
    """(files, bytes) of arenas of other users, which are not looked into."""
    files = nbytes = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if memory_names.is_arena_file(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid != os.geteuid():
                        files, nbytes = files + 1, nbytes + status.st_blocks * 512
    return files, nbytes


def remove(arena: Arena, *, may_go: Callable[[Arena], bool], keep_owners: bool) -> int | None:
    """Remove the slots of a dead arena; returns their bytes, None where it was left as it is.

    All ranks' locks are taken first, as a restart would; what the slots hold then is put to `may_go` again. With
    `keep_owners` the owner files stay: a lease that names one is proven dead by it.
    """
    with contextlib.ExitStack() as stack:
        locks = []
        for path in sorted(arena.owners):
            lock = OwnerLock(path)
            if not lock.try_acquire():
                return None
            locks.append(lock)
            stack.callback(lock.release)
        _look_into(arena)
        if not may_go(arena):
            return None
        freed = sum(_unlink(path) for path in arena.paths)
        for lock in locks:
            lock.release(unlink=not keep_owners)
    return freed


def _ours(directory: str) -> Iterator[tuple[str, str]]:
    """(name, path) of the arenas' files that belong to this user."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                if memory_names.is_arena_file(name) and os.lstat(path).st_uid == os.geteuid():
                    yield name, path


def _look_into(arena: Arena) -> None:
    arena.metas, arena.unsealed, arena.problems = [], 0, []
    for path in arena.paths:
        try:
            meta = peek(path)
        except (FormatError, OSError) as error:
            if isinstance(error, (DamagedCheckpoint, ForeignFormat)) and _is_trusted(path):
                arena.unsealed += 1  # a restart would use it anew
            else:
                arena.problems.append(str(error))
            continue
        if meta is None:
            arena.unsealed += 1
        elif (meta.arena_id, memory_names.owner_beside(path) in arena.owners) == (arena.arena_id, True):
            arena.metas.append(meta)
        else:
            arena.problems.append(f"{path}: holds a snapshot of another arena ({meta.arena_id})")


def _is_trusted(path: str) -> bool:
    try:
        os.close(open_checked(path, os.O_RDONLY)[0])
    except (FormatError, OSError):
        return False
    return True


def _unlink(path: str) -> int:
    """Remove one slot, if it is a plain file of this user under one name; returns its bytes."""
    try:
        fd, status = open_checked(path, os.O_RDONLY)
    except (FormatError, OSError):
        return 0
    try:
        if os.path.samestat(os.lstat(path), status):
            os.unlink(path)
            return status.st_blocks * 512
        return 0
    except FileNotFoundError:
        return 0
    finally:
        os.close(fd)


def newest_whole(metas: Sequence[SlotMeta]) -> int | None:
    """The newest step that all ranks of a group have sealed here; None where there is none."""
    ranks: dict[tuple[int, str], set[int]] = {}
    for meta in metas:
        ranks.setdefault((meta.step, meta.timeline), set()).add(meta.rank)
    sizes = {(meta.step, meta.timeline): meta.world_size for meta in metas}
    return max((step for (step, line), have in ranks.items() if len(have) == sizes[step, line]), default=None)
