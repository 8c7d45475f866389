from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from easyckpt.errors import DamagedCheckpoint, ForeignFormat, FormatError, NewerFormat, UnsupportedValue
from easyckpt.format import manifest, records
from easyckpt.format.canonical import dumps, loads
from easyckpt.format.checksum import CHUNK_BYTES, digest_bytes
from easyckpt.format.image import LeafSpec, plan_layout, shard_header, written_bytes
from tests.support.json_values import places

RUN = "0123456789abcdef" * 2
LAYOUT = plan_layout(
    [
        LeafSpec(("m", "w"), "float32", (2, 3), (1, 0), "cpu", False),
        LeafSpec(("m", 0), "bool", (), (), "cuda", True),
    ],
    {"m": {"w": {"$": "tensor", "v": 0}}},
    1,
    2,
)
SIZE = len(shard_header(LAYOUT, True)) + written_bytes(LAYOUT, True)
MANIFEST = manifest.Manifest(
    run=RUN,
    timeline="t1",
    step=30,
    world_size=2,
    attempt="n-1",
    created=1.7e9,
    parent=f"{RUN}/t0/10",
    files={
        "rank-00000.json": manifest.FileRecord(10, digest_bytes(b"x")),
        "ü.bin": manifest.FileRecord(0, digest_bytes(b"")),
    },
    metrics={"loss": math.inf, "n": 3, "pair": (1, 2)},
)
INDEX = manifest.Index(
    run=RUN,
    timeline="t1",
    step=30,
    rank=1,
    world_size=2,
    layout=LAYOUT,
    objects={"trees": {"scheduler": [1, "é", {"$": "tuple", "v": []}]}},
    shard=manifest.ShardRecord(
        name="rank-00001.safetensors",
        size=SIZE,
        header_bytes=len(shard_header(LAYOUT, True)),
        write_replicated=True,
        chunks=("0123456789abcdef",),
    ),
)
ROOT = manifest.RootRecord(
    run=RUN,
    created=1.0,
    timelines=(
        manifest.Timeline("t0", None, 0, False, 1.0),
        manifest.Timeline("t1", "t0", 20, False, 2.0),
        manifest.Timeline("t2", "t1", 10, True, 3.0),
        manifest.Timeline("t3", "t0", 15, False, 4.5),
    ),
)
LEASE = manifest.LeaseRecord(
    host="node", boot="b", pid=7, run=RUN, incarnation="i", token="x-1", lock="/dev/shm/l", restart_count=2, time=5.5
)
RECORDS = [MANIFEST, INDEX, ROOT, LEASE]
KINDS = pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)


@KINDS
def test_a_record_is_read_back_equal(record):
    data = record.to_bytes()
    again = type(record).from_bytes(data)
    assert again == record
    assert again.to_bytes() == data
    assert list(json.loads(data))[-1] == "digest"


@KINDS
def test_every_flipped_bit_and_every_cut_is_noticed(record):
    data = record.to_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        for damaged in (bytes(flipped), data[:position]):
            with pytest.raises(FormatError):
                type(record).from_bytes(damaged)
    with pytest.raises(DamagedCheckpoint):
        type(record).from_bytes(data + b"\0")


def resealed(record, change):
    """`record` after `change`, with a digest that fits: what a clumsy or hostile writer could leave."""
    value = loads(record.to_bytes())
    del value["digest"]
    change(value)
    return records.seal(dumps(value))


@KINDS
def test_other_files_are_called_foreign(record):
    others = [other.to_bytes() for other in RECORDS if other is not record]
    for data in (*others, b"{}", b"[]", b"3", b'{"kind":[]}', b'{"model":{"a":1}}'):
        with pytest.raises(ForeignFormat):
            type(record).from_bytes(data)


@KINDS
def test_what_is_not_json_is_damaged(record):
    for data in (b"", b"\0" * 100, b"PK\x03\x04", b"{"):
        with pytest.raises(DamagedCheckpoint):
            type(record).from_bytes(data)


@KINDS
def test_newer_versions_and_unknown_features_are_refused_by_name(record):
    with pytest.raises(NewerFormat, match="format 2"):
        type(record).from_bytes(resealed(record, lambda value: value.update(format=2)))
    with pytest.raises(NewerFormat, match="holograms"):
        type(record).from_bytes(resealed(record, lambda value: value.update(features=["holograms"])))
    with pytest.raises(NewerFormat, match="holograms"):
        type(record).from_bytes(dataclasses.replace(record, features=("holograms",)).to_bytes())


@KINDS
def test_a_field_that_an_optional_later_addition_brings_is_ignored(record):
    assert type(record).from_bytes(resealed(record, lambda value: value.update(later=[1]))) == record


WRONG = [None, True, -1, 2**70, 1.5, "", "../x", "A" * 70, [], {}, [None], {"a": None}, {"$": "tensor", "v": 0}]


