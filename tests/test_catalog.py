"""The catalog: what is there, what is valid, and every damaged byte found."""

import os
import random

import pytest

from easyckpt import catalog
from easyckpt.catalog import scan
from easyckpt.errors import DamagedCheckpoint, ForeignFormat, FormatError, NewerFormat
from easyckpt.format import layout
from easyckpt.format.checksum import CHUNK_BYTES, chunk_digests, digest_bytes, file_digest
from easyckpt.format.image import LeafSpec, plan_layout, shard_header
from easyckpt.format.manifest import FileRecord, Index, Manifest, RootRecord, ShardRecord, Timeline
from easyckpt.storage.local import LocalStorage
from easyckpt.verification import verify
from tests.support.naming import CheckpointNaming

RUN = "ab" * 16
LINE = "t1"
NATIVE = layout.NativeNaming()


@pytest.fixture
def storage(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    storage.makedirs("")
    return storage


def leaf(name, elements):
    return LeafSpec(
        path=("model", name), dtype="float32", shape=(elements,), order=(0,), device="cpu", replicated=False
    )


def write_step(storage, step, *, directory=None, ranks=1, elements=(1000, 10), attempt="a1", **changes):
    """A whole checkpoint, written as the engine would."""
    directory = directory or layout.step_dir(step)
    storage.makedirs(directory)
    files = {}
    for rank in range(ranks):
        plan = plan_layout([leaf(f"w{i}", n) for i, n in enumerate(elements)], {}, rank, ranks)
        image = bytes(random.Random(step * 7 + rank).randbytes(plan.image_bytes))
        shard = shard_header(plan, True) + image
        chunks = tuple(chunk_digests([shard]))
        index = Index(
            run=RUN,
            timeline=LINE,
            step=step,
            rank=rank,
            world_size=ranks,
            layout=plan,
            objects={},
            shard=ShardRecord(
                name=layout.shard_file(rank),
                size=len(shard),
                header_bytes=len(shard) - len(image),
                write_replicated=True,
                chunks=chunks,
            ),
        ).to_bytes()
        storage.replace(f"{directory}/{layout.shard_file(rank)}", shard)
        storage.replace(f"{directory}/{layout.index_file(rank)}", index)
        files[layout.shard_file(rank)] = FileRecord(len(shard), file_digest(len(shard), chunks))
        files[layout.index_file(rank)] = FileRecord(len(index), digest_bytes(index))
    fields = {
        "run": RUN,
        "timeline": LINE,
        "step": step,
        "world_size": ranks,
        "attempt": attempt,
        "created": 1.0,
        "files": files,
    }
    manifest = Manifest(**{**fields, **changes})
    storage.replace(f"{directory}/{layout.MANIFEST}", manifest.to_bytes())
    return manifest


def damage(storage, path, offset, flip=1):
    with open(f"{storage.root}/{path}", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ flip]))


def only(storage, name=None):
    entries = [e for e in scan(storage, NATIVE).entries if name in (None, e.name)]
    assert len(entries) == 1
    return entries[0]


# Discovery.


def test_root_that_is_not_there(tmp_path):
    assert scan(LocalStorage(tmp_path / "nothing"), NATIVE).entries == []
    assert catalog.read_root(LocalStorage(tmp_path / "nothing")) is None


