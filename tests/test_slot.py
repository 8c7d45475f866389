"""A slot is whole and sealed, or never a candidate: after kills, with full memory, with damaged headers."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import random
import signal
import statistics
import struct
import time

import pytest
from support.forked import Forked
from support.tmpfs import tmpfs

from easyckpt import failpoints
from easyckpt.errors import DamagedCheckpoint, ForeignFormat, FormatError, NewerFormat, OutOfSpace, UsageError
from easyckpt.memory import header, pinned
from easyckpt.memory.header import HEADER_BYTES, SlotMeta
from easyckpt.memory.mapping import PAGE, Mapping
from easyckpt.memory.private_slot import PrivateSlot
from easyckpt.memory.slot import Slot, open_slot, peek

__all__ = ["tmpfs"]

RUN = "a" * 32
IMAGE = 3 * PAGE + 17
META = SlotMeta(
    run=RUN,
    arena_id="aaaaaaaaaaaa-01234567",
    incarnation="i1",
    timeline="t1",
    step=7,
    rank=0,
    world_size=1,
    layout_digest="d1",
    image_bytes=IMAGE,
)


def snapshot(slot: Slot, step: int, objects: bytes = b"objects", static: bytes = b"static", **fields) -> SlotMeta:
    slot.begin()
    slot.image[:IMAGE] = bytes([step % 251]) * IMAGE
    return slot.seal(dataclasses.replace(META, step=step, **fields), static, objects)


@pytest.fixture
def path(memory_dir):
    return str(memory_dir / "slot")


@pytest.fixture(params=[Slot, PrivateSlot])
def slot(request, path):
    made = request.param.create(path, IMAGE, 100)
    yield made
    made.close(unlink=True)


def mapped_bytes(path: str) -> int:
    """How much of this process's address space is mapped from `path`."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if path in line:
                start, _, end = line.split()[0].partition("-")
                total += int(end, 16) - int(start, 16)
    return total


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# What a slot holds.


def test_round_trip(slot):
    meta = snapshot(slot, 9, image_digest="xxh3:00")
    assert (meta.step, meta.static_bytes, meta.objects_bytes, meta.image_digest) == (9, 6, 7, "xxh3:00")
    assert abs(meta.sealed_at - time.time()) < 60
    view = slot.view()
    assert (view.meta, view.static, view.objects) == (meta, b"static", b"objects")
    assert view.image == bytes([9]) * IMAGE
    assert view.image.readonly
    assert view.still_sealed()
    slot.begin()
    assert not view.still_sealed()
    assert slot.meta is None
    assert slot.writing


def test_another_reader_sees_the_same(path):
    slot = Slot.create(path, IMAGE, 100)
    assert peek(path) is None
    assert open_slot(path) is None
    meta = snapshot(slot, 9)
    view = open_slot(path)
    assert view is not None
    assert peek(path) == view.meta == meta
    assert (view.static, view.objects, bytes(view.image)) == (b"static", b"objects", bytes([9]) * IMAGE)
    assert view.image.readonly
    assert view.still_sealed()
    slot.begin()
    assert peek(path) is None
    assert open_slot(path) is None
    assert not view.still_sealed()
    slot.clear()
    assert peek(path) is None
    slot.close(unlink=True)
    assert peek(path) is None
    assert open_slot(path) is None


def test_image_is_page_aligned_writable_and_named_by_its_address(slot):
    assert slot.address % PAGE == 0
    assert slot.image_capacity == 4 * PAGE == len(slot.image)
    slot.image[5] = 77
    import ctypes

    assert ctypes.string_at(slot.address + 5, 1) == b"M"


def test_static_bytes_are_written_only_when_the_layout_changes(slot):
    snapshot(slot, 1, static=b"first!", layout_digest="d1")
    snapshot(slot, 2, static=b"FIRST!", layout_digest="d1")  # (a caller may not do this; it shows what is not written)
    assert slot.view().static == b"first!"
    snapshot(slot, 3, static=b"second", layout_digest="d2")
    assert slot.view().static == b"second"
    snapshot(slot, 4, static=b"longer than before", objects=b"", layout_digest="d3")
    assert (slot.view().static, slot.view().objects) == (b"longer than before", b"")


