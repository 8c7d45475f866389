"""LocalStorage: durable, atomic, exclusive, and never outside its root."""

import errno
import mmap
import os
import subprocess
import sys
import threading

import pytest
from support.recording import EVERYTHING, NOTHING_UNSYNCED, VARIANTS, RecordingStorage

from easyckpt import failpoints
from easyckpt.errors import OutOfSpace, StorageError
from easyckpt.storage import local, localfile
from easyckpt.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    storage.makedirs("")
    return storage


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def aligned(size, seed=0):
    memory = mmap.mmap(-1, size)
    memory[:] = bytes((seed + i * 7) % 251 for i in range(256)) * (size // 256)
    return memory


def unaligned(data):
    memory = mmap.mmap(-1, len(data) + 4096)
    view = memoryview(memory)[1 : 1 + len(data)]
    view[:] = data
    return view


def write_file(storage, path):
    with storage.create(path) as file:
        file.write_at(b"x", 0)


def takes_direct(storage):
    with storage.create(".direct-test") as file:
        direct = file.direct
    storage.remove(".direct-test")
    return direct


# Files being written and read.


def test_direct_file_with_cut_tail_reads_back_exactly(storage):
    memory = aligned(3 << 20)
    with storage.create("shard") as file:
        was_direct = file.direct
        file.write_at(memoryview(memory)[1 << 20 :], 1 << 20)
        file.write_at(memoryview(memory)[: 1 << 20], 0)
        file.truncate((3 << 20) - 1234)
        file.sync()
        assert file.direct == was_direct
    assert storage.stat_size("shard") == (3 << 20) - 1234
    assert storage.read("shard") == memory[: (3 << 20) - 1234]
    target = mmap.mmap(-1, 4 << 20)
    storage.drop_cache("shard")
    with storage.reader("shard") as reader:
        assert reader.size == (3 << 20) - 1234
        assert reader.read_into(target, 0) == reader.size
        assert target[: reader.size] == memory[: reader.size]
        piece = bytearray(100)
        assert reader.read_into(piece, 777) == 100
        assert piece == memory[777:877]
        assert reader.read_into(bytearray(10), reader.size) == 0


def test_direct_writes_really_bypass_the_page_cache(storage):
    if not takes_direct(storage):
        pytest.skip("this file system does not take direct writes")
    with storage.create("shard") as file:
        file.write_at(aligned(1 << 20), 0)
        descriptor = os.open(f"{storage.root}/shard", os.O_RDWR)
        assert not localfile._is_cached(descriptor)
        os.close(descriptor)


def test_probe_sees_through_a_file_system_that_only_pretends():
    directory = "/dev/shm"  # takes O_DIRECT, but is the page cache
    if not os.access(directory, os.W_OK):
        pytest.skip("no /dev/shm")
    descriptor = os.open(directory, os.O_RDONLY)
    before = os.listdir(directory)
    assert localfile.probe_direct(os, descriptor) is False
    assert os.listdir(directory) == before
    os.close(descriptor)


@pytest.mark.parametrize("direct_io", [None, False, True])
def test_any_buffer_at_any_offset(tmp_path, direct_io):
    storage = LocalStorage(tmp_path, direct_io=direct_io)
    expected = bytearray()
    with storage.create("f") as file:
        for data in (aligned(8192), unaligned(b"u" * 8192), b"", b"abc", aligned(4096, seed=3), bytes(10)):
            file.write_at(data, len(expected))
            expected += bytes(data)
        assert not file.direct
        file.sync()
    assert storage.read("f") == expected


def test_misaligned_memory_stays_direct(storage):
    direct = takes_direct(storage)
    data = os.urandom(8192)
    with storage.create("f") as file:
        file.write_at(unaligned(data), 0)
        assert file.direct == direct
    assert storage.read("f") == data


def test_kernel_that_refuses_direct_writes_later(storage, monkeypatch):
    if not takes_direct(storage):
        pytest.skip("this file system does not take direct writes")

    class Refusing:
        def __getattr__(self, name):
            return getattr(os, name)

        def pwrite(self, descriptor, data, offset):
            import fcntl

            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            return os.pwrite(descriptor, data, offset)

    monkeypatch.setattr(storage, "_os", Refusing())
    data = aligned(1 << 20)
    with storage.create("f") as file:
        file.write_at(data, 0)
        assert not file.direct
    assert storage.read("f") == data[:]


def test_short_writes_and_reads_are_continued(storage, monkeypatch):
    class Short:
        def __getattr__(self, name):
            return getattr(os, name)

        def pwrite(self, descriptor, data, offset):
            return os.pwrite(descriptor, memoryview(data)[: max(1, len(data) // 3)], offset)

        def write(self, descriptor, data):
            return os.write(descriptor, memoryview(data)[: max(1, len(data) // 3)])

        def preadv(self, descriptor, buffers, offset):
            return os.preadv(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)

    monkeypatch.setattr(storage, "_os", Short())
    data = aligned(16384)
    with storage.create("f") as file:
        file.write_at(data, 0)
    storage.replace("g", data[:])
    assert storage.read("f") == storage.read("g") == data[:]
    target = bytearray(20000)
    with storage.reader("f") as reader:
        assert reader.read_into(target, 0) == 16384
    assert target[:16384] == data[:]


def test_threads_write_one_file(storage):
    blocks = [aligned(1 << 20, seed) for seed in range(6)]
    with storage.create("f") as file:
        threads = [threading.Thread(target=file.write_at, args=(b, i << 20)) for i, b in enumerate(blocks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        file.sync()
    assert storage.read("f") == b"".join(block[:] for block in blocks)


def test_create_never_overwrites(storage):
    storage.create("f").close()
    with pytest.raises(FileExistsError) as info:
        storage.create("f")
    assert info.value.filename == f"{storage.root}/f"


def test_after_a_failed_fsync_the_file_is_dead(storage):
    failpoints.arm("storage.sync.before=error:EIO")
    file = storage.create("f")
    file.write_at(b"x", 0)
    with pytest.raises(OSError, match="Input/output") as info:
        file.sync()
    assert info.value.errno == errno.EIO
    assert info.value.filename == f"{storage.root}/f"
    for call in (file.sync, lambda: file.write_at(b"y", 1), lambda: file.truncate(0)):
        with pytest.raises(StorageError, match=r"cannot be used any more.*Write a new file"):
            call()
    file.close()
    file.close()
    assert storage.read("f") == b"x"


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("storage.write.before", lambda s: write_file(s, "f")),
        ("storage.create.after", lambda s: s.create("f")),
        ("storage.replace.written", lambda s: s.replace("f", b"x")),
        ("storage.replace.written", lambda s: s.link_exclusive("f", b"x")),
        ("storage.append.before", lambda s: s.append("f", b"x")),
        ("storage.makedirs.made", lambda s: s.makedirs("d")),
    ],
)
def test_full_disk_is_out_of_space(storage, place, call, code):
    failpoints.arm(f"{place}=error:{code}")
    with pytest.raises(OutOfSpace, match=f"no space left for {storage.root}/[fd]") as info:
        call(storage)
    assert isinstance(info.value.__cause__, OSError)
    assert info.value.__cause__.errno == getattr(errno, code)


def test_a_really_full_device():
    # /dev/full answers ENOSPC to every write, as a full disk does.
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with localfile.LocalFileWriter(os, descriptor, "/dev/full", False) as file:
        with pytest.raises(OutOfSpace):
            file.write_at(b"x", 0)
        with pytest.raises(StorageError, match="cannot be used any more"):
            file.sync()


# Atomic replacement, exclusive creation, logs.


def test_replace_leaves_nothing_beside(storage):
    storage.replace("latest", b"1")
    storage.replace("latest", b"22")
    assert storage.listdir("") == ["latest"]
    failpoints.arm("storage.replace.before_rename=error:EIO")
    with pytest.raises(OSError, match="Input/output"):
        storage.replace("latest", b"333")
    assert storage.listdir("") == ["latest"]
    assert storage.read("latest") == b"22"


@pytest.mark.parametrize("variant", VARIANTS)
def test_replace_survives_a_power_cut_anywhere(tmp_path, variant):
    storage = RecordingStorage(tmp_path / "root")
    storage.makedirs("")
    storage.replace("latest", b"old")
    begin = len(storage.operations)
    storage.replace("latest", b"the new one")
    for k in range(begin, len(storage.operations) + 1):
        storage.materialise(k, variant, tmp_path / f"{k}")
        found = (tmp_path / f"{k}" / "latest").read_bytes()
        assert found in (b"old", b"the new one")
        assert k < len(storage.operations) or found == b"the new one"


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_returned_is_durable(tmp_path, variant):
    storage = RecordingStorage(tmp_path / "root")
    storage.makedirs("a/b")
    assert storage.link_exclusive("lease.json", b"mine")
    storage.append("log", b"1\n2\n3\n")
    storage.truncate("log", 4)
    storage.sync_dir("")
    with storage.create("a/b/file") as file:
        file.write_at(b"content" * 1000, 0)
        file.sync()
    storage.sync_dir("a/b")
    storage.rename("a", "c")
    storage.sync_dir("")
    storage.materialise(len(storage.operations), variant, tmp_path / "after")
    after = LocalStorage(tmp_path / "after")
    assert after.listdir("") == ["c", "lease.json", "log"]
    assert after.read("c/b/file") == b"content" * 1000
    assert after.read("lease.json") == b"mine"
    assert after.read("log") == b"1\n2\n"


@pytest.mark.parametrize("variant", VARIANTS)
def test_exclusive_creation_is_durable_by_itself_and_never_partial(tmp_path, variant):
    storage = RecordingStorage(tmp_path / "root")
    storage.makedirs("")
    begin = len(storage.operations)
    assert storage.link_exclusive("lease.json", b"mine")
    for k in range(begin, len(storage.operations) + 1):
        storage.materialise(k, variant, tmp_path / str(k))
        lease = tmp_path / str(k) / "lease.json"
        assert lease.exists() or k < len(storage.operations)
        assert not lease.exists() or lease.read_bytes() == b"mine"


def test_recorder_shows_what_was_not_synced(tmp_path):
    storage = RecordingStorage(tmp_path / "root")
    storage.makedirs("")
    with storage.create("f") as file:
        file.write_at(b"abcdef", 0)
        unsynced = len(storage.operations)
        file.sync()
    synced = len(storage.operations)
    storage.sync_dir("")
    named = len(storage.operations)
    seen = {}
    for variant in VARIANTS:
        for k in (unsynced, synced, named):
            directory = tmp_path / f"{k}-{variant}"
            storage.materialise(k, variant, directory)
            seen[k, variant] = (directory / "f").read_bytes() if (directory / "f").exists() else None
    assert seen[unsynced, NOTHING_UNSYNCED] is None
    assert seen[synced, NOTHING_UNSYNCED] is None
    assert seen[unsynced, "keep-metadata-but-not-data"] == b""
    assert seen[unsynced, "keep-metadata-with-zeros-for-data"] == bytes(6)
    assert seen[unsynced, "keep-metadata-and-half-the-data"] == b"abc"
    assert seen[unsynced, EVERYTHING] == b"abcdef"
    assert all(seen[named, variant] == b"abcdef" for variant in VARIANTS)


def test_replay_of_everything_is_the_real_directory(tmp_path):
    storage = RecordingStorage(tmp_path / "root")
    storage.makedirs("x/y")
    storage.replace("x/one", b"1")
    storage.append("x/y/log", b"a\n")
    storage.append("x/y/log", b"b\n")
    storage.rename("x/one", "x/y/two")
    storage.link_exclusive("z", b"z")
    storage.makedirs("gone/deep")
    storage.replace("gone/deep/f", b"?")
    storage.remove_tree("gone")
    storage.remove("z")
    storage.materialise(len(storage.operations), EVERYTHING, tmp_path / "copy")
    assert subprocess.run(["diff", "-r", tmp_path / "root", tmp_path / "copy"], check=False).returncode == 0


def test_link_exclusive_has_one_winner(storage):
    results = []
    barrier = threading.Barrier(8)

    def contend(number):
        barrier.wait()
        results.append((storage.link_exclusive("lease", str(number).encode()), number))

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for won, number in results if won]
    assert len(winners) == 1
    assert storage.read("lease") == str(winners[0]).encode()
    assert storage.listdir("") == ["lease"]


class OddLinks:
    """File systems on which link() is not what it should be."""

    def __init__(self, behaviour):
        self.behaviour = behaviour

    def __getattr__(self, name):
        return getattr(os, name)

    def link(self, src, dst, **directories):
        if self.behaviour == "unsupported":
            raise OSError(errno.EOPNOTSUPP, "no links here")
        os.link(src, dst, **directories)
        raise FileExistsError(errno.EEXIST, "the repeated request found its own link")


@pytest.mark.parametrize("behaviour", ["unsupported", "repeated"])
def test_link_exclusive_on_odd_file_systems(storage, monkeypatch, behaviour):
    monkeypatch.setattr(storage, "_os", OddLinks(behaviour))
    assert storage.link_exclusive("lease", b"mine") is True
    monkeypatch.undo()
    assert storage.link_exclusive("lease", b"other") is False
    assert storage.read("lease") == b"mine"
    monkeypatch.setattr(storage, "_os", OddLinks("unsupported"))
    assert storage.link_exclusive("lease", b"other") is False
    assert storage.listdir("") == ["lease"]


def test_append_is_all_or_nothing(storage, monkeypatch):
    storage.append("log", b"one\n")

    class HalfThenFull:
        calls = 0

        def __getattr__(self, name):
            return getattr(os, name)

        def write(self, descriptor, data):
            self.calls += 1
            if self.calls == 2:
                raise OSError(errno.ENOSPC, "full")
            return os.write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(storage, "_os", HalfThenFull())
    with pytest.raises(OutOfSpace):
        storage.append("log", b"a second line\n")
    monkeypatch.undo()
    storage.append("log", b"three\n")
    assert storage.read("log") == b"one\nthree\n"


# Names.


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/./b", "a\0b", ".."])
def test_paths_out_of_the_root_are_refused(storage, path):
    for call in (
        storage.read,
        storage.create,
        storage.remove,
        storage.remove_tree,
        storage.makedirs,
        storage.listdir,
        storage.reader,
        storage.stat_size,
        storage.exists,
        storage.sync_dir,
        storage.drop_cache,
        lambda p: storage.replace(p, b""),
        lambda p: storage.append(p, b""),
        lambda p: storage.link_exclusive(p, b""),
        lambda p: storage.rename("a", p),
        lambda p: storage.rename(p, "a"),
        lambda p: storage.truncate(p, 0),
    ):
        with pytest.raises(StorageError, match="is not a path below"):
            call(path)


def test_root_itself_is_no_file(storage):
    for call in (storage.read, storage.remove_tree, storage.create):
        with pytest.raises(StorageError, match="root"):
            call("")


def test_links_below_the_root_are_not_followed(storage, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"precious")
    os.symlink(outside, f"{storage.root}/step-00000001")
    os.symlink(outside / "f", f"{storage.root}/file")
    for call in (
        lambda: storage.read("step-00000001/f"),
        lambda: storage.listdir("step-00000001"),
        lambda: storage.create("step-00000001/new"),
        lambda: storage.remove("step-00000001/f"),
        lambda: storage.makedirs("step-00000001/d"),
        lambda: storage.read("file"),
        lambda: storage.reader("file"),
        lambda: storage.stat_size("file"),
    ):
        with pytest.raises(StorageError, match=r"symbolic link|not a regular file"):
            call()
    with pytest.raises(OSError, match="symbolic"):
        storage.append("file", b"x")
    with pytest.raises(OSError, match="symbolic"):
        storage.truncate("file", 0)
    storage.replace("file", b"ours")
    storage.remove_tree("step-00000001")
    assert storage.listdir("") == ["file"]
    assert sorted(os.listdir(outside)) == ["f"]
    assert (outside / "f").read_bytes() == b"precious"


def test_remove_tree_does_not_descend_into_links(storage, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"precious")
    storage.makedirs("d/e")
    os.symlink(outside, f"{storage.root}/d/e/link")
    os.mkfifo(f"{storage.root}/d/pipe")
    storage.remove_tree("d")
    storage.remove_tree("d")
    assert storage.listdir("") == []
    assert (outside / "f").exists()


def test_root_may_be_reached_by_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "alias")
    storage = LocalStorage(tmp_path / "alias")
    storage.makedirs("d")
    storage.replace("d/f", b"x")
    assert (tmp_path / "real" / "d" / "f").read_bytes() == b"x"


def test_pipes_are_refused_not_waited_for(storage):
    os.mkfifo(f"{storage.root}/manifest.json")
    for call in (storage.read, storage.reader, storage.stat_size):
        with pytest.raises(StorageError, match="not a regular file"):
            call("manifest.json")
    with pytest.raises(OSError, match="No such device"):
        storage.append("manifest.json", b"x")


def test_errors_name_the_whole_path(storage):
    storage.replace("file", b"x")
    for call, error in (
        (lambda: storage.read("d/missing"), FileNotFoundError),
        (lambda: storage.listdir("file"), NotADirectoryError),
        (lambda: storage.create("file/x"), NotADirectoryError),
        (lambda: storage.makedirs("file"), NotADirectoryError),
        (lambda: storage.makedirs("file/x"), NotADirectoryError),
        (lambda: storage.remove("missing"), FileNotFoundError),
        (lambda: storage.reader("missing"), FileNotFoundError),
    ):
        with pytest.raises(error) as info:
            call()
        assert str(info.value.filename).startswith(storage.root + "/")
    assert storage.exists("file")
    assert not storage.exists("file/x")
    assert not storage.exists("no/such")
    under_a_file = LocalStorage(f"{storage.root}/file/root")
    with pytest.raises(NotADirectoryError):
        under_a_file.makedirs("")
    with pytest.raises(FileNotFoundError):
        LocalStorage(f"{storage.root}/nowhere").listdir("")


def test_a_directory_in_the_way_stops_a_rename(storage):
    storage.makedirs("tmp")
    storage.makedirs("step")
    storage.replace("step/manifest.json", b"committed")
    storage.replace("tmp/manifest.json", b"new")
    with pytest.raises(OSError, match="not empty"):
        storage.rename("tmp", "step")
    assert storage.read("step/manifest.json") == b"committed"


def test_directories_that_cannot_be_synced(storage, monkeypatch):
    class NoSync:
        code = errno.EINVAL

        def __getattr__(self, name):
            return getattr(os, name)

        def fsync(self, descriptor):
            raise OSError(self.code, "fsync")

    monkeypatch.setattr(storage, "_os", NoSync())
    storage.sync_dir("")
    NoSync.code = errno.EIO
    with pytest.raises(OSError, match="fsync"):
        storage.sync_dir("")


def test_no_descriptor_is_left_open(storage):
    storage.makedirs("d")
    before = descriptors()
    for round_number in range(20):
        name = f"d/{round_number}"
        with storage.create(name) as file:
            file.write_at(unaligned(bytes(4096)), 0)
            file.sync()
        with storage.reader(name) as reader:
            reader.read_into(bytearray(10), 0)
        storage.replace("d/x", b"x")
        storage.append("d/log", b"x")
        storage.truncate("d/log", 0)
        storage.link_exclusive("d/y", b"y")
        storage.drop_cache("d/x")
        for bad in ("d/missing", "missing/x", "d", "../x"):
            with pytest.raises((OSError, StorageError)):
                storage.read(bad)
        with pytest.raises(FileExistsError):
            storage.create(name)
        failpoints.arm("storage.create.after=error:EIO;storage.replace.written=error:EIO")
        with pytest.raises(OSError, match="Input"):
            storage.create(name + "x")
        with pytest.raises(OSError, match="Input"):
            storage.replace("d/x", b"x")
        failpoints.arm("")
    storage.remove_tree("d")
    assert descriptors() == before
    assert storage.free_bytes() > 0


# Death of the process at each failpoint.

KILL_SCRIPT = """
import sys
from easyckpt.storage.local import LocalStorage
s = LocalStorage(sys.argv[1])
s.makedirs("tmp")
s.link_exclusive("lease.json", b"lease")
with s.create("tmp/shard") as f:
    f.write_at(b"s" * 100, 0)
    f.sync()
s.append("log", b"line\\n")
s.sync_dir("tmp")
s.rename("tmp", "step")
s.sync_dir("")
s.replace("latest", b"new")
s.remove_tree("old")
s.remove("victim")
"""
STORAGE_POINTS = sorted(name for name in failpoints.NAMES if name.startswith("storage."))


@pytest.mark.parametrize("place", STORAGE_POINTS)
def test_kill_at_each_failpoint(tmp_path, place):
    storage = LocalStorage(tmp_path / "root")
    storage.makedirs("old/deep")
    storage.replace("old/deep/f", b"x")
    storage.replace("latest", b"old")
    storage.replace("victim", b"x")
    environment = {**os.environ, failpoints.ENVIRONMENT_VARIABLE: f"{place}=kill"}
    ended = subprocess.run([sys.executable, "-c", KILL_SCRIPT, storage.root], env=environment, check=False)
    assert ended.returncode == -9, f"{place} was never reached"
    assert storage.read("latest") in (b"old", b"new")
    assert not storage.exists("lease.json") or storage.read("lease.json") == b"lease"
    if storage.exists("step"):
        assert storage.read("step/shard") == b"s" * 100
        assert not storage.exists("tmp")
    assert local.CREATED in STORAGE_POINTS
