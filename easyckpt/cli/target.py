"""What the user points at: ``ROOT``, ``ROOT@STEP`` or a step directory. Nothing here writes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from easyckpt import catalog
from easyckpt.catalog import Catalog, Entry
from easyckpt.cli import output
from easyckpt.errors import ForeignFormat, UsageError
from easyckpt.format import layout
from easyckpt.format.layout import NamingScheme
from easyckpt.format.manifest import RootRecord
from easyckpt.storage.base import Storage
from easyckpt.storage.records_apart import open_place
from easyckpt.storage.walk import root_path

TARGET_HELP = "A checkpoint root (the newest valid one in it), ROOT@STEP, or one step directory."
#: The kinds of entries that people call checkpoints.
LISTED = ("committed", "foreign")
_NONE_YET = "no committed checkpoint in it yet"


@dataclass(frozen=True, slots=True)
class Target:
    """A root that holds checkpoints of ours, and the one checkpoint in it that was named, if one was."""

    root: str
    storage: Storage
    naming: NamingScheme
    name: str | None = None
    step: int | None = None

    @property
    def is_one(self) -> bool:
        """Whether one certain checkpoint was named."""
        return self.name is not None or self.step is not None

    def record(self) -> RootRecord | None:
        """The root's own record. Raises FormatError where it is damaged, foreign or newer."""
        return catalog.read_root(self.storage)

    def scan(self) -> Catalog:
        """Everything in the root. Raises ForeignFormat where nothing there is ours."""
        found = catalog.scan(self.storage, self.naming)
        if not found.entries and not self.storage.exists(layout.ROOT_FILE):
            raise ForeignFormat(f"{self.root}: not an easyckpt root: no {layout.ROOT_FILE} and no checkpoint in it")
        return found

    def pick(self) -> Entry:
        """The checkpoint that was named, else the newest valid one, of which it says so where a newer one is not valid.

        Raises UsageError where there is none, and for one that another program wrote.
        """
        entry = self.named()
        if entry is None:
            return self._newest(self.scan())
        if entry.kind == "foreign":
            raise UsageError(
                f"{self.root}: {entry.name} was written without easyckpt (it has no {layout.MANIFEST}): nothing here "
                "can tell what is in it, or whether it is whole"
            )
        return entry

    def named(self) -> Entry | None:
        """The checkpoint that was named, whoever wrote it. Raises UsageError where it is not there."""
        if self.name is not None:
            return catalog.inspect(self.storage, self.name, self.naming)
        if self.step is None:
            return None
        found = self.scan()
        entries = [entry for entry in found.entries if entry.kind in LISTED and entry.step == self.step]
        if not entries:
            raise UsageError(f"{self.root}: no checkpoint of step {self.step} in it; {_what_there_is(found)}")
        return entries[0]

    def _newest(self, found: Catalog) -> Entry:
        valid = found.committed()
        refused = [entry for entry in found.of_kind("committed") if not entry.valid]
        why = f"step {refused[-1].step} is not valid ({refused[-1].problem})" if refused else ""
        if not valid:
            raise UsageError(f"{self.root}: " + (f"no checkpoint in it is valid: {why}" if why else _NONE_YET))
        if refused and refused[-1].step > valid[-1].step:
            output.say(f"{self.root}: {why}: step {valid[-1].step} is taken")
        return valid[-1]


def _what_there_is(found: Catalog) -> str:
    steps = [entry.step for entry in found.committed()]
    if not steps:
        return "it holds no committed checkpoint"
    return f"it holds {len(steps)}, from step {steps[0]} to {steps[-1]}"


def resolve(given: str) -> Target:
    """Find out what `given` points at. Raises UsageError or ConfigError, or OSError where it may not be read."""
    path, step = root_path(given), None
    if not os.path.lexists(path):  # a directory may have an @ in its name
        match = re.fullmatch(r"(.+)@([0-9]{1,18})", path, re.DOTALL)
        if match:
            path, step = match[1], int(match[2])
    if not os.path.exists(path):
        before, _, after = path.rpartition("@")
        hint = f"; {after!r} after the @ is no step number" if step is None and os.path.isdir(before) else ""
        raise UsageError(f"{path}: no such directory{hint}")
    if not os.path.isdir(path):
        raise UsageError(f"{path}: a file, not a checkpoint directory")
    real = os.path.realpath(path)
    name = os.path.basename(real)
    root = os.path.dirname(real)
    storage, naming = open_place(root)
    if naming.parse_committed(name) is None and not os.path.lexists(os.path.join(real, layout.MANIFEST)):
        storage, naming = open_place(real)
        return _opened(Target(path, storage, naming, step=step), "")
    if step is not None:
        raise UsageError(f"{given}: {path} is one checkpoint already; give its root before the @")
    return _opened(Target(root, storage, naming, name=name), name)


def _opened(target: Target, directory: str) -> Target:
    target.storage.listdir(directory)  # no permission is said here, before anything else is
    return target