def test_image_never_moves_when_the_tail_grows(slot):
    snapshot(slot, 1)
    view, address = slot.image, slot.address
    objects = random.Random(1).randbytes(300_000)
    snapshot(slot, 2, objects=objects)
    assert slot.address == address
    assert view[0] == 2
    seen = slot.view()
    assert (seen.static, seen.objects) == (b"static", objects)
    if isinstance(slot, PrivateSlot):
        return
    assert open_slot(slot.path).objects == objects
    assert os.stat(slot.path).st_blocks * 512 >= slot.nbytes


def test_populate_keeps_contents(slot):
    snapshot(slot, 5)
    slot.populate()
    slot.populate(threads=2)
    assert slot.view().image == bytes([5]) * IMAGE
    assert slot.view().objects == b"objects"


def test_populate_on_a_kernel_without_the_call(slot, monkeypatch):
    import ctypes

    from easyckpt.memory import mapping

    class OldKernel:
        def madvise(self, *_):
            ctypes.set_errno(errno.EINVAL)
            return -1

    snapshot(slot, 5)
    monkeypatch.setattr(mapping, "_libc", OldKernel())
    slot.populate()
    monkeypatch.undo()
    assert slot.view().image == bytes([5]) * IMAGE


def test_populate_makes_pages_resident(slot):
    assert not all(present(slot))
    slot.populate()
    assert all(present(slot))


def present(slot) -> list[bool]:
    """By page of the image: whether the kernel has it in memory for this process."""
    pages = slot.image_capacity // PAGE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(slot.address // PAGE * 8)
        entries = pagemap.read(pages * 8)
    return [entry >> 63 == 1 for entry in struct.unpack(f"{pages}Q", entries)]


def test_calls_in_the_wrong_order(slot):
    with pytest.raises(UsageError, match="without begin"):
        slot.seal(META, b"", b"")
    with pytest.raises(UsageError, match="no sealed snapshot"):
        slot.view()
    slot.begin()
    with pytest.raises(UsageError, match="begun"):
        slot.begin()
    with pytest.raises(UsageError, match="does not fit"):
        slot.seal(dataclasses.replace(META, image_bytes=slot.image_capacity + 1), b"", b"")
    with pytest.raises(UsageError, match="shorten"):
        slot.seal(dataclasses.replace(META, run="r" * 5000), b"", b"")
    slot.clear()
    slot.close(unlink=True)
    slot.close(unlink=True)
    with pytest.raises(UsageError, match="closed"):
        slot.begin()
    with pytest.raises(UsageError, match="closed"):
        slot.image


def test_create_refuses_what_is_there(path):
    os.symlink("/nowhere", path)
    with pytest.raises(FileExistsError):
        Slot.create(path, IMAGE, 1)
    assert os.path.islink(path)


def test_create_makes_private_files(path):
    os.umask(0o000)
    slot = Slot.create(path, IMAGE, 1)
    os.umask(0o022)
    assert os.stat(path).st_mode & 0o777 == 0o600
    slot.close(unlink=True)


# Closing.


def test_close_and_unlink_free_memory_and_descriptors(tmpfs):
    before, free = descriptors(), os.statvfs(tmpfs).f_bavail
    path = os.path.join(tmpfs, "slot")
    slot = Slot.create(path, 16 << 20, 1)
    slot.populate()
    view = slot.view_of_everything = slot.image
    assert descriptors() == before
    assert mapped_bytes(path) >= 16 << 20
    del view, slot.view_of_everything
    slot.close(unlink=True)
    assert descriptors() == before
    assert mapped_bytes(path) == 0
    assert os.statvfs(tmpfs).f_bavail == free
    assert os.listdir(tmpfs) == []