def test_every_kind_is_told_apart(storage):
    for step in (100, 20, 3):
        write_step(storage, step)
    write_step(storage, 50, directory=layout.stale_dir(50, "t2"))
    write_step(storage, 60, directory=layout.tmp_dir(60, "a1"))
    storage.makedirs(layout.tmp_dir(70, "a9"))
    storage.makedirs(layout.trash_dir(layout.step_dir(9), "n1"))
    storage.makedirs(layout.trash_dir("whatever", "n1"))
    storage.replace(layout.LATEST, b"step-00000020\n")
    for stray in (layout.temp_file(layout.LATEST, "n1"), layout.temp_file(layout.LEASE, "n1"), ".hidden", "step-1"):
        with open(f"{storage.root}/{stray}", "w"):
            pass
    found = scan(storage, NATIVE)
    assert [(e.step, e.kind, e.valid) for e in found.entries] == [
        (-1, "trash", False),
        (3, "committed", True),
        (9, "trash", False),
        (20, "committed", True),
        (50, "stale", True),
        (60, "temporary", True),
        (70, "temporary", False),
        (100, "committed", True),
    ]
    assert [e.step for e in found.committed()] == [3, 20, 100]
    assert found.of_kind("stale")[0].timeline == "t2"
    assert [e.attempt for e in found.of_kind("temporary")] == ["a1", "a9"]
    assert found.stray == [layout.temp_file(layout.LATEST, "n1")]
    assert "never committed" in found.of_kind("temporary")[1].problem
    for entry in found.entries:
        assert catalog.inspect(storage, entry.name, NATIVE) == entry


def test_latest_is_never_believed(storage):
    write_step(storage, 10)
    write_step(storage, 20)
    for hint in (b"step-00000010\n", b"../../etc\n", b"\xff", b""):
        storage.replace(layout.LATEST, hint)
        assert [e.step for e in scan(storage, NATIVE).committed()] == [10, 20]


def break_manifest(storage, directory):
    return f"{storage.root}/{directory}/{layout.MANIFEST}"


def _remove_manifest(storage, directory):
    os.remove(break_manifest(storage, directory))


def _truncate_manifest(storage, directory):
    os.truncate(break_manifest(storage, directory), 50)


def _manifest_is_directory(storage, directory):
    _remove_manifest(storage, directory)
    os.mkdir(break_manifest(storage, directory))


def _manifest_is_link(storage, directory):
    os.rename(break_manifest(storage, directory), f"{storage.root}/elsewhere")
    os.symlink(f"{storage.root}/elsewhere", break_manifest(storage, directory))


def _manifest_is_pipe(storage, directory):
    _remove_manifest(storage, directory)
    os.mkfifo(break_manifest(storage, directory))


def _manifest_is_huge(storage, directory):
    os.truncate(break_manifest(storage, directory), 1 << 40)


def _step_is_link(storage, directory):
    os.rename(f"{storage.root}/{directory}", f"{storage.root}/elsewhere")
    os.symlink(f"{storage.root}/elsewhere", f"{storage.root}/{directory}")


def _step_is_file(storage, directory):
    storage.remove_tree(directory)
    storage.create(directory).close()


def _shard_missing(storage, directory):
    storage.remove(f"{directory}/{layout.shard_file(1)}")


def _shard_short(storage, directory):
    os.truncate(f"{storage.root}/{directory}/{layout.shard_file(0)}", 4096)


def _shard_long(storage, directory):
    storage.append(f"{directory}/{layout.index_file(1)}", b"x")


def _wrong_step(storage, directory):
    write_step(storage, 21, directory=directory, ranks=2)


def _rank_not_listed(storage, directory):
    write_step(storage, 20, directory=directory, ranks=2, world_size=3)


def _newer(storage, directory):
    write_step(storage, 20, directory=directory, ranks=2, features=("time-travel",))


BREAKAGES = [value for name, value in sorted(globals().items()) if name.startswith("_") and callable(value)]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__.strip("_"))
def test_one_bad_entry_is_listed_with_its_problem_and_hides_no_other(storage, breakage):
    for step in (10, 20, 30):
        write_step(storage, step, ranks=2)
    breakage(storage, layout.step_dir(20))
    found = scan(storage, NATIVE)
    assert [e.step for e in found.committed()] == [10, 30]
    bad = only(storage, layout.step_dir(20))
    assert bad.problem
    assert not bad.valid
    assert verify(storage, bad)


