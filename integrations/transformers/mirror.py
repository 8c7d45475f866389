"""A directory that shows what another one holds: the same files, in directories of its own.

A program reads, appends, replaces, renames and removes in it as it would there. Files are hard links, so that writing
into one is at once writing into the other, while other threads and processes go on with the paths they know; what has
come, gone, or was replaced is brought over afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator

#: What an entry is: the text of a symbolic link, device and inode of a file, or None for a directory.
_Identity = str | tuple[int, int] | None


class Mirror:
    """At `path`, of the directory `given`; entries that are to be left out are nobody's business on either side."""

    def __init__(self, given: str, path: str, *, leave_out: Callable[[str], bool]) -> None:
        self.given, self.path = given, path
        self._leave_out = leave_out
        self._before: dict[str, _Identity] = {}

    def make(self) -> None:
        """Make it anew."""
        os.makedirs(self.path)
        for name in self._names(self.given):
            source, target = os.path.join(self.given, name), os.path.join(self.path, name)
            if os.path.islink(source):
                os.symlink(_goal(source), target)
            elif os.path.isdir(source):
                os.mkdir(target)
            else:
                _link(source, target)
        self._before = self._all()

    def bring_back(self) -> None:
        """Do in the directory what was done here."""
        before, after = self._before, self._all()
        for name in reversed([name for name in before if name not in after or _differ(before[name], after[name])]):
            self._remove(name, before[name])
        for name, what in after.items():
            place = os.path.join(self.given, name)
            if what is None:
                os.makedirs(place, exist_ok=True)
            elif name not in before or before[name] != what:
                source = os.path.join(self.path, name)
                if isinstance(what, str) and what.startswith(self.path):  # it is to lead to what is brought over
                    os.remove(source)
                    os.symlink(self.given + what.removeprefix(self.path), source)
                _move(source, place)

    def _remove(self, name: str, what: _Identity) -> None:
        """Unless it is another one by now, or still holds something."""
        place = os.path.join(self.given, name)
        if what is None:
            with contextlib.suppress(OSError):
                os.rmdir(place)
            return
        with contextlib.suppress(FileNotFoundError):
            if (_goal(place) if os.path.islink(place) else _identity(place)) == what:
                os.remove(place)

    def _all(self) -> dict[str, _Identity]:
        return {name: _identity(os.path.join(self.path, name)) for name in self._names(self.path)}

    def _names(self, directory: str) -> Iterator[str]:
        """Every entry's path in `directory`, that of a directory before those in it."""
        for folder, folders, files in os.walk(directory):
            if folder == directory:
                folders[:] = [name for name in folders if not self._leave_out(name)]
            for name in (*folders, *files):
                if folder != directory or not self._leave_out(name):
                    yield os.path.relpath(os.path.join(folder, name), directory)


def _identity(path: str) -> _Identity:
    if os.path.islink(path):
        return os.readlink(path)
    status = os.stat(path)
    return None if os.path.isdir(path) else (status.st_dev, status.st_ino)


def _differ(one: _Identity, other: _Identity) -> bool:
    """Whether what was there has to go before the other comes: a file is replaced in one call."""
    return (one is None) != (other is None)


def _goal(link: str) -> str:
    """Where a symbolic link leads to, from anywhere."""
    return os.path.join(os.path.dirname(link), os.readlink(link))


def _link(source: str, target: str) -> None:
    """Where there are no hard links (another file system below it), it can be read and written, but not removed."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        pass  # somebody's temporary file
    except OSError:
        with contextlib.suppress(OSError):
            os.symlink(source, target)


def _move(source: str, target: str) -> None:
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target, follow_symlinks=False)