def test_views_outlive_the_slot_and_then_the_memory_goes(tmpfs):
    free = os.statvfs(tmpfs).f_bavail
    path = os.path.join(tmpfs, "slot")
    slot = Slot.create(path, IMAGE, 1)
    snapshot(slot, 3)
    view = slot.view()
    part = view.image[100:200]
    torch = pytest.importorskip("torch")
    tensor = torch.frombuffer(slot.image, dtype=torch.uint8)
    slot.close(unlink=True)
    view.close()
    del view
    gc.collect()
    assert bytes(part) == bytes([3]) * 100
    assert tensor[IMAGE - 1] == 3
    assert mapped_bytes(path) > 0
    del part, tensor
    gc.collect()
    assert mapped_bytes(path) == 0
    assert os.statvfs(tmpfs).f_bavail == free


def test_reader_leaves_nothing_behind(path):
    slot = Slot.create(path, IMAGE, 1)
    snapshot(slot, 3)
    before = mapped_bytes(path)
    view = open_slot(path)
    assert mapped_bytes(path) > before
    view.close()
    assert mapped_bytes(path) == before
    with pytest.raises(ValueError, match="released"):
        view.still_sealed()
    slot.close(unlink=True)


def test_close_never_removes_what_took_the_place_of_its_file(path):
    slot = Slot.create(path, IMAGE, 1)
    os.unlink(path)
    with open(path, "w") as file:
        file.write("another's")
    slot.close(unlink=True)
    assert os.path.exists(path)


def test_thousand_cycles_leave_descriptors_memory_and_threads_flat(slot):
    def usage():
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * PAGE

    for step in range(100):
        snapshot(slot, step, objects=b"o" * (step % 7 * 1000))
    before, memory = descriptors(), usage()
    for step in range(1000):
        snapshot(slot, step, objects=b"o" * (step % 7 * 1000))
        slot.view().close()
    assert descriptors() == before
    assert usage() - memory < 1 << 20


def test_speed_of_a_seal_is_reported(path, record_property):
    slot = Slot.create(path, 1 << 20, 4 << 20)
    times = []
    static, objects = b"s" * 3_000_000, b"o" * 4000
    for step in range(500):
        began = time.perf_counter()
        slot.begin()
        slot.seal(dataclasses.replace(META, step=step), static, objects)
        times.append((time.perf_counter() - began) * 1e6)
    slot.close(unlink=True)
    record_property("begin_and_seal_us", statistics.median(times))
    print(f"begin + seal, unchanged layout of 3 MB, 4 KB of objects: median {statistics.median(times):.0f} us")


# A full memory.


def test_no_room_for_a_slot_leaves_nothing(tmpfs):
    with pytest.raises(OutOfSpace, match="shm-size"):
        Slot.create(os.path.join(tmpfs, "slot"), 65 << 20, 1)
    assert os.listdir(tmpfs) == []
    free = os.statvfs(tmpfs)
    assert free.f_bavail == free.f_blocks


def test_no_room_for_a_longer_tail(tmpfs):
    path = os.path.join(tmpfs, "slot")
    slot = Slot.create(path, 40 << 20, 1)
    slot.begin()
    with pytest.raises(OutOfSpace):
        slot.seal(META, b"", bytes(30 << 20))
    assert slot.meta is None
    assert slot.writing
    assert peek(path) is None
    assert os.stat(path).st_size == slot.nbytes
    slot.clear()
    snapshot(slot, 3)  # it is as good as before
    assert open_slot(path).image == bytes([3]) * IMAGE
    slot.close(unlink=True)


@pytest.mark.parametrize("point", ["slot.create", "slot.create.header"])
def test_an_error_while_a_slot_is_made_leaves_nothing(path, point):
    failpoints.arm(f"{point}=error:EIO")
    try:
        with pytest.raises(OSError, match="failpoint"):
            Slot.create(path, IMAGE, 1)
    finally:
        failpoints.arm("")
    assert not os.path.exists(path)


# Kills.


