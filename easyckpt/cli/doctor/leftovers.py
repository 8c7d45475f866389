"""What killed jobs have left in shared memory: what a restart needs of it, and what nobody needs any more."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from easyckpt import catalog
from easyckpt.cli import output
from easyckpt.cli.doctor.finding import Finding
from easyckpt.cli.doctor.place import Place
from easyckpt.errors import EasyckptError
from easyckpt.format import layout, memory_names
from easyckpt.memory import leftovers as memory
from easyckpt.memory.leftovers import Arena, OwnerNote
from easyckpt.memory.temporary import LeftDirectory, find_directories, remove_directory
from easyckpt.storage import probing
from easyckpt.storage.records_apart import open_place

AREA = "left behind"
Kind = Literal["in use", "waiting", "not needed", "unclear"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of something left behind."""

    kind: Kind
    why: str
    root: str | None = None
    advice: str = ""
    """Where it is not that of its kind."""


@dataclass(slots=True)
class Item:
    """One thing left behind, or in use, and what was done about it."""

    what: str
    verdict: Verdict
    nbytes: int
    newest: int | None
    """The newest step that is whole there."""
    age: float
    """Seconds since it was last changed."""
    details: dict[str, Any]
    removed: bool = False
    kept_because: str = ""

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "what": self.what, "kind": self.verdict.kind, "why": self.verdict.why, "root": self.verdict.root,
            "bytes": self.nbytes, "newest_step": self.newest, "age_seconds": self.age, "removed": self.removed,
            "kept_because": self.kept_because, **self.details,
        }  # fmt: skip

    def finding(self) -> Finding:
        """For people."""
        kind = "removed" if self.removed else self.verdict.kind
        step = "no whole snapshot" if self.newest is None else f"newest step {self.newest}"
        text = f"{kind}: {output.size(self.nbytes)}, {step}, {self.age / 60:.0f} min old"
        quiet = self.removed or self.verdict.kind == "in use"
        advice = (
            ""
            if quiet
            else self.kept_because or self.verdict.advice or _ADVICE[self.verdict.kind].format(root=self.verdict.root)
        )
        return Finding(AREA, self.what, text, "ok" if quiet else "warning", "memory", self.verdict.why, advice)


#: Memory without a root goes only when it was not written to for so long: until then a root may have been moved only.
_GONE_FOR_GOOD = 24 * 3600.0

_RESTART = "start the job again on this machine; `--clean --all` removes it"
_ADVICE = {
    "waiting": "start the job again on this machine, or commit it with `easyckpt rescue {root}`; "
    "`--clean --all` removes it",
    "not needed": "`--clean` removes it",
    "unclear": "name the run's root (`easyckpt doctor ROOT`); if nobody needs it, `--clean --all` removes it",
}


def look(directory: str, place: Place, *, clean: bool, everything: bool) -> list[Item]:
    """All that is left behind in the memory directory, and by doctor itself in the root.

    With `clean`, what nobody needs is removed; with `everything`, also what a restart would go on from, and what is
    unclear. What a live process owns stays in any case, and so does what belongs to other users.
    """
    arenas = [arena for arena in memory.find(directory) if arena.paths or not _serves_a_lease(arena, place)]
    items = [_arena(arena, place, clean, everything) for arena in arenas]
    items += [_audit(found, clean, everything) for found in find_directories(directory)]
    return items + list(_probes(place, clean))


def others(directory: str) -> Iterator[Finding]:
    """A line on other users' memory, where there is some."""
    files, nbytes = memory.of_others(directory)
    if files:
        yield Finding(
            AREA,
            "other users",
            f"{files} files, {output.size(nbytes)}",
            "ok",
            "memory",
            "theirs: not looked into, not removed",
        )


def judge(arena: Arena, place: Place) -> Verdict:
    """What a restart would need of an arena. Only `not needed` may go without being asked for by name."""
    root = _root_of(arena, place)
    if arena.alive:
        return Verdict("in use", "a live process owns it", root)
    return judge_dead(arena, place, root) if arena.dead else Verdict("unclear", "its owner file is missing", root)


def judge_dead(arena: Arena, place: Place, root: str | None) -> Verdict:
    """The same of an arena whose owners are known to be dead."""
    if arena.problems:
        return Verdict("unclear", arena.problems[0], root)
    if not arena.metas:
        return Verdict("not needed", "it holds no whole snapshot", root)
    if root is None:
        return Verdict("unclear", "nothing tells which root it belongs to", None)
    try:
        return _by_root(arena, root)
    except (EasyckptError, OSError) as error:
        return Verdict("unclear", f"its root cannot be read: {error}", root)


def _root_of(arena: Arena, place: Place) -> str | None:
    if place.arena_id == arena.arena_id:
        return place.asked
    return None if arena.note is None else arena.note.root


def _serves_a_lease(arena: Arena, place: Place) -> bool:
    """Whether the root has a lease, whose owner is proven dead by the arena's owner file."""
    root = _root_of(arena, place)
    try:
        return root is not None and open_place(root)[0].exists(layout.LEASE)
    except (EasyckptError, OSError):
        return True  # nobody knows


