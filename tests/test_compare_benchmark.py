"""The benchmark against other libraries tells what a checkpoint is worth after a fault as it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import compare_faults as faults
from benchmarks import peers
from benchmarks.peers import base

SIZE = faults.Size(width=64, layers=4, batch=2)


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ({"step": 10, "digest": "ten"}, faults.WHOLE),
        ({"step": 5, "digest": "five"}, faults.OLDER),
        ({"step": 10, "digest": "neither"}, faults.WRONG),
        ({"step": None, "digest": None}, faults.NOTHING),
        ({"error": "OSError: gone"}, faults.REFUSED),
        ({"error": "it hung", "hung": True}, faults.HUNG),
        ({"error": "TimeoutError: no saver", "not started": True}, faults.NOT_STARTED),
    ],
)
def test_an_outcome_is_judged_by_the_bits_that_were_loaded(loaded, expected):
    assert faults.outcome(loaded, {"five": 5, "ten": 10}, 10) == expected


def test_a_bit_flipped_twice_is_as_before(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    flip_back = faults.flip(path, 0.5)
    assert path.read_bytes() == bytes(50) + b"\x10" + bytes(49)
    flip_back()
    assert path.read_bytes() == bytes(100)


def test_checkpoints_are_found_by_their_number(tmp_path: Path):
    for name in ("run/step-00000010/rank-00000", "run/step-9/rank-0", "latest", ".step-11.x.tmp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step-5.pt").touch()
    assert sorted(base.saved(tmp_path)) == [5, 9, 10]
    assert base.newest(tmp_path) == tmp_path / "run/step-00000010"


def test_every_adapter_is_described_without_its_library():
    assert [peers.peer(name).name for name in peers.WHERE] == list(peers.WHERE)
    assert all(peers.peer(name).about for name in peers.WHERE)


def test_torch_save_is_seen_to_load_a_flipped_bit_in_silence():
    with faults.place() as where:
        written = faults.prepare("torch.save", where, SIZE)
        assert sorted(written.digests.values()) == list(range(1, 11))
        assert written.peak_bytes > 0
        found = faults.damaged("torch.save", where, SIZE, written, [0.5])
    assert [one["outcome"] for one in found["bit flip"]] == [faults.WRONG]
    assert [one["outcome"] for one in found["missing file"]] == [faults.OLDER]


def test_easyckpt_is_seen_to_fall_back_after_a_flipped_bit_and_a_kill():
    with faults.place() as where:
        written = faults.prepare("easyckpt", where, SIZE)
        path = base.newest(where.root)
        assert path is not None
        faults.flip(faults.largest_file(path), 0.5)
        loaded = faults.load("easyckpt", where, SIZE)
    assert faults.outcome(loaded, written.digests, 10) == faults.OLDER
    found = faults.killed_in_time("easyckpt", SIZE, written.seconds, random.Random(1))
    assert found["killed, memory kept"]["outcome"] in {faults.WHOLE, faults.OLDER}
    assert found["killed"]["outcome"] in {faults.WHOLE, faults.OLDER}


@pytest.mark.soak
def test_what_a_kill_leaves_in_memory_does_not_count_where_memory_is_lost():
    """The process that finds it there commits it when it ends: what is loaded next must not be that."""
    found = faults.killed_in_time("easyckpt", faults.Size(width=512, layers=16, batch=8), 0.3, random.Random(1))
    assert found["killed"]["outcome"] == faults.OLDER
    assert found["killed, memory kept"]["outcome"] == faults.WHOLE
