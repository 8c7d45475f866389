"""What a flush leaves on storage: the slot's bytes, exactly, durable and in order, or an error and no more."""

from __future__ import annotations

import errno
import threading

import pytest
import safetensors.torch
import torch
from support.checkpoints import make_view, write_checkpoint
from support.recording import VARIANTS, RecordingStorage

from easyckpt import failpoints
from easyckpt.errors import OutOfSpace, SaveFailed
from easyckpt.format.checksum import ChunkHasher, chunk_digests, digest_bytes
from easyckpt.format.image import Layout
from easyckpt.format.manifest import Index
from easyckpt.memory.private_slot import PrivateSlot
from easyckpt.saving import writer
from easyckpt.saving.writer import FilePlan, ShardWriter, index_digests, replicated_digest
from easyckpt.storage.local import LocalStorage

MIB = 1024 * 1024


@pytest.fixture
def storage(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    storage.makedirs("attempt")
    return storage


def tensors(seed=0, elements=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(elements, 5, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.tensor(3),
        "none": torch.empty(0, 4),
        "images": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "complex": torch.randn(3, dtype=torch.complex128, generator=generator),
    }


def test_the_shard_is_a_safetensors_file_and_the_image_as_it_stands(storage):
    view = make_view(tensors())
    records = ShardWriter(storage).write("attempt", view, write_replicated=True)
    data = storage.read("attempt/rank-00000.safetensors")
    index = Index.from_bytes(storage.read("attempt/rank-00000.json"))
    assert data[index.shard.header_bytes :] == bytes(view.image)
    loaded = safetensors.torch.load(data)
    assert torch.equal(loaded["model.weight"], tensors()["weight"])
    assert torch.equal(loaded["model.images"], tensors()["images"].permute(0, 2, 3, 1))
    assert set(records) == {"rank-00000.safetensors", "rank-00000.json"}


@pytest.mark.parametrize("hash_threads", [0, 1])
@pytest.mark.parametrize("mib", [0, 1, 8, 17, 40])
def test_records_and_chunks_are_those_of_the_files(storage, mib, hash_threads):
    view = make_view({"big": torch.arange(mib * MIB + 123, dtype=torch.int64).to(torch.uint8), **tensors()})
    records = ShardWriter(storage, hash_threads=hash_threads).write("attempt", view, write_replicated=True)
    for name, record in records.items():
        data = storage.read(f"attempt/{name}")
        assert (record.size, record.digest) == (len(data), digest_bytes(data))
    index = Index.from_bytes(storage.read("attempt/rank-00000.json"))
    assert list(index.shard.chunks) == chunk_digests([storage.read("attempt/rank-00000.safetensors")])
    assert index.layout == Layout.from_bytes(view.static)
    assert index.objects == {"trees": {}}
    assert (index.step, index.timeline, index.rank) == (10, "main", 0)


def test_a_snapshot_is_written_by_its_own_layout_though_training_hands_over_the_next_one(storage, monkeypatch):
    view, following = make_view(tensors()), make_view(tensors(elements=100))
    writer = ShardWriter(storage)
    writer.prepare(Layout.from_bytes(view.static))
    later, digest = Layout.from_bytes(following.static), Layout.digest.fget

    def handed_over_just_now(layout):
        writer.prepare(later)
        return digest(layout)

    monkeypatch.setattr(Layout, "digest", property(handed_over_just_now))
    writer.write("attempt", view, write_replicated=True)
    assert Index.from_bytes(storage.read("attempt/rank-00000.json")).layout == Layout.from_bytes(view.static)
    loaded = safetensors.torch.load(storage.read("attempt/rank-00000.safetensors"))
    assert torch.equal(loaded["model.weight"], tensors()["weight"])


def test_a_snapshot_that_is_written_over_meanwhile_is_never_taken_for_whole(storage, monkeypatch):
    slot = PrivateSlot.create("test", MIB, 4096)
    view = make_view(tensors())
    slot.begin()
    slot.image[: view.image.nbytes] = view.image
    slot.seal(view.meta, view.static, view.objects)

    def written_over():
        if not slot.writing:
            slot.begin()
        return False

    with pytest.raises(SaveFailed, match=r"step 10 was given up while rank-00000\.safetensors was being written"):
        ShardWriter(storage).write("attempt", slot.view(), write_replicated=True, abandoned=written_over)
    assert not storage.exists("attempt/rank-00000.json")


def test_only_rank_0_writes_what_is_replicated(storage):
    ranks = [make_view(tensors(), replicated=["weight", "half"], rank=rank, world_size=2) for rank in (0, 1)]
    write_checkpoint(storage, *ranks, directory="attempt")
    first = safetensors.torch.load(storage.read("attempt/rank-00000.safetensors"))
    second = safetensors.torch.load(storage.read("attempt/rank-00001.safetensors"))
    assert {"model.weight", "model.half"} <= first.keys()
    assert second.keys() == {"model.count", "model.none", "model.images", "model.complex"}


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [4095, 1], [4096, 5 * MIB], [10, 3 * MIB + 7, 20 * MIB], [17 * MIB, 1], [1] * 5000]
)
def test_a_plan_of_parts_of_any_size_becomes_exactly_their_bytes(storage, sizes):
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    written = ShardWriter(storage).write_file("attempt", FilePlan("file", iter(parts)))
    expected = b"".join(parts)
    assert storage.read("attempt/file") == expected
    assert (written.size, list(written.chunks)) == (len(expected), chunk_digests([expected]))