def _by_root(arena: Arena, root: str) -> Verdict:
    if arena.note is not None and not _same_file_system(arena.note):
        return Verdict("unclear", f"{root} is on a file system that is not mounted now, or was mounted anew", root)
    if not _exists(root):
        return _without_root(arena, root, f"there is no directory {root} any more")
    storage, naming = open_place(root)
    record = catalog.read_root(storage)
    if record is None:
        return _without_root(arena, root, f"{root} is there, but holds no record of a run ({layout.ROOT_FILE})")
    if memory_names.arena_id(record.run, os.path.realpath(root)) != arena.arena_id:
        return _without_root(arena, root, f"{root} belongs to another run now")
    committed = [
        entry.step
        for entry in catalog.scan(storage, naming).committed()
        if entry.manifest is not None and record.is_past(entry.manifest.run, entry.manifest.timeline, entry.step)
    ]
    newest = max(committed, default=-1)
    waiting = {meta.step for meta in arena.metas if meta.step > newest and record.on_ancestry(meta.timeline, meta.step)}
    stored = f"step {newest}" if committed else "nothing"
    if not waiting:
        return Verdict("not needed", f"{root} has committed {stored}, and a restart goes on from there", root)
    why = f"left by a killed job for its restart: up to step {max(waiting)}; committed: {stored}"
    return Verdict("waiting", why, root, _RESTART if naming.shared else "")


def _without_root(arena: Arena, root: str, why: str) -> Verdict:
    """Deleted roots and moved ones look the same; what a moved one needs again must not go by itself."""
    written = max(arena.changed, *(meta.sealed_at for meta in arena.metas))
    if time.time() - written >= _GONE_FOR_GOOD:
        return Verdict("not needed", f"{why}, and this memory was not written to for a day", root)
    advice = (
        f"if it was moved, move it back to {root}: then the job goes on from here, or `easyckpt rescue {root}` commits "
        "it; if it was deleted, `--clean --all` removes this now, `--clean` a day after the last step"
    )
    return Verdict("unclear", f"{why}: it was deleted or moved", root, advice)


def _exists(path: str) -> bool:
    """Whether there is such a path; an OSError where that cannot be known."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _same_file_system(note: OwnerNote) -> bool:
    path = note.root
    while not _exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev == note.device


def _arena(arena: Arena, place: Place, clean: bool, everything: bool) -> Item:
    verdict = judge(arena, place)
    item = Item(
        f"run {arena.arena_id}, " + _ranks(arena.ranks),
        verdict,
        arena.nbytes,
        memory.newest_whole(arena.metas) if len(arena.metas) else None,
        _age([meta.sealed_at for meta in arena.metas] or [arena.changed]),
        {"arena": arena.arena_id, "run": next((meta.run for meta in arena.metas), None), "ranks": sorted(arena.ranks)},
    )
    if item.newest is None and arena.metas:  # other ranks' parts are on other machines, or gone
        item.newest = max(meta.step for meta in arena.metas)

    def may_go(now: Arena) -> bool:
        return everything or judge_dead(now, place, verdict.root).kind == "not needed"

    if clean and _wanted(verdict, everything):
        keep = _serves_a_lease(arena, place)
        _act(item, lambda: memory.remove(arena, may_go=may_go, keep_owners=keep) is not None)
    return item


def _audit(found: LeftDirectory, clean: bool, everything: bool) -> Item:
    verdict = {
        True: Verdict("in use", "its audit runs, or a command that it has started"),
        False: Verdict("not needed", "its audit has ended, without tidying up"),
        None: Verdict("unclear", "it says nothing of its audit"),
    }[found.in_use]
    item = Item(f"audit {found.path}", verdict, found.nbytes, None, _age([found.changed]), {"path": found.path})
    if clean and _wanted(verdict, everything):
        _act(item, lambda: remove_directory(found.path))
    return item


def _probes(place: Place, clean: bool) -> Iterator[Item]:
    """What a doctor that was killed has left in the root."""
    for path in probing.leftovers(place.directory, time.time()):
        changed = os.lstat(path).st_mtime
        verdict = Verdict("not needed", "left by a doctor that was killed", place.asked)
        item = Item(f"trial {path}", verdict, 0, None, _age([changed]), {"path": path})
        if clean:
            _act(item, functools.partial(probing.remove_leftover, path))
        yield item


def _wanted(verdict: Verdict, everything: bool) -> bool:
    return verdict.kind == "not needed" or (everything and verdict.kind in ("waiting", "unclear"))


def _act(item: Item, remove: Callable[[], bool]) -> None:
    try:
        item.removed = remove()
        if not item.removed:
            item.kept_because = "kept: a process has taken it into use meanwhile"
    except (EasyckptError, OSError) as error:
        item.kept_because = f"not removed: {error}"


def _age(moments: Sequence[float]) -> float:
    return max(0.0, time.time() - max(moments))


def _ranks(ranks: set[int]) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks"
