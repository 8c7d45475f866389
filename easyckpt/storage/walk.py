"""Walking below a root directory without ever leaving it.

Every walk starts at the root's descriptor and follows no symbolic link on the way, so a name read from a file cannot
lead out of the root.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from types import ModuleType

from easyckpt.errors import ConfigError, StorageError
from easyckpt.storage.localfile import errors_name

logger = logging.getLogger("easyckpt")
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


def root_path(root: str | os.PathLike[str]) -> str:
    """The directory that a user means by `root`; ``~`` at its start is the home. Raises ConfigError."""
    given = os.fspath(root) if isinstance(root, (str, os.PathLike)) else None
    if not isinstance(given, str):
        raise ConfigError(f"root must be the path of a directory (a str or a pathlib.Path), not {root!r}")
    if not given:
        raise ConfigError("root must be the path of a directory, not '' (the current directory is '.')")
    if "://" in given:
        raise ConfigError(
            f"root: {given!r} is a URL, and easyckpt writes to mounted file systems only: mount the bucket, or "
            "choose a directory"
        )
    return os.path.expanduser(given)


class RootDirectory:
    """The root of a ``LocalStorage``: paths to descriptors, and nothing else."""

    #: The system calls; tests put a recorder here.
    _os: ModuleType = os

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root_path(root))

    @property
    def root(self) -> str:
        """The root's absolute path."""
        return self._root

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _named(self, path: str) -> contextlib.AbstractContextManager[None]:
        return errors_name(self._full(path))

    def _split(self, path: str) -> list[str]:
        if not path:
            return []
        parts = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise StorageError(f"{path!r} is not a path below {self._root}: absolute paths, '..' and '.' are refused")
        return parts

    @contextlib.contextmanager
    def _at(self, path: str) -> Iterator[tuple[int, str]]:
        """The open parent directory of `path` and its last component."""
        parts = self._split(path)
        if not parts:
            raise StorageError(f"the root {self._root} itself cannot be treated as a file")
        with self._named(path), self._opened(parts[:-1]) as directory:
            yield directory, parts[-1]

    @contextlib.contextmanager
    def _opened(self, parts: list[str]) -> Iterator[int]:
        descriptor = self._os.open(self._root, DIRECTORY)
        try:
            for depth, part in enumerate(parts):
                inner = self._open_directory(descriptor, part, "/".join(parts[: depth + 1]))
                self._os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            self._os.close(descriptor)

    def _open_directory(self, parent: int, name: str, path: str) -> int:
        try:
            return int(self._os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent))
        except OSError as error:
            with contextlib.suppress(OSError):
                if stat.S_ISLNK(self._os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise StorageError(
                        f"{self._full(path)} is a symbolic link; links below the root are not followed. "
                        "Put the real directory there, or make its target the root."
                    ) from error
            raise

    def _make_root(self) -> None:
        missing = []
        path = self._root
        while not self._os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with errors_name(path):
                try:
                    self._os.mkdir(path)
                except FileExistsError:
                    continue
                parent = self._os.open(os.path.dirname(path), DIRECTORY)
                try:
                    self._sync_descriptor(parent)
                finally:
                    self._os.close(parent)

    def _sync_descriptor(self, directory: int) -> None:
        try:
            self._os.fsync(directory)
        except OSError as error:
            # Some network and FUSE file systems have no fsync for directories: there is nothing more to be had.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            logger.debug("%s cannot sync directories", self._root)
