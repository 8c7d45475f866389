"""One buffer that holds one snapshot; as a file of shared memory it outlives the process that wrote it.

The file is [header page][image, padded to pages][tail: static layout bytes, then objects]. `begin` and `seal` run on
the training thread at every step, so they make no system call while the layout stays: they store into the mapping.
A process killed anywhere leaves the slot either sealed and whole, or not sealed and thus never a candidate.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import time
from collections.abc import Callable

from easyckpt import failpoints
from easyckpt.errors import DamagedCheckpoint, UsageError
from easyckpt.memory import header, pinned
from easyckpt.memory.files import allocate, open_checked
from easyckpt.memory.header import EMPTY, HEADER_BYTES, SEALED, WRITING, SlotMeta
from easyckpt.memory.mapping import PAGE, Mapping, round_up
from easyckpt.memory.reading import SlotView, open_slot, peek, read_tail

__all__ = ["Slot", "SlotMeta", "SlotView", "open_slot", "peek"]

_CREATE = failpoints.declare("slot.create", "the slot's file exists; it has no size and no header yet")
_CREATED = failpoints.declare("slot.create.header", "the slot's file has its size, but no header yet")
_BEGIN = failpoints.declare("slot.begin", "the slot says that it is being written; no byte has changed yet")
_BEFORE = failpoints.declare("slot.seal.before", "the image is complete; nothing else of the seal is written")
_GROW = failpoints.declare("slot.seal.grow", "the slot's file has grown for a longer tail; it is not mapped yet")
_STATIC = failpoints.declare("slot.seal.static", "new static bytes are in the tail")
_OBJECTS = failpoints.declare("slot.seal.objects", "the object bytes are in the tail")
_PAYLOAD = failpoints.declare("slot.seal.payload", "the whole header is written except for the word that says sealed")
_AFTER = failpoints.declare("slot.seal.after", "the slot is sealed")
_CLEAR = failpoints.declare("slot.clear", "the slot no longer holds a snapshot")


class Slot:
    """A slot that this process owns and writes. Not thread-safe: whoever acquired it uses it alone.

    In a forked child every use raises UsageError, and `close` does nothing.
    """

    #: Whether it is memory of this process alone.
    private = False

    def __init__(self, path: str, head: Mapping, tail: Mapping, inode: tuple[int, int] | None) -> None:
        """For `create` and `open`; `head` maps header and image, `tail` the rest."""
        self.path = path
        self._pid = os.getpid()
        self._inode = inode
        self._head, self._tail = head, tail
        self._page = head.view()[:HEADER_BYTES]
        self._image = head.view()[HEADER_BYTES:]
        self._tail_view = tail.view()
        self._word = ctypes.c_uint64.from_address(head.address + header.WORD_OFFSET)
        self._sequence = header.split_word(self._word.value)[1]
        self._meta: SlotMeta | None = None
        self._static_key: tuple[str, int] | None = None  # (layout digest, length) of what the tail holds
        self._static_digest = ""
        self._closed = False
        self.lost = False
        """Somebody else has removed the file: what is in it dies with this process."""

    @classmethod
    def create(cls, path: str, image_capacity: int, tail_capacity: int) -> Slot:
        """Make a new empty slot, all of its memory reserved. Raises FileExistsError or OutOfSpace, leaving nothing."""
        image_capacity = max(PAGE, round_up(image_capacity))
        end = HEADER_BYTES + image_capacity + max(PAGE, round_up(tail_capacity))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            failpoints.hit(_CREATE)
            allocate(fd, 0, end, path)
            failpoints.hit(_CREATED)
            os.pwrite(fd, header.pack_empty(image_capacity), 0)
            return cls._map(path, fd, image_capacity, end)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: str) -> Slot:
        """Take over a slot that a dead process of this user left, sealed (and verified) or not.

        A slot that is not sealed comes back empty. Raises FormatError when it cannot be trusted. The caller holds the
        arena's owner lock: two writers of one slot would destroy each other's snapshots.
        """
        fd, found = open_checked(path, os.O_RDWR)
        try:
            page = os.pread(fd, HEADER_BYTES, 0)
            geometry = header.parse_geometry(page, found.st_size, path)
            sealed = header.parse_sealed(page, found.st_size, path)
            if found.st_blocks * 512 < found.st_size:  # holes: a store into one could find the memory full
                allocate(fd, 0, found.st_size, path)
            slot = cls._map(path, fd, geometry.image_capacity, found.st_size)
        finally:
            os.close(fd)
        if sealed is None:
            slot.clear()
            return slot
        try:
            read_tail(sealed, slot._tail_view, path)
        except DamagedCheckpoint:
            slot.close(unlink=False)
            raise
        slot._meta = sealed.meta
        slot._static_key = (sealed.meta.layout_digest, sealed.meta.static_bytes)
        slot._static_digest = sealed.static_digest
        return slot

    @classmethod
    def _map(cls, path: str, fd: int, image_capacity: int, end: int) -> Slot:
        found = os.fstat(fd)
        head_bytes = HEADER_BYTES + image_capacity
        # The tail is a mapping of its own: it can grow and move while the image stays where it is.
        tail_bytes = max(PAGE, (end - head_bytes) // PAGE * PAGE)
        if end < head_bytes + tail_bytes:
            raise DamagedCheckpoint(f"{path}: the slot has no tail")
        return cls(path, Mapping(fd, 0, head_bytes), Mapping(fd, head_bytes, tail_bytes), (found.st_dev, found.st_ino))

    @property
    def image(self) -> memoryview:
        """The writable image, page-aligned, `image_capacity` bytes long. It never moves."""
        self._check_usable()
        return self._image

    @property
    def address(self) -> int:
        """Where the image lies. Hold `image` for as long as the address is in use."""
        return self._head.address + HEADER_BYTES

    @property
    def image_capacity(self) -> int:
        """Bytes that the image can hold."""
        return self._head.nbytes - HEADER_BYTES

    @property
    def nbytes(self) -> int:
        """All memory of the slot."""
        return self._head.nbytes + self._tail.nbytes

    @property
    def survives(self) -> bool:
        """Whether a snapshot in it survives the death of this process, as far as is known."""
        return not self.private and not self.lost

    def is_in_place(self) -> bool:
        """Whether the file is still where it was made."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._inode

    @property
    def meta(self) -> SlotMeta | None:
        """What the slot holds; None unless it is sealed."""
        return self._meta

    @property
    def sequence(self) -> int:
        """Changes with every begin, seal and clear."""
        return self._sequence

    @property
    def writing(self) -> bool:
        """Whether a snapshot was begun and neither sealed nor cleared."""
        return self._sequence % 2 == 1

    def populate(self, threads: int = 1, stop: Callable[[], bool] = lambda: False) -> None:
        """Have all pages present; slow (first touch), so call it from a background thread. Raises OutOfSpace."""
        self._check_usable()
        self._head.populate(threads=threads, stop=stop)
        self._tail.populate(stop=stop)

    def pin(self) -> bool:
        """Page-lock the image for the GPU; False without CUDA. Unpinned when it is unmapped. Raises StorageError."""
        self._check_usable()
        address, nbytes = self.address, self.image_capacity
        if not pinned.register(address, nbytes):
            return False
        self._head.before_unmap(functools.partial(pinned.unregister, address))
        return True

    def begin(self) -> None:
        """Mark the slot as being written. Call it before the first byte of the image changes."""
        self._check_usable()
        if self._sequence % 2:
            raise UsageError("a snapshot was begun in this slot and not ended: seal or clear it first")
        self._meta = None  # first: other threads ask `meta` whether it is sealed
        self._store(WRITING, self._sequence + 1)
        failpoints.hit(_BEGIN)

    def seal(self, meta: SlotMeta, static: bytes, objects: bytes) -> SlotMeta:
        """End a snapshot: from here on it survives the process and is a candidate. Returns what the header says.

        `static` must be the same bytes whenever `meta.layout_digest` is the same: they are written only on a change.
        Raises OutOfSpace when the tail cannot grow; the slot is then still "being written": clear it.
        """
        self._check_usable()
        if not self._sequence % 2:
            raise UsageError("seal() without begin(): this slot is not being written")
        if meta.image_bytes > self.image_capacity:
            raise UsageError(f"an image of {meta.image_bytes} bytes does not fit a slot for {self.image_capacity}")
        failpoints.hit(_BEFORE)
        end = len(static) + len(objects)
        if end > self._tail.nbytes:
            self._grow_tail(round_up(end + end // 2))
        self._write_static(meta.layout_digest, static)
        self._tail_view[len(static) : end] = objects
        failpoints.hit(_OBJECTS)
        meta = dataclasses.replace(
            meta, static_bytes=len(static), objects_bytes=len(objects), sealed_at=meta.sealed_at or time.time()
        )
        sequence = (self._sequence + 1) & 0xFFFFFFFF
        page = header.pack_sealed(meta, self.image_capacity, sequence, self._static_digest, header.digest(objects))
        self._page[: header.WORD_OFFSET] = page[: header.WORD_OFFSET]
        self._page[header.BODY_OFFSET :] = page[header.BODY_OFFSET :]
        failpoints.hit(_PAYLOAD)
        self._store(SEALED, sequence)
        self._meta = meta
        failpoints.hit(_AFTER)
        return meta

    def clear(self) -> None:
        """Give up what the slot holds, sealed or half-written."""
        self._check_usable()
        self._meta = None
        self._store(EMPTY, self._sequence + 2 - self._sequence % 2)
        failpoints.hit(_CLEAR)

    def view(self) -> SlotView:
        """The sealed snapshot, without a second look at its checksums. Raises UsageError when there is none."""
        self._check_usable()
        meta = self._meta
        if meta is None:
            raise UsageError("this slot holds no sealed snapshot")
        end = meta.static_bytes + meta.objects_bytes
        return SlotView(
            meta,
            bytes(self._tail_view[: meta.static_bytes]),
            bytes(self._tail_view[meta.static_bytes : end]),
            self._image[: meta.image_bytes].toreadonly(),
            self._page[header.WORD_OFFSET : header.BODY_OFFSET].toreadonly(),
            header.sealed_word(self._sequence),
        )

    def close(self, unlink: bool) -> None:
        """Let go of the memory (once the last view of it is gone), and remove the file if `unlink`."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if unlink:
            self._unlink()
        del self._page, self._image, self._tail_view, self._word
        self._head.close()
        self._tail.close()

    def _store(self, state: int, sequence: int) -> None:
        self._sequence = sequence & 0xFFFFFFFF
        self._word.value = header.word(state, sequence)

    def _write_static(self, layout_digest: str, static: bytes) -> None:
        key = (layout_digest, len(static))
        if key == self._static_key:
            return
        self._static_key = None
        self._tail_view[: len(static)] = static
        self._static_digest = header.digest(static)
        self._static_key = key
        failpoints.hit(_STATIC)

    def _grow_tail(self, nbytes: int) -> None:
        self.lost = self.lost or not os.path.lexists(self.path)
        if self.lost:
            self._grow_tail_privately(nbytes)
            return
        fd, found = open_checked(self.path, os.O_RDWR)
        try:
            if (found.st_dev, found.st_ino) != self._inode:
                raise DamagedCheckpoint(f"{self.path}: somebody replaced the file of a snapshot slot in use")
            start = HEADER_BYTES + self.image_capacity
            allocate(fd, found.st_size, start + nbytes, self.path)
            failpoints.hit(_GROW)
            tail = Mapping(fd, start, nbytes)
        finally:
            os.close(fd)
        self._replace_tail(tail)

    def _grow_tail_privately(self, nbytes: int) -> None:
        self._static_key = None  # the new memory does not hold them
        self._replace_tail(Mapping(None, 0, nbytes))

    def _replace_tail(self, tail: Mapping) -> None:
        old, self._tail = self._tail, tail
        self._tail_view = tail.view()
        old.close()

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.is_in_place():
                os.unlink(self.path)

    def _check_usable(self) -> None:
        if self._closed:
            raise UsageError("this snapshot slot is closed")
        if os.getpid() != self._pid:
            raise UsageError("a forked child cannot use its parent's snapshot slots")
