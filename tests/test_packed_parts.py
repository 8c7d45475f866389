"""Parts in a manifest are packed: small, passed over by whoever only looks, and unpacked within bounds."""

from __future__ import annotations

import base64
import json
import zlib

import pytest

from easyckpt.errors import DamagedCheckpoint, SaveFailed
from easyckpt.format import parts
from easyckpt.format.canonical import dumps
from easyckpt.format.image import LeafSpec, plan_layout
from easyckpt.format.manifest import FileRecord, Manifest

FILES = {"model.safetensors": FileRecord(1 << 40, "xxh3:" + "0" * 16)}


def part_of(rank: int, *, parameters: int, world_size: int) -> bytes:
    specs = [
        LeafSpec(("optimizer", "state", number, name), "float32", (1024, 64 + number % 3), (0, 1), "cuda", True)
        for number in range(parameters)
        for name in ("exp_avg", "exp_avg_sq", "step")
    ]
    trees = {"optimizer": {str(number): {"$": "tensor", "v": number} for number in range(len(specs))}}
    layout = plan_layout(specs, trees, rank, world_size)
    places = [("model.safetensors", leaf.offset) if rank == 0 else None for leaf in layout.leaves]
    return parts.part_text(layout, dumps({"step": rank}), places, b"")


def manifest_of(texts: list[bytes]) -> Manifest:
    fields = {"run": "0" * 32, "timeline": "t", "step": 3, "attempt": "a-1", "created": 1.0}
    data = Manifest(world_size=len(texts), files=FILES, **fields).to_bytes(texts)
    assert len(data) < sum(map(len, texts)) + 1000
    return Manifest.from_bytes(data)


def test_a_part_is_small_and_read_back_by_who_needs_it():
    manifest = manifest_of([part_of(rank, parameters=580, world_size=2) for rank in range(2)])
    assert all(type(part) is str for part in manifest.parts), "nobody who only looks has more to pass over than a word"
    for rank, packed in enumerate(manifest.parts):
        assert len(packed) < len(parts.unpack(packed)) / 4
        part = parts.read_part(manifest.parts, rank, manifest.files)
        assert (part.layout.rank, len(part.places), part.objects) == (rank, 1740, {"step": rank})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def packed_of(text: bytes) -> bytes:
    return base64.b64encode(zlib.compress(text))


@pytest.mark.parametrize(
    "packed",
    [
        "", "!", "AAAA", packed_of(b"{}").decode()[:-8], packed_of(b"{}").decode() + "AAAA", packed_of(b"[1").decode(),
        base64.b64encode(zlib.compress(b"{}") + b"more").decode(), "é",
    ],
)  # fmt: skip
def test_what_cannot_be_unpacked_is_damage(packed):
    with pytest.raises(DamagedCheckpoint):
        parts.read_part([packed], 0, FILES)


def test_what_nobody_would_read_again_is_not_written(monkeypatch):
    size = len(parts.unpack(json.loads(part_of(0, parameters=5, world_size=1))))
    monkeypatch.setattr(parts, "MAX_TEXT_BYTES", size)
    part_of(0, parameters=5, world_size=1)
    monkeypatch.setattr(parts, "MAX_TEXT_BYTES", size - 1)
    with pytest.raises(SaveFailed, match=f"rank 0.*{size} bytes"):
        part_of(0, parameters=5, world_size=1)


def test_a_few_bytes_that_stand_for_more_than_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr(parts, "MAX_TEXT_BYTES", 1 << 16)
    within = json.dumps("x" * ((1 << 16) - 2)).encode()
    assert parts.unpack(parts.pack(within)) == within
    with pytest.raises(DamagedCheckpoint, match="larger"):
        parts.unpack(parts.pack(within + b" "))
