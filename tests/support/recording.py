"""A storage that records what really reaches the system, and can show any power cut along the way.

``RecordingStorage`` is ``LocalStorage`` with a recorder in place of ``os``: what is recorded is each mutating system
call (not each method), so a missing fsync inside a method is seen. ``materialise(k, variant, directory)`` builds the
tree that a machine could come back with after losing power when the first k calls had been made:

- a file's bytes written after its last fsync may be there, not there, or partly there;
- a name created, renamed or removed after the last fsync of its directory may be changed or not, in the order of the
  calls within one directory; a rename within one directory is one change.

Ranks in threads share one recorder: ``RecordingStorage(root, recorder=first.recorder)``.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from easyckpt.storage.local import LocalStorage

NOTHING_UNSYNCED = "keep-nothing-unsynced"
METADATA_EMPTY = "keep-metadata-but-not-data"
METADATA_ZEROS = "keep-metadata-with-zeros-for-data"
TORN = "keep-metadata-and-half-the-data"
EVERYTHING = "keep-everything"  # also what a kill of the process alone leaves
RANDOM = tuple(f"random:{seed}" for seed in range(4))
VARIANTS = (NOTHING_UNSYNCED, METADATA_EMPTY, METADATA_ZEROS, TORN, EVERYTHING, *RANDOM)


@dataclass(frozen=True, slots=True)
class Operation:
    """One mutating system call that succeeded; paths are relative to the root, the root is ''."""

    kind: str  # mkdir create write truncate sync sync_dir rename link unlink rmdir
    path: str
    target: str = ""  # of rename and link
    offset: int = 0  # of write; the new size of truncate
    data: bytes = b""

    def __str__(self) -> str:
        more = f" -> {self.target}" if self.target else f" [{self.offset}+{len(self.data)}]" if self.data else ""
        return f"{self.kind} {self.path or '.'}{more}"


class Recorder:
    """Stands in for the module ``os``: does each call and notes the ones that change something below the root."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.operations: list[Operation] = []
        self._lock = threading.RLock()
        self.initial = _Node.load(self.root) if os.path.isdir(self.root) else _Node(is_directory=True)

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        with self._lock:
            place = self._place(path, dir_fd)
            creates = bool(flags & os.O_CREAT) and not os.path.lexists(os.path.join(self.root, place or ""))
            descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
            if creates:
                self._note("create", place)
            return descriptor

    def mkdir(self, path, mode=0o777, *, dir_fd=None):
        with self._lock:
            os.mkdir(path, mode, dir_fd=dir_fd)
            self._note("mkdir", self._place(path, dir_fd))

    def rename(self, src, dst, *, src_dir_fd=None, dst_dir_fd=None):
        with self._lock:
            os.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            self._note("rename", self._place(src, src_dir_fd), target=self._place(dst, dst_dir_fd))

    def link(self, src, dst, *, src_dir_fd=None, dst_dir_fd=None):
        with self._lock:
            os.link(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            self._note("link", self._place(src, src_dir_fd), target=self._place(dst, dst_dir_fd))

    def unlink(self, path, *, dir_fd=None):
        with self._lock:
            os.unlink(path, dir_fd=dir_fd)
            self._note("unlink", self._place(path, dir_fd))

    def rmdir(self, path, *, dir_fd=None):
        with self._lock:
            os.rmdir(path, dir_fd=dir_fd)
            self._note("rmdir", self._place(path, dir_fd))

    def write(self, descriptor, data):
        with self._lock:
            count = os.write(descriptor, data)
            offset = os.lseek(descriptor, 0, os.SEEK_CUR) - count
            self._note("write", self._path_of(descriptor), offset=offset, data=bytes(memoryview(data)[:count]))
            return count

    def pwrite(self, descriptor, data, offset):
        with self._lock:
            count = os.pwrite(descriptor, data, offset)
            self._note("write", self._path_of(descriptor), offset=offset, data=bytes(memoryview(data)[:count]))
            return count

    def ftruncate(self, descriptor, size):
        with self._lock:
            os.ftruncate(descriptor, size)
            self._note("truncate", self._path_of(descriptor), offset=size)

    def fsync(self, descriptor):
        with self._lock:
            os.fsync(descriptor)
            is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            self._note("sync_dir" if is_directory else "sync", self._path_of(descriptor))

    def _note(self, kind: str, path: str | None, **more) -> None:
        if path is not None and (path or kind == "sync_dir"):
            self.operations.append(Operation(kind, path, **more))

    def _place(self, path, dir_fd: int | None) -> str | None:
        directory = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        return self._below(os.path.join(directory, path))

    def _path_of(self, descriptor: int) -> str | None:
        return self._below(os.readlink(f"/proc/self/fd/{descriptor}"))

    def _below(self, path: str) -> str | None:
        relative = os.path.relpath(path, self.root)
        if relative == ".":
            return ""
        return None if relative.startswith("..") or path.endswith(" (deleted)") else relative


class RecordingStorage(LocalStorage):
    """``LocalStorage`` whose system calls are recorded. Nothing else about it differs."""

    def __init__(self, root, *, direct_io: bool | None = False, recorder: Recorder | None = None) -> None:
        super().__init__(root, direct_io=direct_io)
        self.recorder = recorder or Recorder(self.root)
        self._os = self.recorder

    @property
    def operations(self) -> list[Operation]:
        """All calls so far; its length is the k of "now"."""
        return self.recorder.operations

    def materialise(self, k: int, variant: str, directory) -> None:
        """Build in `directory` (new) what could be found after a power cut behind the first `k` operations."""
        tree = self.recorder.initial.copy({})
        for operation in self.operations[:k]:
            _replay(tree, operation)
        tree.build(os.fspath(directory), _survivor(variant))

    def cuts(self, variants: Iterable[str]) -> Iterator[tuple[int, str, dict[str, bytes | None]]]:
        """(k, variant, {path: bytes, None for a directory}) for every k and each of `variants`, in one pass."""
        tree = self.recorder.initial.copy({})
        for k in range(len(self.operations) + 1):
            if k:
                _replay(tree, self.operations[k - 1])
            for variant in variants:
                found: dict[str, bytes | None] = {}
                tree.collect("", _survivor(variant), found)
                yield k, variant, found


@dataclass(eq=False)
class _Node:
    """A file or directory: its durable state, and the changes since."""

    is_directory: bool
    content: bytes = b""
    entries: dict[str, _Node] = field(default_factory=dict)
    # file: (offset, data) or (size, None); directory: {name: node or None}
    pending: list = field(default_factory=list)

    @classmethod
    def load(cls, path: str) -> _Node:
        if not os.path.isdir(path):
            with open(path, "rb") as file:
                return cls(is_directory=False, content=file.read())
        return cls(is_directory=True, entries={n: cls.load(os.path.join(path, n)) for n in os.listdir(path)})

    def copy(self, memo: dict[int, _Node]) -> _Node:
        if id(self) not in memo:
            entries = {name: node.copy(memo) for name, node in self.entries.items()}
            memo[id(self)] = _Node(self.is_directory, self.content, entries)
        return memo[id(self)]

    def with_changes(self, changes: list) -> dict[str, _Node]:
        entries = dict(self.entries)
        for change in changes:
            for name, node in change.items():
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node
        return entries

    @property
    def live(self) -> dict[str, _Node]:
        return self.with_changes(self.pending)

    def at(self, path: str) -> _Node:
        node = self
        for part in filter(None, path.split("/")):
            node = node.live[part]
        return node

    def sync(self) -> None:
        if self.is_directory:
            self.entries = self.live
        else:
            self.content = _written(self.content, self.pending)
        self.pending = []

    def build(self, path: str, survivor) -> None:
        names, data = survivor
        if not self.is_directory:
            with open(path, "wb") as file:
                file.write(data(self))
            return
        os.makedirs(path)
        for name, node in self.with_changes(names(self.pending)).items():
            node.build(os.path.join(path, name), survivor)

    def collect(self, path: str, survivor, found: dict[str, bytes | None]) -> None:
        names, data = survivor
        found[path] = None if self.is_directory else data(self)
        if self.is_directory:
            for name, node in self.with_changes(names(self.pending)).items():
                node.collect(f"{path}/{name}", survivor, found)


def _written(content: bytes, changes) -> bytes:
    result = bytearray(content)
    for offset, data in changes:
        end = offset + len(data or b"")
        if data is None:
            del result[end:]
        result.extend(bytes(max(0, end - len(result))))
        if data is not None:
            result[offset:end] = data
    return bytes(result)


def _replay(tree: _Node, operation: Operation) -> None:
    if operation.kind in ("sync", "sync_dir"):
        tree.at(operation.path).sync()
        return
    if operation.kind in ("write", "truncate"):
        data = operation.data if operation.kind == "write" else None
        tree.at(operation.path).pending.append((operation.offset, data))
        return
    parent_path, name = os.path.split(operation.path)
    parent = tree.at(parent_path)
    if operation.kind in ("mkdir", "create"):
        parent.pending.append({name: _Node(is_directory=operation.kind == "mkdir")})
    elif operation.kind in ("unlink", "rmdir"):
        parent.pending.append({name: None})
    else:
        target_path, target = os.path.split(operation.target)
        node, target_parent = parent.live[name], tree.at(target_path)
        if operation.kind == "link":
            target_parent.pending.append({target: node})
        elif target_parent is parent:
            parent.pending.append({name: None, target: node})
        else:
            target_parent.pending.append({target: node})
            parent.pending.append({name: None})


def _survivor(variant: str):
    """(changes of names that survive, bytes of a file that survive) for one kind of power cut."""
    if variant == NOTHING_UNSYNCED:
        return (lambda changes: []), (lambda node: node.content)
    if variant == METADATA_EMPTY:
        return (lambda changes: changes), (lambda node: node.content)
    if variant == METADATA_ZEROS:
        return (lambda changes: changes), _zeros
    if variant == TORN:
        return (lambda changes: changes), _half
    if variant == EVERYTHING:
        return (lambda changes: changes), (lambda node: _written(node.content, node.pending))
    generator = random.Random(int(variant.removeprefix("random:")))

    def some_names(changes):
        return changes[: generator.randint(0, len(changes))]

    def some_data(node):
        kept = [(at, data) for at, data in node.pending if generator.random() < 0.5]
        if kept and kept[-1][1] and generator.random() < 0.5:
            at, data = kept[-1]
            kept[-1] = (at, data[: generator.randint(0, len(data))])
        return _written(node.content, kept)

    return some_names, some_data


def _zeros(node: _Node) -> bytes:
    """The file's new length is kept, the new bytes are not."""
    size = len(_written(node.content, node.pending))
    return (node.content + bytes(max(0, size - len(node.content))))[:size]


def _half(node: _Node) -> bytes:
    """Half the writes, the last of them half."""
    kept = node.pending[: (len(node.pending) + 1) // 2]
    if kept and kept[-1][1]:
        at, data = kept[-1]
        kept[-1] = (at, data[: len(data) // 2])
    return _written(node.content, kept)