def write_three(path: str, child: Forked) -> None:
    slot = Slot.create(path, IMAGE, 100)
    snapshot(slot, 7)
    for step in (8, 9):
        objects = bytes([step]) * 20_000 * (step - 7)
        snapshot(slot, step, objects=objects, static=b"static%d" % step, layout_digest=f"d{step}")
        child.say(step)
    slot.clear()
    os.kill(os.getpid(), signal.SIGKILL)


SLOT_POINTS = sorted(name for name in failpoints.NAMES if name.startswith("slot."))


def die_at(path: str, armed: str) -> list[str]:
    """Run a child until it is killed; what it said."""
    with Forked(lambda child: write_three(path, child), armed) as child:
        said = child.read()
        assert child.wait() == -signal.SIGKILL
    return said


@pytest.mark.parametrize("hit", [1, 2, 3])
@pytest.mark.parametrize("point", SLOT_POINTS)
def test_killed_anywhere_the_slot_is_whole_or_no_candidate(path, point, hit):
    printed = die_at(path, f"{point}@{hit}=kill")
    if not os.path.exists(path):
        pytest.fail("the child left no file")
    if point in ("slot.create", "slot.create.header") and hit == 1:
        with pytest.raises(FormatError):
            peek(path)
        return
    view = open_slot(path)
    if point != "slot.seal.after":
        assert view is None
        slot = Slot.open(path)
        assert slot.meta is None
        assert not slot.writing
        snapshot(slot, 30)  # and it can be used again
        assert open_slot(path).image == bytes([30]) * IMAGE
        slot.close(unlink=True)
        return
    assert view is not None
    step = 6 + hit
    assert printed == [str(done) for done in range(8, step)]
    assert view.meta.step == step
    assert bytes(view.image) == bytes([step]) * IMAGE
    assert view.objects == (b"objects" if step == 7 else bytes([step]) * 20_000 * (step - 7))
    slot = Slot.open(path)
    assert slot.view().objects == view.objects
    assert slot.view().meta == view.meta
    # An adopted slot knows its static bytes: with the same layout they are not written again.
    snapshot(slot, 31, static=b"X" * view.meta.static_bytes, layout_digest=view.meta.layout_digest)
    assert open_slot(path).static == view.static
    slot.close(unlink=True)


def test_forked_child_is_inert_and_keeps_no_memory(tmpfs):
    path = os.path.join(tmpfs, "slot")
    slot = Slot.create(path, 8 << 20, 1)
    snapshot(slot, 3)

    def use(child: Forked) -> None:
        nonlocal slot
        for call in (slot.begin, slot.clear, slot.view, slot.populate, lambda: slot.image):
            with pytest.raises(UsageError, match="forked"):
                call()
        slot.close(unlink=True)
        slot = None
        gc.collect()
        child.say(mapped_bytes(path))
        child.wait_for_go()

    with Forked(use) as child:
        assert child.line() == "0"
        assert os.path.exists(path)
        assert slot.view().image == bytes([3]) * IMAGE
        slot.close(unlink=True)
        space = os.statvfs(tmpfs)
        assert space.f_bavail == space.f_blocks  # although the child lives on
        child.go()
        assert child.wait() == 0


# Files that cannot be believed.


@pytest.fixture
def sealed_file(path):
    slot = Slot.create(path, IMAGE, 100)
    snapshot(slot, 9)
    slot.close(unlink=False)
    with open(path, "rb") as file:
        return file.read()


def reread(path: str, data: bytes):
    with open(path, "wb") as file:
        file.write(data)
    return open_slot(path)


def test_two_thousand_mutated_headers(path, sealed_file):
    chance = random.Random(0)
    refused = 0
    for _ in range(2000):
        data = bytearray(sealed_file)
        for _ in range(chance.choice([1, 1, 1, 2, 8])):
            at = chance.randrange(HEADER_BYTES) if chance.random() < 0.5 else chance.randrange(600)
            data[at] = chance.randrange(256) if chance.random() < 0.5 else data[at] ^ 1 << chance.randrange(8)
        for read in (open_slot, peek):
            with open(path, "wb") as file:
                file.write(data)
            message = ""
            try:
                read(path)
            except FormatError as error:
                message = str(error)
            assert path in message or data == sealed_file
            refused += bool(message)
        try:
            slot = Slot.open(path)
        except FormatError:
            pass
        else:
            assert data == sealed_file
            slot.close(unlink=False)
    assert refused > 3000


