"""Checks of the file system that a root lies on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from easyckpt.cli import output
from easyckpt.cli.doctor.finding import Finding, State
from easyckpt.cli.doctor.place import Place
from easyckpt.errors import EasyckptError
from easyckpt.memory.owner import OwnerLock
from easyckpt.storage import probing
from easyckpt.storage.lease_chain import describe, lives, look
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.probing import Probes
from easyckpt.storage.records_apart import open_place

AREA = "storage"
#: A clock that is further off makes the times that people are shown misleading.
_SKEW_SECONDS = 2.0
_FEW_INODES = 10_000


@dataclass(frozen=True, slots=True)
class _Check:
    """A probe of `Probes`, what its answers mean, and how bad a no is."""

    probe: str
    what: str
    no: State
    guarantee: str
    yes_means: str
    no_means: str
    advice: str


_MOVE = "put the root on another file system"
_CHECKS = (
    _Check("renames_in_place", "rename of a directory", "bad", "commit", "a commit is one step",
           "a commit is no single step: a reader may find half a checkpoint", _MOVE),
    _Check("keeps_directories", "rename onto a full directory is refused", "bad", "commit",
           "a committed checkpoint is never overwritten", "a commit could overwrite a checkpoint", _MOVE),
    _Check("replaces_files", "rename replaces a file", "bad", "commit", "records are old or new, never torn",
           "records of the run may be torn", _MOVE),
    _Check("syncs_files", "fsync of files", "bad", "commit", "what is committed is on the disk",
           "a power cut may take committed checkpoints", _MOVE),
    _Check("syncs_directories", "fsync of directories", "warning", "commit", "names are on the disk",
           "a power cut may take the newest checkpoint, or name one that is not whole (which verification finds)",
           "fine where the server itself writes names through; else " + _MOVE),
    _Check("creates_once", "exclusive creation", "bad", "owner", "two jobs never both own the root",
           "two jobs may write the root at once", _MOVE),
    _Check("links", "hard links", "warning", "owner", "the lease is complete from its first moment",
           "a kill while the lease is made leaves a broken one: the next job waits for lease_timeout",
           "nothing, or " + _MOVE),
    _Check("takes_direct", "O_DIRECT", "warning", "pace", "flushes go past the page cache",
           "flushes go through the page cache: slower, and they push other files out of it",
           "nothing; direct_io=False spares the question"),
    _Check("locks_records", "record locks", "ok", "owner", "seen by others; needed where memory_dir lies here",
           "nothing for the root (its lease does without); memory_dir must not lie here", ""),
)  # fmt: skip
_WHERE: dict[str, tuple[State, str, str]] = {
    "local": ("ok", "outlives the processes; a lost node takes it along", ""),
    "network": ("ok", "outlives the node; what it really does is tried out below", ""),
    "memory": ("warning", "checkpoints end with the node, and take memory", "put the root on a disk"),
    "container": ("warning", "the container's own layer: checkpoints end with it", "mount a volume for the root"),
    "unknown": ("ok", "what it really does is tried out below", ""),
}
#: What an owner of the root is, by whether it lives.
_LIVES = {
    True: "it lives, and writes the root",
    False: "it is dead: the next job starts at once",
    None: "it writes the root, or has been killed while it did: that cannot be seen from here",
}


def findings(place: Place, speed_bytes: int) -> Iterator[Finding]:
    """Try everything out; nothing stays behind."""
    mount = probing.mount_of(place.directory)
    state, meaning, advice = _WHERE[mount.where]
    yield Finding(
        AREA, "file system", f"{mount.kind}, {mount.where}, at {mount.point}", state, "commit", meaning, advice
    )
    yield from _root(place)
    yield from _room(place)
    try:
        with probing.private_directory(place.directory) as probes:
            for check in _CHECKS:
                yield _tried(check, probes)
            yield _clock(probes)
            if speed_bytes:
                yield from _speed(place, probes, speed_bytes)
    except (EasyckptError, OSError) as error:
        yield Finding(
            AREA,
            "writing",
            str(error),
            "bad",
            "commit",
            "nothing can be saved there",
            "make it writable, or choose another root",
        )


def _tried(check: _Check, probes: Probes) -> Finding:
    good, why = probing.holds(getattr(probes, check.probe))
    if good:
        return Finding(AREA, check.what, "yes", "ok", check.guarantee, check.yes_means)
    return Finding(
        AREA, check.what, f"no{': ' + why if why else ''}", check.no, check.guarantee, check.no_means, check.advice
    )


def _root(place: Place) -> Iterator[Finding]:
    if place.problem is not None:
        yield Finding(
            AREA, "root", place.problem, "bad", "commit", "jobs refuse this root",
            f"look at it with `easyckpt verify {place.asked}`",
        )  # fmt: skip
        return
    if place.directory != place.asked:
        yield Finding(
            AREA, "root",
            f"{place.asked} does not exist yet; the nearest existing parent, {place.directory}, was looked at",
            "warning", "commit", "what is said of storage is true of the root only if it is made there",
            "see that the path is right; the first save makes the directory",
        )  # fmt: skip
        return
    if place.record is None:
        yield Finding(AREA, "root", f"{place.asked} is no root yet", "ok", "commit", "a first save makes it one")
        return
    newest = "nothing committed yet" if place.newest is None else f"newest checkpoint: step {place.newest.step}"
    yield Finding(AREA, "root", f"{place.asked}: {newest}", "ok", "commit", "where a restart without memory goes on")
    seen = look(open_place(place.directory)[0])
    owner, meaning = "nobody", "no job writes the root"
    if seen is not None:
        owner = describe(seen.owner)
        alive = None if seen.owner is None else lives(seen.owner, OwnerLock.is_free)
        meaning = _LIVES[alive]
    yield Finding(AREA, "lease", owner, "ok", "owner", meaning)


def _room(place: Place) -> Iterator[Finding]:
    space = os.statvfs(place.directory)
    free, need = space.f_bavail * space.f_frsize, 0 if place.newest is None else place.newest.nbytes
    state: State = "bad" if free < need else "warning" if free < 2 * need else "ok"
    whole = f"{output.size(free)} free" + (f", a checkpoint takes {output.size(need)}" if need else "")
    yield Finding(
        AREA, "space", whole, state, "commit",
        "room for the next checkpoint" if state == "ok" else "the next saves fail, and what is committed stays",
        "" if state == "ok" else "free space (a lower max_ckpt_num keeps fewer)",
    )  # fmt: skip
    if space.f_files:
        few = space.f_favail < _FEW_INODES
        yield Finding(
            AREA, "inodes", f"{space.f_favail} free of {space.f_files}", "warning" if few else "ok", "commit",
            "a checkpoint takes two files a rank, one more, and a directory",
            "remove files that are not needed" if few else "",
        )  # fmt: skip


def _clock(probes: Probes) -> Finding:
    _, ahead = probes.clock()
    off = abs(ahead) > _SKEW_SECONDS
    where = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this host's"
    return Finding(
        AREA, "clock", where if off else "as this host's",
        "warning" if off else "ok", "owner", "the lease compares no clocks; times of files are shown to people",
        "have both synchronized (NTP)" if off else "",
    )  # fmt: skip


def _speed(place: Place, probes: Probes, nbytes: int) -> Iterator[Finding]:
    free = LocalStorage(place.directory).free_bytes()
    nbytes = min(nbytes, free // 4)
    with output.progress("write and read", 2 * nbytes) as count:
        written, read = probes.speed(nbytes, count)
    for what, speed, verb in (("write speed", written, "flush"), ("read speed", read, "restore")):
        each = "" if place.newest is None else f": a checkpoint of {output.size(place.newest.nbytes)} in "
        each += "" if place.newest is None else f"{place.newest.nbytes / max(speed.rate, 1.0):.1f} s"
        yield Finding(
            AREA, what, f"{output.size(int(speed.rate))}/s ({output.size(speed.nbytes)})", "ok", "pace",
            f"how long a {verb} takes{each}; what runs beside it counts",
        )  # fmt: skip