@KINDS
def test_every_field_is_checked(record):
    for name, good in loads(record.to_bytes()).items():
        if name == "digest":
            continue
        with pytest.raises(FormatError):
            type(record).from_bytes(resealed(record, lambda value, name=name: value.pop(name)))
        for wrong in WRONG:
            if wrong == good:
                continue
            data = resealed(record, lambda value, name=name, wrong=wrong: value.update({name: wrong}))
            try:
                again = type(record).from_bytes(data)
            except FormatError:
                continue
            kept = loads(again.to_bytes())[name]  # a value that this field may have
            assert kept == wrong or float(kept) == float(wrong)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.sampled_from(RECORDS), st.data())
def test_swapped_types_give_only_format_errors(record, data):
    def change(value):
        for _ in range(data.draw(st.integers(1, 2))):
            node, key = data.draw(st.sampled_from(places(value)))
            if isinstance(node, dict) and data.draw(st.booleans()):
                node[data.draw(st.sampled_from(["$", "", "/", "..", "v"]))] = node.pop(key)
            else:
                node[key] = copy.deepcopy(data.draw(st.sampled_from(WRONG)))  # a later change may go into it

    text = resealed(record, change)
    try:
        again = type(record).from_bytes(text)
    except FormatError:
        return
    assert type(record).from_bytes(again.to_bytes()) == again


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", "a//b", "a/", "..", "", "a\0", "\ud800", "x" * 256])
def test_no_file_outside_the_directory(name):
    record = {"size": 1, "digest": digest_bytes(b"")}
    with pytest.raises(DamagedCheckpoint, match="file"):
        manifest.Manifest.from_bytes(resealed(MANIFEST, lambda value: value["files"].update({name: record})))
    with pytest.raises(DamagedCheckpoint, match="name"):
        manifest.Index.from_bytes(resealed(INDEX, lambda value: value["shard"].update(name=name)))


@pytest.mark.parametrize(
    "change",
    [
        {"size": SIZE + 1}, {"header_bytes": 4097}, {"header_bytes": 0}, {"write_replicated": False}, {"chunks": []},
        {"chunks": ["0" * 16, "0" * 16]}, {"chunks": ["0" * 15]}, {"chunks": ["G" * 16]}, {"size": SIZE + CHUNK_BYTES},
    ],
)  # fmt: skip
def test_shard_and_layout_must_agree(change):
    with pytest.raises(DamagedCheckpoint):
        manifest.Index.from_bytes(resealed(INDEX, lambda value: value["shard"].update(change)))


def test_an_index_carries_the_layout_of_its_own_rank():
    for change in ({"rank": 0}, {"world_size": 3}):
        with pytest.raises(DamagedCheckpoint, match="rank"):
            manifest.Index.from_bytes(resealed(INDEX, lambda value, change=change: value.update(change)))


def test_objects_can_be_given_as_text():
    without = dataclasses.replace(INDEX, objects=None)
    assert without.to_bytes(dumps(INDEX.objects)) == INDEX.to_bytes()


def test_metrics_are_exact():
    again = manifest.Manifest.from_bytes(MANIFEST.to_bytes()).metrics
    assert again == {"loss": math.inf, "n": 3, "pair": (1, 2)}
    with pytest.raises(UnsupportedValue, match="metrics"):
        dataclasses.replace(MANIFEST, metrics={"f": print}).to_bytes()


def test_the_past_of_the_newest_timeline():
    assert ROOT.ancestry() == [("t3", None), ("t0", 15)]
    assert ROOT.on_ancestry("t3", 10**9)
    assert ROOT.on_ancestry("t0", 15)
    assert not ROOT.on_ancestry("t0", 16)
    assert not ROOT.on_ancestry("t1", 1)
    assert not ROOT.on_ancestry("unknown", 1)


def test_a_fork_before_an_older_fork_hides_what_lies_between():
    root = dataclasses.replace(ROOT, timelines=ROOT.timelines[:3])
    assert root.ancestry() == [("t2", None), ("t1", 10), ("t0", 10)]
    assert dataclasses.replace(ROOT, timelines=()).ancestry() == []


@pytest.mark.parametrize(
    "timelines",
    [
        [("a", "b", 1), ("b", "a", 1)],
        [("a", "a", 1)],
        [("a", None, 0), ("a", None, 0)],
        [("a", "gone", 1)],
        [("a", None, -1)],
        [("a/b", None, 0)],
    ],
)
def test_timelines_that_make_no_sense(timelines):
    lines = tuple(manifest.Timeline(name, parent, fork, False, 0.0) for name, parent, fork in timelines)
    with pytest.raises(DamagedCheckpoint):
        manifest.RootRecord.from_bytes(dataclasses.replace(ROOT, timelines=lines).to_bytes())