def resealed(data: bytes, **fields) -> bytes:
    """`data` with other fields in its header, under a right checksum."""
    import json

    import xxhash

    page = bytearray(data[:HEADER_BYTES])
    length = int.from_bytes(page[12:16], "little")
    payload = json.loads(page[48 : 48 + length])
    for name, value in fields.items():
        if value is ...:
            del payload[name]
        else:
            payload[name] = value
    text = json.dumps(payload).encode()
    page[12:16] = len(text).to_bytes(4, "little")
    page[48:] = text + bytes(HEADER_BYTES - 48 - len(text))
    page[32:48] = bytes(16)
    page[32:48] = xxhash.xxh3_128_digest(page)
    return bytes(page) + data[HEADER_BYTES:]


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1},
        {"step": True},
        {"step": 1.5},
        {"step": None},
        {"step": 1 << 63},
        {"rank": 1},
        {"world_size": 0},
        {"run": 5},
        {"timeline": None},
        {"image_bytes": 1 << 40},
        {"static_bytes": 1 << 40},
        {"objects_bytes": 1 << 40},
        {"objects_bytes": 6},
        {"image_digest": 1},
        {"sealed_at": float("nan")},
        {"sealed_at": float("inf")},
        {"sealed_at": "now"},
        {"static_digest": "0" * 32},
        {"objects_digest": [1]},
        {"layout_digest": ...},
        {"extra": 1},
    ],
    ids=str,
)
def test_fields_are_checked_even_under_a_right_checksum(path, sealed_file, fields):
    assert reread(path, resealed(sealed_file)) is not None
    with pytest.raises(DamagedCheckpoint, match="slot"):
        reread(path, resealed(sealed_file, **fields))


def test_payload_of_deep_json_is_an_error(path, sealed_file):
    import xxhash

    page = bytearray(sealed_file[:HEADER_BYTES])
    page[12:16] = (4000).to_bytes(4, "little")
    page[48:] = (b"[" * 4000).ljust(HEADER_BYTES - 48, b"\0")
    page[32:48] = bytes(16)
    page[32:48] = xxhash.xxh3_128_digest(page)
    with pytest.raises(DamagedCheckpoint):
        reread(path, bytes(page) + sealed_file[HEADER_BYTES:])


@pytest.mark.parametrize("size", [0, 1, 47, 4095, 4096, 8191, HEADER_BYTES + 4 * PAGE, HEADER_BYTES + 4 * PAGE + 5])
def test_truncated_files(path, sealed_file, size):
    with pytest.raises(FormatError):
        reread(path, sealed_file[:size])
    with pytest.raises(FormatError):
        Slot.open(path)


def test_rotten_tail(path, sealed_file):
    tail = HEADER_BYTES + 4 * PAGE
    for at in (tail, tail + 6, tail + 12):
        data = bytearray(sealed_file)
        data[at] ^= 1
        with pytest.raises(DamagedCheckpoint, match="step 9"):
            reread(path, bytes(data))
        with pytest.raises(DamagedCheckpoint, match="step 9"):
            Slot.open(path)


def test_another_version_and_another_file(path, sealed_file):
    data = bytearray(sealed_file)
    data[8:12] = (header.VERSION + 1).to_bytes(4, "little")
    with pytest.raises(NewerFormat, match="newer"):
        reread(path, bytes(data))
    with pytest.raises(ForeignFormat):
        reread(path, b"hello" * 5000)