def test_a_streaming_encoder_is_never_ahead_of_what_is_written(storage):
    handed_out = []

    def encoder():
        for number in range(64):
            handed_out.append(number)
            yield bytes([number]) * MIB

    def abandoned():
        return len(handed_out) > 20

    with pytest.raises(SaveFailed, match="abandoned"):
        ShardWriter(storage).write_file("attempt", FilePlan("file", encoder()), abandoned)
    assert len(handed_out) < 40


def test_shard_and_index_are_durable_in_this_order(storage):
    for armed in (writer.SHARD_WRITTEN, writer.SHARD_SYNCED, writer.INDEX_WRITTEN, writer.INDEX_SYNCED):
        failpoints.arm(f"{armed}=error:EIO")
        with pytest.raises(OSError, match=armed):
            ShardWriter(storage).write("attempt", make_view(tensors()), write_replicated=True)
        names = storage.listdir("attempt")
        assert ("rank-00000.json" in names) == armed.startswith("writer.index")
        storage.remove_tree("attempt")
        storage.makedirs("attempt")


def test_what_write_returns_survives_a_power_cut(tmp_path):
    storage = RecordingStorage(tmp_path / "root")
    storage.makedirs("attempt")
    records = ShardWriter(storage).write("attempt", make_view(tensors()), write_replicated=True)
    storage.sync_dir("attempt")
    for variant in VARIANTS:
        storage.materialise(len(storage.operations), variant, tmp_path / variant)
        for name, record in records.items():
            data = (tmp_path / variant / "attempt" / name).read_bytes()
            assert (len(data), digest_bytes(data)) == (record.size, record.digest)


def test_slow_checksums_never_see_memory_that_was_used_again(storage, monkeypatch):
    started = threading.Event()
    real = ChunkHasher.update

    def late(self, buffer):
        started.wait(0.05)  # nobody sets it: by now a writer that does not wait has gathered the next part
        real(self, buffer)

    monkeypatch.setattr(ChunkHasher, "update", late)
    parts = [bytes([number]) * (writer.GATHER_BYTES // 2) for number in range(8)]
    written = ShardWriter(storage).write_file("attempt", FilePlan("file", iter(parts)))
    monkeypatch.undo()
    assert list(written.chunks) == chunk_digests(parts)


@pytest.mark.parametrize("name", sorted(name for name in failpoints.NAMES if name.startswith("writer.")))
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_an_error_anywhere_is_raised_and_leaves_no_thread(storage, name, error):
    failpoints.arm(f"{name}=error:{error}")
    view = make_view({"big": torch.zeros(40 * MIB, dtype=torch.uint8)})
    with pytest.raises(OSError, match=name) as caught:
        ShardWriter(storage).write("attempt", view, write_replicated=True)
    assert caught.value.errno == getattr(errno, error)
    assert not [thread for thread in threading.enumerate() if thread.name == "easyckpt-hash"]


def test_a_flush_is_abandoned_between_two_writes(storage):
    asked = []

    def abandoned():
        asked.append(1)
        return len(asked) == 3

    view = make_view({"big": torch.zeros(100 * MIB, dtype=torch.uint8)})
    with pytest.raises(SaveFailed, match="abandoned"):
        ShardWriter(storage).write("attempt", view, write_replicated=True, abandoned=abandoned)
    assert storage.listdir("attempt") == ["rank-00000.safetensors"]
    assert storage.stat_size("attempt/rank-00000.safetensors") < 40 * MIB


def test_too_little_space_is_found_before_anything_is_written(storage, monkeypatch):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 5000)
    with pytest.raises(OutOfSpace, match=r"needs \d{5,} bytes for step 10, 5000 are free"):
        ShardWriter(storage).write("attempt", make_view(tensors()), write_replicated=True)
    assert storage.listdir("attempt") == []


def test_bytes_that_must_stay_free_count_as_needed(storage):
    with pytest.raises(OutOfSpace, match="to stay free"):
        ShardWriter(storage, min_free_bytes=1 << 60).write("attempt", make_view(tensors()), write_replicated=True)


def test_without_a_new_thread_checksums_are_computed_between_the_writes(storage, monkeypatch):
    def refuse(name):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(writer, "Worker", refuse)
    records = ShardWriter(storage).write("attempt", make_view(tensors()), write_replicated=True)
    data = storage.read("attempt/rank-00000.safetensors")
    assert records["rank-00000.safetensors"].digest == digest_bytes(data)


def test_digests_name_the_replicated_leaf_that_differs():
    other = {**tensors(), "half": tensors(1)["half"], "count": torch.tensor(4)}
    views = [
        make_view(state, replicated=["weight", "half"], rank=rank, world_size=2)
        for rank, state in enumerate((tensors(), other))
    ]
    first, second = map(index_digests, views)
    assert first.keys() == second.keys() == {'["model","weight"]', '["model","half"]'}
    assert [path for path in first if first[path] != second[path]] == ['["model","half"]']
    assert replicated_digest(views[0]) != replicated_digest(views[1])


def test_digests_are_equal_where_only_the_ranks_own_leaves_differ():
    views = [
        make_view({**tensors(), "count": torch.tensor(rank)}, replicated=["weight", "half"], rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    assert replicated_digest(views[0]) == replicated_digest(views[1])


def test_writing_does_not_touch_the_slot(storage):
    view = make_view(tensors())
    before = bytes(view.image)
    ShardWriter(storage).write("attempt", view, write_replicated=True)
    assert bytes(view.image) == before
    assert view.still_sealed()