@pytest.mark.parametrize("seed", range(30))
def test_garbage_in_a_manifest_never_raises(storage, seed):
    generator = random.Random(seed)
    write_step(storage, 10)
    manifest = write_step(storage, 20).to_bytes()
    data = bytearray(manifest)
    for _ in range(generator.randint(1, 20)):
        data[generator.randrange(len(data))] = generator.randrange(256)
    for text in (bytes(data), generator.randbytes(200), manifest[: generator.randrange(len(manifest))], b"[" * 100_000):
        storage.replace(f"{layout.step_dir(20)}/{layout.MANIFEST}", text)
        assert [e.step for e in scan(storage, NATIVE).committed() if text != manifest] == [10]


def test_attempt_in_the_name_must_be_the_manifest_s(storage):
    write_step(storage, 20, directory=layout.tmp_dir(20, "a2"), attempt="a1")
    assert "attempt a1" in only(storage).problem


def test_entry_rotated_away_while_scanning_is_not_listed(storage, monkeypatch):
    write_step(storage, 10)
    write_step(storage, 20)
    listdir = storage.listdir

    def then_rotate(path):
        names = listdir(path)
        storage.rename(layout.step_dir(10), layout.trash_dir(layout.step_dir(10), "n"))
        return names

    monkeypatch.setattr(storage, "listdir", then_rotate)
    assert [e.step for e in scan(storage, NATIVE).entries] == [20]


def test_another_layout_s_directory(storage):
    storage.makedirs("checkpoint-7")
    storage.replace("checkpoint-7/model.bin", b"weights")
    files = {"model.bin": FileRecord(7, digest_bytes(b"weights"))}
    manifest = Manifest(run=RUN, timeline=LINE, step=7, world_size=4, attempt="a", created=0.0, files=files)
    storage.replace(f"checkpoint-7/{layout.MANIFEST}", manifest.to_bytes())
    assert scan(storage, NATIVE).entries == []
    entry = scan(storage, CheckpointNaming()).committed()[0]
    assert (entry.step, entry.name) == (7, "checkpoint-7")
    assert verify(storage, entry) == []
    assert catalog.inspect(storage, "checkpoint-7", NATIVE) == entry
    storage.replace("checkpoint-7/model.bin", b"weightz")
    assert [(p.file, p.chunk) for p in verify(storage, entry)] == [("model.bin", None)]


def test_root_record(tmp_path):
    storage = LocalStorage(tmp_path / "new" / "root")
    record = RootRecord(run=RUN, created=1.0, timelines=(Timeline("t1", None, 0, False, 1.0),))
    catalog.write_root(storage, record)
    assert catalog.read_root(storage) == record
    storage.replace(layout.ROOT_FILE, record.to_bytes()[:-5])
    with pytest.raises(DamagedCheckpoint, match=r"easyckpt\.json"):
        catalog.read_root(storage)
    storage.replace(layout.ROOT_FILE, b'{"kind": "something else"}')
    with pytest.raises(ForeignFormat):
        catalog.read_root(storage)


def test_read_manifest_raises(storage):
    with pytest.raises(FileNotFoundError):
        catalog.read_manifest(storage, layout.step_dir(1))
    write_step(storage, 1, features=("time-travel",))
    with pytest.raises(NewerFormat, match="time-travel"):
        catalog.read_manifest(storage, layout.step_dir(1))
    storage.replace(f"{layout.step_dir(1)}/{layout.MANIFEST}", b"")
    with pytest.raises(FormatError):
        catalog.read_manifest(storage, layout.step_dir(1))


# Verification.

