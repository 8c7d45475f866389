"""What a root holds.

Discovery looks at the directory itself; ``latest`` is a hint for people and scripts and is never believed. One bad
entry never hides the others: it is listed with its problem.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from easyckpt.errors import DamagedCheckpoint, EasyckptError
from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import Manifest, RootRecord
from easyckpt.storage.base import Storage

Kind = Literal["committed", "stale", "temporary", "trash", "foreign"]
"""``foreign``: has the name of a checkpoint, no manifest, and may be another program's."""

#: A larger record is not ours; reading it could exhaust the memory.
MAX_RECORD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory in a root."""

    step: int
    """The step in its name; -1 where the name of something in the trash has none."""
    name: str
    kind: Kind
    manifest: Manifest | None = None
    """The commit record, if there is one that can be read."""
    problem: str | None = None
    """Why it is no valid checkpoint; None for a valid one, and for trash, which is not looked into."""
    attempt: str | None = None
    """Of a temporary directory: the attempt in its name."""
    timeline: str | None = None
    """Of a stale directory: the timeline in its name, for which it was set aside; else the manifest's."""

    @property
    def valid(self) -> bool:
        """Whether the manifest parses, fits the name, and all of its files are there in their sizes."""
        return self.manifest is not None and self.problem is None

    @property
    def nbytes(self) -> int:
        """Bytes of the files that the manifest lists; 0 where there is none to say it."""
        return sum(file.size for file in self.manifest.files.values()) if self.manifest is not None else 0


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything in a root that has a name of ours."""

    entries: list[Entry] = field(default_factory=list)
    """By step, then by name."""
    stray: list[str] = field(default_factory=list)
    """Small temporary files that a crash left in the root; never those around the lease, which others may be using."""

    def committed(self) -> list[Entry]:
        """The valid committed checkpoints, oldest step first."""
        return [entry for entry in self.entries if entry.kind == "committed" and entry.valid]

    def of_kind(self, kind: Kind) -> list[Entry]:
        """All entries of one kind, valid or not, oldest step first."""
        return [entry for entry in self.entries if entry.kind == kind]


def scan(storage: Storage, naming: NamingScheme) -> Catalog:
    """List what is in the root; an empty catalog where the root does not exist. Raises only if it cannot be listed."""
    try:
        names = storage.listdir("")
    except FileNotFoundError:
        return Catalog()
    entries, stray = [], []
    for name in names:
        entry = _classify(name, naming)
        if entry is not None:
            entry = _examined(storage, entry, naming)
            if entry.problem is None or storage.exists(name):  # else rotated away since the listing
                entries.append(entry)
        elif layout.is_temp_file(name) and not layout.is_beside_lease(name):
            stray.append(name)
    entries.sort(key=lambda entry: (entry.step, entry.name))
    return Catalog(entries, stray)


def inspect(storage: Storage, name: str, naming: NamingScheme) -> Entry:
    """Look at one directory, whatever its name; one without a name of ours counts as committed under its manifest."""
    entry = _classify(name, naming)
    if entry is not None:
        return _examined(storage, entry, naming)
    return _examined(storage, Entry(step=-1, name=name, kind="committed"), naming)


def read_manifest(storage: Storage, name: str) -> Manifest:
    """The commit record of the directory `name`. Raises FormatError, FileNotFoundError or another OSError."""
    return Manifest.from_bytes(_read_record(storage, f"{name}/{layout.MANIFEST}"))


def read_root(storage: Storage) -> RootRecord | None:
    """The root's own record, None where there is none. Raises FormatError naming the file."""
    try:
        data = _read_record(storage, layout.ROOT_FILE)
    except FileNotFoundError:
        return None
    try:
        return RootRecord.from_bytes(data)
    except EasyckptError as error:
        advice = (
            f". The checkpoints beside it may be whole (`easyckpt verify {storage.root}` tells): move this file away, "
            "and a new run goes on from the newest of them"
            if isinstance(error, DamagedCheckpoint)
            else ""
        )
        raise type(error)(f"{storage.root}/{layout.ROOT_FILE}: {error}{advice}") from error


