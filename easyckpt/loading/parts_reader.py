"""Reading one rank's part of a checkpoint whose files have another framework's layout: see `easyckpt.format.parts`.

No file is interpreted: the part says which bytes of it are which tensor. Every file that holds some is read once, as a
whole, and compared with the checksum in the manifest before anything out of it is given away. Rank 0 reads all files.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.checksum import CHUNK_BYTES, chunk_digests, file_digest
from easyckpt.format.image import align
from easyckpt.format.manifest import FileRecord
from easyckpt.format.parts import CARRIED, Part, locate, read_part
from easyckpt.loading.reader import Submit, agreed_manifest, fresh_memory, run_now
from easyckpt.loading.snapshot import Snapshot
from easyckpt.storage.base import Storage


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes of a file, and their place in the image."""

    begin: int
    nbytes: int
    place: int


def open_parts(
    storage: Storage,
    directory: str,
    *,
    rank: int,
    world_size: int,
    attempt: str | None = None,
    image: memoryview | None = None,
    submit: Submit = run_now,
) -> Snapshot:
    """As `reader.open_storage`, which see. Raises DamagedCheckpoint naming the file."""
    where = os.path.join(storage.root, directory)
    manifest = agreed_manifest(storage, directory, attempt, world_size)
    if not manifest.parts:
        raise DamagedCheckpoint(
            f"{where} holds a model only (save_only_model): training cannot go on from it; from_pretrained loads its "
            "weights for a train() without resume_from_checkpoint. Set save_only_model=False to resume jobs"
        )
    if len(manifest.parts) != manifest.world_size:
        raise DamagedCheckpoint(f"{where}: its manifest does not hold a part for each of {manifest.world_size} ranks")
    part = read_part(manifest.parts, rank, manifest.files)
    first = part if rank == 0 else read_part(manifest.parts, 0, manifest.files)
    if image is None or image.nbytes < part.layout.image_bytes:
        image = fresh_memory(align(part.layout.image_bytes), present=True)
    copies = _copies(part, first, where, image)
    for name in sorted(manifest.files if rank == 0 else copies):
        _read_file(storage, f"{directory}/{name}", manifest.files[name], copies.get(name, ()), image, submit=submit)
    return Snapshot(
        step=manifest.step,
        timeline=manifest.timeline,
        layout=part.layout,
        objects=part.objects,
        image=image,
        places=[leaf.offset for leaf in part.layout.leaves],
    )


def _copies(part: Part, first: Part, where: str, image: memoryview) -> dict[str, list[_Copy]]:
    """What is to be read of each file; carried bytes are put in their places at once."""
    try:
        located = locate(part, first)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{where}: {error}") from None
    copies: dict[str, list[_Copy]] = {}
    for leaf, (owner, (name, offset)) in zip(part.layout.leaves, located, strict=True):
        if name != CARRIED:
            copies.setdefault(name, []).append(_Copy(offset, leaf.nbytes, leaf.offset))
        elif leaf.nbytes:
            image[leaf.offset : leaf.offset + leaf.nbytes] = owner.carried[offset : offset + leaf.nbytes]
    for found in copies.values():
        found.sort(key=lambda copy: copy.begin)
    return copies


def _read_file(
    storage: Storage, path: str, record: FileRecord, copies: Sequence[_Copy], image: memoryview, *, submit: Submit
) -> None:
    try:
        storage.drop_cache(path)
        with storage.reader(path) as reader:
            if reader.size != record.size:
                raise DamagedCheckpoint(
                    f"{storage.root}/{path} has {reader.size} bytes, the manifest says {record.size}"
                )
            digests = _digests(reader.read_into, record.size, copies, image, submit)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{storage.root}/{path} is missing") from None
    if file_digest(record.size, digests) != record.digest:
        raise DamagedCheckpoint(f"{storage.root}/{path}: its bytes are not those that were committed")


def _digests(
    read_into: Callable[[memoryview, int], int],
    size: int,
    copies: Sequence[_Copy],
    image: memoryview,
    submit: Submit,
) -> list[str]:
    """Checksums of a file's chunks, each made while the next one is read; what `copies` name goes to the image."""
    digests: list[str] = []
    memories = [memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(2)]
    waiting: deque[Future[list[str]]] = deque()
    first = 0
    try:
        for number, begin in enumerate(range(0, size, CHUNK_BYTES)):
            if len(waiting) == len(memories):
                digests += waiting.popleft().result()
            memory = memories[number % len(memories)]
            piece = memory[: min(read_into(memory, begin), size - begin)]
            waiting.append(submit(functools.partial(chunk_digests, [piece])))
            while first < len(copies) and copies[first].begin + copies[first].nbytes <= begin:
                first += 1
            _copy_out(piece, begin, copies[first:], image)
    finally:
        wait(waiting)  # also after an error: the memory must not be used behind the caller's back
    for future in waiting:
        digests += future.result()
    return digests


def _copy_out(piece: memoryview, begin: int, copies: Sequence[_Copy], image: memoryview) -> None:
    """Put what `copies` name of the file's bytes from `begin` on, which are `piece`, in its places."""
    end = begin + piece.nbytes
    for copy in copies:
        if copy.begin >= end:
            break
        low, high = max(copy.begin, begin), min(copy.begin + copy.nbytes, end)
        if low < high:
            place = copy.place + low - copy.begin
            image[place : place + high - low] = piece[low - begin : high - begin]
