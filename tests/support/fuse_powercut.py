"""A small file system that forgets on a power cut what was not synced: bytes of files, and names in directories.

``python fuse_powercut.py MOUNTPOINT BACKING --cut-after N --seed S`` mounts what lies in BACKING. Everything then
lives in memory, each file and directory with its durable state and the changes since. Right before the N-th changing
call the power goes: what the disk could still have is written to BACKING, and the process is gone without a word.
An ordinary unmount writes everything and the number of changing calls (to BACKING + ".calls").

Seed 0 keeps nothing that was not synced. Any other keeps some of it, drawn by the seed: of each directory the first
so many changes, of each file any of its writes, the last of them perhaps torn.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Node:
    def __init__(self, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.data = bytearray()
        self.durable_data = b""
        self.writes: list[tuple[int, bytes | None]] = []  # (offset, bytes), or (new size, None)
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, Node] = {}
        self.changes: list[dict[str, Node | None]] = []
        self.links = 1

    @classmethod
    def load(cls, path: Path) -> Node:
        node = cls(path.is_dir())
        if node.is_directory:
            node.names = {child.name: cls.load(child) for child in path.iterdir()}
            node.durable_names = dict(node.names)
        else:
            node.durable_data = path.read_bytes()
            node.data = bytearray(node.durable_data)
        return node

    def change(self, change: dict[str, Node | None]) -> None:
        self.changes.append(change)
        _apply_names(self.names, change)

    def write(self, offset: int, data: bytes | None) -> None:
        self.writes.append((offset, data))
        _apply_write(self.data, offset, data)

    def sync(self) -> None:
        self.durable_data, self.writes = bytes(self.data), []
        self.durable_names, self.changes = dict(self.names), []

    def survive(self, path: Path, generator: random.Random | None) -> None:
        """Write to `path` what is there after the cut."""
        if not self.is_directory:
            path.write_bytes(self._surviving_data(generator))
            return
        path.mkdir()
        names = dict(self.durable_names)
        for change in self.changes[: generator.randint(0, len(self.changes)) if generator else 0]:
            _apply_names(names, change)
        for name, node in names.items():
            node.survive(path / name, generator)

    def _surviving_data(self, generator: random.Random | None) -> bytes:
        data = bytearray(self.durable_data)
        kept = [write for write in self.writes if generator and generator.random() < 0.5]
        for number, (offset, piece) in enumerate(kept):
            torn = piece and generator and number == len(kept) - 1
            _apply_write(data, offset, piece[: generator.randint(0, len(piece))] if torn else piece)
        return bytes(data)


def _apply_names(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _apply_write(data: bytearray, offset: int, piece: bytes | None) -> None:
    end = offset if piece is None else offset + len(piece)
    data.extend(bytes(max(0, end - len(data))))
    if piece is None:
        del data[offset:]
    else:
        data[offset:end] = piece


def serve(mountpoint: str, backing: Path, cut_after: int, seed: int) -> None:
    import mfusepy

    class PowerCut(mfusepy.Operations):
        use_ns = True

        def __init__(self) -> None:
            self.root = Node.load(backing)
            self.calls = 0
            self.open_nodes: dict[int, Node] = {}
            self.next_handle = 1

        # Finding.

        def at(self, path: str) -> Node:
            node = self.root
            for part in filter(None, path.split("/")):
                if part not in node.names:
                    raise mfusepy.FuseOSError(errno.ENOENT)
                node = node.names[part]
            return node

        def split(self, path: str) -> tuple[Node, str]:
            parent, _, name = path.rpartition("/")
            return self.at(parent), name

        def handle(self, node: Node) -> int:
            self.next_handle += 1
            self.open_nodes[self.next_handle] = node
            return self.next_handle

        def changing(self) -> None:
            self.calls += 1
            if self.calls == cut_after:
                shutil.rmtree(backing)
                self.root.survive(backing, random.Random(seed) if seed else None)
                os._exit(0)

        # What easyckpt calls.

        def getattr(self, path, fh=None):
            node = self.open_nodes[fh] if fh in self.open_nodes else self.at(path)
            kind = stat.S_IFDIR | 0o755 if node.is_directory else stat.S_IFREG | 0o644
            links = 2 if node.is_directory else node.links
            return {"st_mode": kind, "st_nlink": links, "st_size": len(node.data), "st_uid": os.getuid()}

        def readdir(self, path, fh):
            return [".", "..", *self.at(path).names]

        def statfs(self, path):
            return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1 << 20, "f_bfree": 1 << 20, "f_bavail": 1 << 20}

        def open(self, path, flags):
            return self.handle(self.at(path))

        def opendir(self, path):
            return self.handle(self.at(path))

        def release(self, path, fh):
            self.open_nodes.pop(fh, None)
            return 0

        releasedir = release

        def read(self, path, size, offset, fh):
            return bytes(self.open_nodes[fh].data[offset : offset + size])

        def create(self, path, mode, fi=None):
            self.changing()
            parent, name = self.split(path)
            parent.change({name: Node(is_directory=False)})
            return self.handle(parent.names[name])

        def mkdir(self, path, mode):
            self.changing()
            parent, name = self.split(path)
            parent.change({name: Node(is_directory=True)})

        def write(self, path, data, offset, fh):
            self.changing()
            self.open_nodes[fh].write(offset, bytes(data))
            return len(data)

        def truncate(self, path, length, fh=None):
            self.changing()
            node = self.open_nodes[fh] if fh in self.open_nodes else self.at(path)
            node.write(length, None)

        def rename(self, old, new, *_):
            self.changing()
            source, name = self.split(old)
            target, new_name = self.split(new)
            node = source.names[name]
            taken = target.names.get(new_name)
            if taken is not None and taken.is_directory and taken.names:
                raise mfusepy.FuseOSError(errno.ENOTEMPTY)
            if source is target:
                source.change({name: None, new_name: node})
            else:
                target.change({new_name: node})
                source.change({name: None})

        def link(self, target, source):
            self.changing()
            parent, name = self.split(target)
            if name in parent.names:
                raise mfusepy.FuseOSError(errno.EEXIST)
            node = self.at(source)
            node.links += 1
            parent.change({name: node})

        def unlink(self, path):
            self.changing()
            parent, name = self.split(path)
            parent.names[name].links -= 1
            parent.change({name: None})

        def rmdir(self, path):
            if self.at(path).names:
                raise mfusepy.FuseOSError(errno.ENOTEMPTY)
            self.changing()
            parent, name = self.split(path)
            parent.change({name: None})

        def fsync(self, path, datasync, fh):
            self.changing()
            self.open_nodes[fh].sync()
            return 0

        fsyncdir = fsync

        def flush(self, path, fh):
            return 0

        def chmod(self, path, mode):
            return 0

        def utimens(self, path, times=None):
            return 0

        def destroy(self, path):
            shutil.rmtree(backing)
            _sync_all(self.root)
            self.root.survive(backing, None)
            Path(f"{backing}.calls").write_text(str(self.calls))

    mfusepy.FUSE(PowerCut(), mountpoint, foreground=True, nothreads=True, hard_remove=True)


def _sync_all(node: Node) -> None:
    node.sync()
    for child in node.names.values():
        _sync_all(child)


# In the test.

WAIT_SECONDS = 30.0


def missing() -> str | None:
    """Why no such file system can be mounted here; None where it can."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError, AttributeError) as error:
        return f"mfusepy does not work here (Debian: apt-get install fuse3): {error}"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be used"
    if shutil.which("fusermount3") is None:
        return "no fusermount3 (Debian: apt-get install fuse3)"
    return None


@contextmanager
def mounted(mountpoint: Path, backing: Path, *, cut_after: int = 0, seed: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """The file system, mounted; its process has ended by itself where the power was cut."""
    mountpoint.mkdir(exist_ok=True)
    backing.mkdir(exist_ok=True)
    command = [sys.executable, __file__, str(mountpoint), str(backing), f"--cut-after={cut_after}", f"--seed={seed}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while not os.path.ismount(mountpoint):
                assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
                assert time.monotonic() < deadline, "the file system was not mounted in time"
                time.sleep(0.005)
            yield process
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=False, stderr=subprocess.DEVNULL)
            process.wait(WAIT_SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mountpoint")
    parser.add_argument("backing", type=Path)
    parser.add_argument("--cut-after", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    serve(given.mountpoint, given.backing, given.cut_after, given.seed)