def write_root(storage: Storage, record: RootRecord) -> None:
    """Make `record` the root's own, atomically and durably; the root is created where it is missing."""
    storage.makedirs("")
    storage.replace(layout.ROOT_FILE, record.to_bytes())


def pinned_steps(storage: Storage) -> set[int]:
    """Steps that somebody has pinned: each has a file in the root's directory of pins."""
    try:
        names = storage.listdir(layout.PINS)
    except FileNotFoundError:
        return set()
    return {step for name in names if (step := layout.parse_pin_file(name)) is not None}


def _classify(name: str, naming: NamingScheme) -> Entry | None:
    """The entry that a name alone tells of."""
    step = naming.parse_committed(name)
    if step is not None:
        return Entry(step=step, name=name, kind="committed")
    temporary = naming.parse_temporary(name)
    if temporary is not None:
        return Entry(step=temporary[0], name=name, kind="temporary", attempt=temporary[1])
    stale = naming.parse_stale(name)
    if stale is not None:
        return Entry(step=stale[0], name=name, kind="stale", timeline=stale[1])
    before = naming.parse_trash(name)
    if before is not None:
        inner = _classify(before, naming)
        return Entry(step=-1 if inner is None else inner.step, name=name, kind="trash")
    return None


def _examined(storage: Storage, entry: Entry, naming: NamingScheme) -> Entry:
    if entry.kind == "trash":
        return entry
    manifest, kind = None, entry.kind
    try:
        manifest = read_manifest(storage, entry.name)
        problem = misfit(entry, manifest) or _missing_files(storage, entry.name, manifest)
        if naming.shared and kind != "temporary" and manifest.timeline == layout.FOREIGN_LINE:
            kind = "foreign"
    except FileNotFoundError:
        kind = "foreign" if kind == "committed" and naming.shared else kind
        problem = f"no {layout.MANIFEST}: " + ("written without easyckpt" if kind == "foreign" else "never committed")
    except EasyckptError as error:
        problem = f"{layout.MANIFEST}: {error}"
    except OSError as error:
        problem = f"{layout.MANIFEST} cannot be read: {error}"
    return Entry(
        step=manifest.step if manifest is not None and entry.step < 0 else entry.step,
        name=entry.name,
        kind=kind,
        manifest=manifest,
        problem=problem,
        attempt=entry.attempt,
        timeline=entry.timeline or (manifest.timeline if manifest else None),
    )


def misfit(entry: Entry, manifest: Manifest) -> str | None:
    """What of the manifest contradicts the name, or itself."""
    if entry.step not in (-1, manifest.step):
        return f"the manifest is of step {manifest.step}"
    if entry.attempt not in (None, manifest.attempt):
        return f"the manifest is of attempt {manifest.attempt}"
    if manifest.parts and len(manifest.parts) != manifest.world_size:
        return f"the manifest does not hold a part for each rank ({manifest.world_size} in all)"
    shards = {rank for name in manifest.files if (rank := layout.parse_shard_file(name)) is not None}
    indexes = {rank for name in manifest.files if (rank := layout.parse_index_file(name)) is not None}
    if (shards or indexes) and not shards == indexes == set(range(manifest.world_size)):
        return f"the manifest does not list a shard and an index for each rank ({manifest.world_size} in all)"
    return None


def _missing_files(storage: Storage, directory: str, manifest: Manifest) -> str | None:
    for name, record in manifest.files.items():
        try:
            size = storage.stat_size(f"{directory}/{name}")
        except FileNotFoundError:
            return f"{name} is missing"
        except (EasyckptError, OSError) as error:
            return f"{name}: {error}"
        if size != record.size:
            return f"{name} has {size} bytes, the manifest says {record.size}"
    return None


def _read_record(storage: Storage, path: str) -> bytes:
    size = storage.stat_size(path)
    if size > MAX_RECORD_BYTES:
        raise DamagedCheckpoint(f"{path} has {size} bytes, which no record of ours has")
    return storage.read(path)
