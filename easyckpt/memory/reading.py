"""Looking into slots, also those of other processes: verify first, then believe."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from easyckpt.errors import DamagedCheckpoint
from easyckpt.memory import header
from easyckpt.memory.files import open_checked
from easyckpt.memory.header import HEADER_BYTES, SlotMeta
from easyckpt.memory.mapping import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class SlotView:
    """A sealed snapshot. `image` is read-only and stays readable even when the slot is closed or removed.

    The image's bytes are those of the slot: while somebody may reuse it, ask `still_sealed` after reading.
    """

    meta: SlotMeta
    static: bytes
    objects: bytes
    image: memoryview
    _word: memoryview = dataclasses.field(repr=False, compare=False)
    _sealed: bytes = dataclasses.field(repr=False, compare=False)

    def body(self, nbytes: int) -> tuple[memoryview, ...]:
        """The first `nbytes` of the image, in parts."""
        return (self.image[:nbytes],)

    def at(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of the leaf that lies at `offset`."""
        return self.image[offset : offset + nbytes]

    def still_sealed(self) -> bool:
        """Whether the slot has held this same snapshot up to now. Raises ValueError after `close`."""
        return bytes(self._word) == self._sealed

    def close(self) -> None:
        """Let go of the image; slices of it that are still in use stay valid."""
        for view in (self.image, self._word):
            with contextlib.suppress(BufferError):
                view.release()


def read_tail(sealed: header.Header, tail: memoryview, where: str) -> tuple[bytes, bytes]:
    """The verified (static, object) bytes out of a slot's tail. Raises DamagedCheckpoint."""
    meta = sealed.meta
    static = bytes(tail[: meta.static_bytes])
    objects = bytes(tail[meta.static_bytes : meta.static_bytes + meta.objects_bytes])
    for name, data, expected in (
        ("static", static, sealed.static_digest),
        ("object", objects, sealed.objects_digest),
    ):
        if header.digest(data) != expected:
            raise DamagedCheckpoint(f"{where}: the slot's {name} bytes do not match their checksum (step {meta.step})")
    return static, objects


@contextlib.contextmanager
def _opened(path: str, user_only: bool) -> Iterator[tuple[int, os.stat_result] | None]:
    try:
        fd, found = open_checked(path, os.O_RDONLY, user_only=user_only)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd, found
    finally:
        os.close(fd)


def _stable_header(fd: int, found: os.stat_result, path: str) -> header.Header | None:
    """The verified header, or None when the slot is not sealed or changed while it was read."""
    page = os.pread(fd, HEADER_BYTES, 0)
    while True:
        try:
            sealed = header.parse_sealed(page, found.st_size, path)
        except DamagedCheckpoint:
            again = os.pread(fd, HEADER_BYTES, 0)
            if again == page:
                raise
            page = again  # torn by its writer while it was read, not damaged
            continue
        return sealed if sealed is not None and _unchanged(fd, sealed) else None


def _unchanged(fd: int, sealed: header.Header) -> bool:
    return os.pread(fd, 8, header.WORD_OFFSET) == header.sealed_word(sealed.sequence)


def peek(path: str, *, user_only: bool = True) -> SlotMeta | None:
    """What a slot's header says, without a look at the rest; None when it is not sealed, changing, or gone.

    Raises FormatError (DamagedCheckpoint, ForeignFormat, NewerFormat) with the reason for not believing it.
    """
    with _opened(path, user_only) as opened:
        if opened is None:
            return None
        sealed = _stable_header(*opened, path)
        return None if sealed is None else sealed.meta


def open_slot(path: str, *, user_only: bool = True) -> SlotView | None:
    """Read another process's slot: verified header, static and object bytes, and its image read-only.

    None when it is not sealed, changing, or gone. Raises FormatError as `peek` does.
    """
    with _opened(path, user_only) as opened:
        if opened is None:
            return None
        fd, found = opened
        sealed = _stable_header(fd, found, path)
        if sealed is None:
            return None
        meta, start = sealed.meta, HEADER_BYTES + sealed.image_capacity
        tail = memoryview(os.pread(fd, meta.static_bytes + meta.objects_bytes, start))
        try:
            static, objects = read_tail(sealed, tail, path)
        except DamagedCheckpoint:
            if not _unchanged(fd, sealed):
                return None
            raise
        mapping = Mapping(fd, 0, start, writable=False)
    image = mapping.view()
    return SlotView(
        meta,
        static,
        objects,
        image[HEADER_BYTES : HEADER_BYTES + meta.image_bytes],
        image[header.WORD_OFFSET : header.BODY_OFFSET],
        header.sealed_word(sealed.sequence),
    )