BIG = (3 * CHUNK_BYTES // 4 + 500, 1000, 0, CHUNK_BYTES // 8)  # 24 MiB and more: five chunks with the header


def test_good_bytes_verify_and_are_counted(storage):
    manifest = write_step(storage, 10, ranks=2)
    heard = []
    assert verify(storage, only(storage), heard.append) == []
    assert sum(heard) == sum(record.size for record in manifest.files.values())


def test_each_damaged_chunk_is_named_with_its_tensors(storage):
    write_step(storage, 10, elements=BIG)
    entry = only(storage)
    shard = f"{entry.name}/{layout.shard_file(0)}"
    size = storage.stat_size(shard)
    assert verify(storage, entry) == []
    damage(storage, shard, CHUNK_BYTES + 5)
    damage(storage, shard, size - 1)
    problems = verify(storage, entry)
    assert [(p.file, p.chunk) for p in problems] == [
        (layout.shard_file(0), 1),
        (layout.shard_file(0), (size - 1) // CHUNK_BYTES),
    ]
    assert problems[0].tensor == "model.w0"
    assert "model.w3" in (problems[1].tensor + problems[1].message)
    assert scan(storage, NATIVE).committed() == [entry]  # discovery looks at sizes only


@pytest.mark.parametrize("seed", range(25))
def test_any_flipped_bit_anywhere_is_found(storage, seed):
    write_step(storage, 10, ranks=2)
    generator = random.Random(seed)
    entry = only(storage)
    name = generator.choice(sorted(entry.manifest.files))
    offset = generator.randrange(storage.stat_size(f"{entry.name}/{name}"))
    damage(storage, f"{entry.name}/{name}", offset, 1 << generator.randrange(8))
    problems = verify(storage, entry)
    assert [p.file for p in problems] == [name]
    damage(storage, f"{entry.name}/{name}", offset, 0)


def test_damaged_header_of_a_shard_names_the_chunk(storage):
    write_step(storage, 10)
    entry = only(storage)
    damage(storage, f"{entry.name}/{layout.shard_file(0)}", 20)
    assert [(p.file, p.chunk) for p in verify(storage, entry)] == [(layout.shard_file(0), 0)]


def test_index_of_another_step_under_a_right_digest_is_found(storage):
    other = write_step(storage, 11)
    manifest = write_step(storage, 10)
    name = layout.index_file(0)
    storage.replace(f"{layout.step_dir(10)}/{name}", storage.read(f"{layout.step_dir(11)}/{name}"))
    files = {**manifest.files, name: other.files[name]}
    forged = Manifest(run=RUN, timeline=LINE, step=10, world_size=1, attempt="a1", created=1.0, files=files)
    storage.replace(f"{layout.step_dir(10)}/{layout.MANIFEST}", forged.to_bytes())
    messages = [p.message for p in verify(storage, only(storage, layout.step_dir(10)))]
    assert any("of step 11" in m for m in messages)
    assert any("describes another" in m for m in messages)


def test_unreadable_sector_is_a_problem_and_the_rest_is_still_read(storage, monkeypatch):
    write_step(storage, 10, elements=BIG)
    entry = only(storage)
    real = storage.reader

    class BadSector:
        def __init__(self, path):
            self.path, self.inner = path, real(path)
            self.size = self.inner.size

        def read_into(self, buffer, offset):
            if self.path.endswith(layout.shard_file(0)) and offset == CHUNK_BYTES:
                raise OSError(5, "Input/output error", self.path)
            return self.inner.read_into(buffer, offset)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.inner.close()

    damage(storage, f"{entry.name}/{layout.shard_file(0)}", 3 * CHUNK_BYTES)
    monkeypatch.setattr(storage, "reader", BadSector)
    problems = verify(storage, entry)
    assert [p.chunk for p in problems] == [1, 3]
    assert "Input/output error" in problems[0].message


def test_missing_and_short_files_are_problems(storage):
    write_step(storage, 10, ranks=2)
    entry = only(storage)
    storage.remove(f"{entry.name}/{layout.shard_file(0)}")
    os.truncate(f"{storage.root}/{entry.name}/{layout.shard_file(1)}", 4096)
    messages = {p.file: p.message for p in verify(storage, entry)}
    assert messages[layout.shard_file(0)] == "is missing"
    assert "has 4096 bytes" in messages[layout.shard_file(1)]


def test_verify_reads_past_the_page_cache(storage, monkeypatch):
    write_step(storage, 10)
    dropped = []
    drop = storage.drop_cache
    monkeypatch.setattr(storage, "drop_cache", lambda path: (dropped.append(path), drop(path)))
    entry = only(storage)
    verify(storage, entry)
    assert sorted(dropped) == sorted(f"{entry.name}/{name}" for name in entry.manifest.files)