def test_untrusted_files(path, sealed_file, memory_dir):
    os.chmod(path, 0o606)
    with pytest.raises(DamagedCheckpoint, match="mode 0606"):
        open_slot(path)
    assert open_slot(path, user_only=False) is not None
    os.chmod(path, 0o600)
    os.symlink(path, memory_dir / "link")
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        open_slot(str(memory_dir / "link"))
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        Slot.open(str(memory_dir / "link"))
    os.link(path, memory_dir / "second")
    with pytest.raises(DamagedCheckpoint, match="2 names"):
        open_slot(path)
    os.unlink(memory_dir / "second")
    os.mkfifo(memory_dir / "fifo", 0o600)
    with pytest.raises(DamagedCheckpoint, match="regular"):
        open_slot(str(memory_dir / "fifo"))
    with pytest.raises(DamagedCheckpoint):
        open_slot(str(memory_dir))
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(DamagedCheckpoint, match="user 12345"):
            peek(path)
        assert peek(path, user_only=False) is not None


def test_a_sparse_file_is_filled_when_it_is_taken_over(path, sealed_file):
    os.truncate(path, len(sealed_file) + (1 << 20))
    assert os.stat(path).st_blocks * 512 < os.stat(path).st_size
    slot = Slot.open(path)
    assert os.stat(path).st_blocks * 512 >= os.stat(path).st_size
    assert slot.view().image == bytes([9]) * IMAGE
    slot.close(unlink=True)


# Concurrent readers, mappings, pinning.


def test_a_reader_never_sees_a_torn_header(path):
    """A writer that seals without a pause: what a reader gets is always one snapshot's header, whole."""
    slot = Slot.create(path, IMAGE, 100)
    snapshot(slot, 1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            seen = 0
            while seen < 500:
                meta = peek(path)
                if meta is not None:
                    assert meta.timeline == f"t{meta.step}" * (1 + meta.step % 9) or meta.step == 1
                    seen += 1
            status = 0
        finally:
            os._exit(status)
    step = 2
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        snapshot(slot, step, timeline=f"t{step}" * (1 + step % 9))
        step += 1
    slot.close(unlink=True)


def test_mapping_that_cannot_be(monkeypatch):
    with pytest.raises(OutOfSpace, match="cannot map"):
        Mapping(None, 0, 1 << 60)


def test_failed_unpin_does_not_stop_the_unmapping(path, caplog):
    slot = Slot.create(path, IMAGE, 1)

    def fail():
        raise RuntimeError("no unpinning today")

    slot._head.before_unmap(fail)
    slot.close(unlink=True)
    assert mapped_bytes(path) == 0
    assert "no unpinning today" in caplog.text


class FakeRuntime:
    """Like torch.cuda.cudart(), as far as pinning needs it."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple] = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(("register", address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return self.code

    def cudaError(self, code):
        return code

    def cudaGetErrorString(self, code):
        return f"text of {code}"


def test_pinning_without_cuda_does_nothing(slot):
    assert slot.pin() is False
    pinned.unregister(slot.address)


def test_pinned_images_are_unpinned_before_they_are_unmapped(slot, monkeypatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(pinned, "_runtime", lambda: runtime)
    assert slot.pin() is True
    address = slot.address
    assert runtime.calls == [("register", address, slot.image_capacity, 1)]
    image = slot.image
    slot.close(unlink=True)
    assert len(runtime.calls) == 1  # somebody still looks into it
    del image
    assert runtime.calls[1:] == [("unregister", address)]


def test_pinning_errors_say_what_to_do(slot, monkeypatch):
    from easyckpt.errors import StorageError

    monkeypatch.setattr(pinned, "_runtime", lambda: FakeRuntime(2))
    with pytest.raises(StorageError, match=r"CUDA error 2 \(text of 2\).*memlock"):
        slot.pin()
    with pytest.raises(StorageError, match="cannot unpin"):
        pinned.unregister(slot.address)
    monkeypatch.setattr(pinned, "_runtime", lambda: FakeRuntime(712))
    with pytest.raises(StorageError, match="pinned already"):
        slot.pin()
    monkeypatch.setattr(pinned, "_runtime", lambda: FakeRuntime(713))
    pinned.unregister(slot.address)
