"""Reading one rank's part: the same bits as were saved, or an error that says what is wrong and where."""

from __future__ import annotations

import dataclasses
import warnings
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import xxhash
from support.checkpoints import make_view, raw, write_checkpoint, write_manifest

from easyckpt import catalog
from easyckpt.errors import DamagedCheckpoint, FormatError, WorldSizeChanged
from easyckpt.format.checksum import CHUNK_BYTES, digest_bytes
from easyckpt.format.image import DTYPES
from easyckpt.format.manifest import FileRecord
from easyckpt.loading import reader
from easyckpt.loading.reader import open_storage
from easyckpt.loading.snapshot import open_memory
from easyckpt.memory.private_slot import PrivateSlot
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.localfile import LocalFileReader

STEP = "step-00000010"
SHARD = "rank-00000.safetensors"
INDEX = "rank-00000.json"


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "root")


def state(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(33, 5, generator=g),
        "half": torch.randn(7, generator=g).bfloat16(),
        "scalar": torch.tensor(3 + seed),
        "none": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "images": torch.randn(2, 3, 4, 5, generator=g).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 3, generator=g).t(),
        "complex": torch.randn(3, dtype=torch.complex128, generator=g),
        "flags": torch.tensor([True, False, True]),
    }


def big(seed=0):
    """Over three chunks of a file, so that chunk 1 lies within `big` alone."""
    return {"big": torch.arange(3 * CHUNK_BYTES // 8, dtype=torch.int64) + seed, **state(seed)}


def assert_equal(snapshot, tensors):
    assert len(snapshot.layout.leaves) == len(tensors)
    for number, (name, tensor) in enumerate(tensors.items()):
        read = snapshot.leaf(number)
        assert snapshot.layout.leaves[number].path == ("model", name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert raw(read) == raw(tensor), name
        if tensor.numel() > 1:
            assert read.stride() == tensor.stride(), name


def read(storage, rank=0, world_size=1, **settings):
    return open_storage(storage, STEP, rank=rank, world_size=world_size, **settings)


def flip(storage, name, position, directory=STEP):
    path = f"{storage.root}/{directory}/{name}"
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))
    storage.drop_cache(f"{directory}/{name}")


# Whole checkpoints.


@pytest.mark.parametrize("make", [state, big])
def test_every_tensor_comes_back_bit_for_bit_in_its_memory_format(storage, make):
    view = make_view(make(), objects={"trees": {"model": [1, 2]}})
    write_checkpoint(storage, view)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        snapshot = read(storage)
        assert_equal(snapshot, make())
    assert snapshot.objects == {"trees": {"model": [1, 2]}}
    assert (snapshot.step, snapshot.timeline) == (10, "main")


@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_every_dtype_comes_back(storage, tier):
    tensors = {
        name: torch.arange(32, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items() if name != "bool"
    }
    view = make_view(tensors)
    write_checkpoint(storage, view)
    snapshot = open_memory(view, rank=0, world_size=1) if tier == "memory" else read(storage)
    for number, tensor in enumerate(tensors.values()):
        assert snapshot.leaf(number).dtype == tensor.dtype
        assert raw(snapshot.leaf(number)) == raw(tensor)


def test_a_state_without_a_single_byte(storage):
    write_checkpoint(storage, make_view({"none": torch.empty(0, 4)}))
    assert read(storage).leaf(0).shape == (0, 4)
    write_checkpoint(storage, make_view({}, step=11), directory="step-00000011")
    assert open_storage(storage, "step-00000011", rank=0, world_size=1).layout.leaves == ()


def test_an_image_that_is_handed_in_is_read_into(storage):
    write_checkpoint(storage, make_view(big()))
    slot = PrivateSlot.create("free", 4 * CHUNK_BYTES, 4096)
    snapshot = read(storage, image=slot.image)
    assert snapshot.leaf(0).data_ptr() == slot.address + snapshot.layout.leaves[0].offset
    assert_equal(snapshot, big())


def test_one_that_is_too_small_is_not_touched(storage):
    write_checkpoint(storage, make_view(big()))
    slot = PrivateSlot.create("free", 4096, 4096)
    assert_equal(read(storage, image=slot.image), big())
    assert bytes(slot.image) == bytes(4096)


def test_tensors_outlive_a_closed_snapshot(storage):
    write_checkpoint(storage, make_view(state()))
    snapshot = read(storage)
    weight = snapshot.leaf(0)
    snapshot.close()
    del snapshot
    assert raw(weight) == raw(state()["weight"])


def test_checksums_can_be_computed_elsewhere(storage):
    write_checkpoint(storage, make_view(big()))
    with ThreadPoolExecutor(1) as pool:
        assert_equal(read(storage, submit=pool.submit), big())
        flip(storage, SHARD, CHUNK_BYTES + 5)
        with pytest.raises(DamagedCheckpoint, match="chunk 1"):
            read(storage, submit=pool.submit)


def test_no_comparison_runs_on_after_an_error(storage, monkeypatch):
    write_checkpoint(storage, make_view(big()))
    jobs: list[Future] = []
    real = LocalFileReader.read_into

    def broken(self, buffer, offset):
        if offset >= 2 * CHUNK_BYTES:
            raise OSError(5, "Input/output error", "disk")
        return real(self, buffer, offset)

    monkeypatch.setattr(LocalFileReader, "read_into", broken)
    monkeypatch.setattr(reader, "_RUN", 1)
    with ThreadPoolExecutor(1) as pool:

        def submit(job):
            jobs.append(pool.submit(job))
            return jobs[-1]

        with pytest.raises(OSError, match="Input/output"):
            read(storage, submit=submit)
        assert jobs
        assert all(job.done() for job in jobs)


# Only what is needed.


def test_chunks_in_which_nothing_is_wanted_are_not_read(storage, monkeypatch):
    write_checkpoint(storage, make_view(big()))
    flip(storage, SHARD, CHUNK_BYTES + 5)
    offsets = []
    real = LocalFileReader.read_into
    monkeypatch.setattr(
        LocalFileReader, "read_into", lambda self, buffer, at: (offsets.append(at), real(self, buffer, at))[1]
    )
    snapshot = read(storage, wanted=lambda leaf: leaf.path == ("model", "half"))
    assert raw(snapshot.leaf(2)) == raw(state()["half"])
    assert all(offset >= 3 * CHUNK_BYTES for offset in offsets)
    with pytest.raises(LookupError, match=r"model\.big was not read"):
        snapshot.leaf(0)


# Two ranks.


def two_ranks(storage, share=True, tensors=big):
    own = ["scalar", "half", "none"]
    states = [{**tensors(), **{name: state(rank)[name] for name in own}} for rank in (0, 1)]
    replicated = [name for name in states[0] if name not in own]
    views = [make_view(tensors, replicated=replicated, rank=rank, world_size=2) for rank, tensors in enumerate(states)]
    write_checkpoint(storage, *views, share=share)
    return states


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tensors", [state, big])
def test_each_rank_gets_its_own_and_what_is_replicated(storage, share, tensors):
    states = two_ranks(storage, share, tensors)
    for rank in (0, 1):
        assert_equal(read(storage, rank, 2), states[rank])


def test_both_shards_land_in_the_image_that_is_handed_in(storage):
    states = two_ranks(storage)
    slot = PrivateSlot.create("free", 4 * CHUNK_BYTES, 4096)
    snapshot = read(storage, 1, 2, image=slot.image)
    assert_equal(snapshot, states[1])
    assert slot.address <= snapshot.leaf(0).data_ptr() < slot.address + slot.image_capacity


def test_a_rank_does_not_read_another_ranks_own_tensors_into_its_memory(storage):
    own = {"mine": torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)}
    shared = torch.arange(100)
    views = [
        make_view({**(own if rank == 0 else {}), "w": shared}, replicated=["w"], rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    write_checkpoint(storage, *views)
    flip(storage, SHARD, CHUNK_BYTES)
    snapshot = read(storage, 1, 2)
    assert torch.equal(snapshot.leaf(0), shared)
    assert snapshot.image.nbytes <= 8192
    with pytest.raises(DamagedCheckpoint, match=r"model\.mine"):
        read(storage, 0, 2)


def test_rot_of_what_is_replicated_is_seen_by_both(storage):
    two_ranks(storage)
    flip(storage, SHARD, 2 * CHUNK_BYTES)
    for rank in (0, 1):
        with pytest.raises(DamagedCheckpoint, match=r"rank-00000\.safetensors: chunk 2"):
            read(storage, rank, 2)


def test_a_replicated_tensor_that_rank_0_does_not_hold(storage):
    views = [
        make_view({"w": torch.zeros(3), "v": torch.zeros(2 + rank)}, replicated=["w", "v"], rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    write_checkpoint(storage, *views)
    with pytest.raises(DamagedCheckpoint, match=r"model\.v is replicated, and rank-00000"):
        read(storage, 1, 2)


def test_replicated_state_that_no_rank_has_written(storage):
    view = make_view({"w": torch.zeros(3)}, replicated=["w"], rank=1, world_size=2)
    first = make_view({"w": torch.zeros(3)}, replicated=["w"], rank=0, world_size=2)
    manifest = write_checkpoint(storage, first, view)
    from easyckpt.saving.writer import ShardWriter

    storage.remove_tree(STEP)
    storage.makedirs(STEP)
    files = {}
    for each in (first, view):
        files |= ShardWriter(storage).write(STEP, each, write_replicated=False)
    write_manifest(storage, STEP, dataclasses.replace(manifest, files=files))
    for rank in (0, 1):
        with pytest.raises(DamagedCheckpoint, match="no other shard does"):
            read(storage, rank, 2)


def test_another_number_of_ranks_is_told_apart_from_damage(storage):
    two_ranks(storage)
    with pytest.raises(WorldSizeChanged, match="saved by 2 ranks, this job has 4: start it with 2 ranks"):
        read(storage, 0, 4)


def test_one_rank_is_told_in_the_singular(storage):
    write_checkpoint(storage, make_view({"w": torch.zeros(3)}))
    with pytest.raises(WorldSizeChanged, match="saved by 1 rank, this job has 4: start it with 1 rank to"):
        read(storage, 0, 4)


# Damage, in each kind of file.


def test_rot_names_file_tensor_and_chunk(storage):
    write_checkpoint(storage, make_view(big()))
    flip(storage, SHARD, CHUNK_BYTES + 5)
    with pytest.raises(DamagedCheckpoint, match=r"step-00000010/rank-00000\.safetensors: chunk 1 .* holds model\.big$"):
        read(storage)


def test_rot_of_any_byte_of_a_small_shard_is_found(storage):
    write_checkpoint(storage, make_view(state()))
    size = storage.stat_size(f"{STEP}/{SHARD}")
    for position in [*range(0, size, 97), size - 1]:
        flip(storage, SHARD, position)
        with pytest.raises(DamagedCheckpoint, match="chunk 0"):
            read(storage)
        flip(storage, SHARD, position)
    assert_equal(read(storage), state())


@pytest.mark.parametrize("name", [INDEX, "manifest.json"])
def test_rot_of_any_byte_of_a_record_is_found(storage, name):
    write_checkpoint(storage, make_view({"w": torch.ones(3)}))
    for position in range(0, storage.stat_size(f"{STEP}/{name}"), 7):
        flip(storage, name, position)
        with pytest.raises(FormatError):
            read(storage)
        flip(storage, name, position)
    read(storage)


@pytest.mark.parametrize("name", [SHARD, INDEX, "manifest.json"])
@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_truncated_file_is_found(storage, name, size):
    write_checkpoint(storage, make_view(state()))
    storage.truncate(f"{STEP}/{name}", size)
    with pytest.raises(DamagedCheckpoint):
        read(storage)


@pytest.mark.parametrize("name", [SHARD, INDEX, "manifest.json"])
def test_extra_bytes_are_found(storage, name):
    write_checkpoint(storage, make_view(state()))
    storage.append(f"{STEP}/{name}", b"\0")
    with pytest.raises(DamagedCheckpoint):
        read(storage)


@pytest.mark.parametrize("name", [SHARD, INDEX])
def test_a_missing_file_is_named(storage, name):
    write_checkpoint(storage, make_view(state()))
    storage.remove(f"{STEP}/{name}")
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing"):
        read(storage)


@pytest.mark.parametrize("names", [[SHARD], [INDEX], [SHARD, INDEX]])
@pytest.mark.parametrize("other", [{"step": 11}, {"timeline": "lost"}, {"run": "c" * 32}])
def test_a_foreign_shard_or_index_is_found(storage, names, other):
    write_checkpoint(storage, make_view(state()))
    write_checkpoint(storage, make_view(state(1), **other), directory="other")
    for name in names:
        storage.remove(f"{STEP}/{name}")
        storage.rename(f"other/{name}", f"{STEP}/{name}")
    with pytest.raises(DamagedCheckpoint):
        read(storage)


def test_a_foreign_index_under_a_manifest_that_lists_it(storage):
    write_checkpoint(storage, make_view(state()))
    write_checkpoint(storage, make_view(state(), step=11), directory="other")
    manifest = catalog.read_manifest(storage, "other")
    write_manifest(storage, "other", dataclasses.replace(manifest, step=10))
    with pytest.raises(DamagedCheckpoint, match="index of another checkpoint"):
        open_storage(storage, "other", rank=0, world_size=1)


def test_an_index_that_fits_another_shard_than_the_manifest(storage):
    manifest = write_checkpoint(storage, make_view(state()))
    fake = FileRecord(manifest.files[SHARD].size, "xxh3:" + "0" * 16)
    write_manifest(storage, STEP, dataclasses.replace(manifest, files={**manifest.files, SHARD: fake}))
    with pytest.raises(DamagedCheckpoint, match="describes another"):
        read(storage)


def test_a_checkpoint_that_was_replaced_after_the_ranks_agreed_on_it(storage):
    write_checkpoint(storage, make_view(state()), attempt="try-2")
    with pytest.raises(DamagedCheckpoint, match="replaced"):
        read(storage, attempt="try-1")


def test_a_file_that_shrinks_while_it_is_read(storage, monkeypatch):
    write_checkpoint(storage, make_view(big()))
    monkeypatch.setattr(LocalFileReader, "read_into", lambda self, buffer, at: 0)
    with pytest.raises(DamagedCheckpoint, match="chunk 0"):
        read(storage)


# Memory.


def test_a_slot_is_opened_without_a_copy(recwarn):
    view = make_view(state(), objects={"trees": {}})
    snapshot = open_memory(view, rank=0, world_size=1)
    assert_equal(snapshot, state())
    assert snapshot.leaf(0).untyped_storage().data_ptr() == snapshot.leaf(1).untyped_storage().data_ptr()
    assert not recwarn.list


def test_tensors_outlive_their_slot():
    view = make_view(state())
    snapshot = open_memory(view, rank=0, world_size=1)
    weight = snapshot.leaf(0)
    snapshot.close()
    view.close()
    del snapshot, view
    assert raw(weight) == raw(state()["weight"])


def test_rotten_memory_is_found_where_the_slot_carries_a_digest():
    plain = make_view(state())
    digest = xxhash.xxh3_128_hexdigest(plain.image)
    open_memory(make_view(state(), image_digest=digest), rank=0, world_size=1)
    with pytest.raises(DamagedCheckpoint, match="rotten memory"):
        open_memory(make_view(state(1), image_digest=digest), rank=0, world_size=1)


def test_a_slot_of_another_rank_or_world_size():
    view = make_view(state(), rank=1, world_size=2)
    with pytest.raises(DamagedCheckpoint, match="contradict"):
        open_memory(view, rank=0, world_size=2)
    with pytest.raises(WorldSizeChanged):
        open_memory(view, rank=1, world_size=4)


def test_digest_of_a_record_is_that_of_its_bytes(storage):
    manifest = write_checkpoint(storage, make_view(state()))
    assert manifest.files[INDEX].digest == digest_bytes(storage.read(f"{STEP}/{INDEX}"))
