from __future__ import annotations

import itertools
import sys
import threading
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from easyckpt.format import checksum

CHUNK = 4  # small, so that most examples have several chunks and pieces that cross their edges


@pytest.fixture
def _small_chunks(monkeypatch):
    monkeypatch.setattr(checksum, "CHUNK_BYTES", CHUNK)


@pytest.mark.usefixtures("_small_chunks")
@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_digests_do_not_depend_on_the_pieces(data, cuts):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[begin:end] for begin, end in itertools.pairwise(edges)]
    expected = [xxhash.xxh3_64_hexdigest(data[begin : begin + CHUNK]) for begin in range(0, len(data), CHUNK)]
    assert checksum.chunk_digests(pieces) == expected
    assert checksum.chunk_count(len(data)) == len(expected)
    assert checksum.digest_bytes(data) == checksum.file_digest(len(data), expected)


@pytest.mark.usefixtures("_small_chunks")
@given(st.binary(min_size=1, max_size=40), st.data())
def test_every_bit_counts(data, draw):
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    other = bytearray(data)
    other[bit // 8] ^= 1 << bit % 8
    assert checksum.digest_bytes(other) != checksum.digest_bytes(data)
    assert checksum.digest_bytes(data[:-1]) != checksum.digest_bytes(data)
    assert checksum.digest_bytes(data + b"\0") != checksum.digest_bytes(data)


def test_the_form_of_digests():
    assert checksum.chunk_digests([]) == []
    assert checksum.digest_bytes(b"") == checksum.file_digest(0, [])
    prefix, digits = checksum.digest_bytes(b"a").split(":")
    assert prefix == "xxh3"
    assert len(digits) == 16
    # Fixed for ever: what is on disk was made with these.
    assert checksum.chunk_digests([b"easyckpt"]) == ["2c33a41933cda8f5"]
    assert checksum.digest_bytes(b"easyckpt") == "xxh3:" + xxhash.xxh3_64_hexdigest(b"8:2c33a41933cda8f5")


def test_buffers_of_any_form_are_read_as_bytes():
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    assert checksum.digest_bytes(memoryview(array)) == checksum.digest_bytes(array.tobytes())
    assert checksum.digest_bytes(memoryview(np.zeros((0, 3)))) == checksum.digest_bytes(b"")


def test_large_updates_leave_the_gil_to_others(monkeypatch):
    """Another thread notes the time again and again, also in the middle of one long update."""
    monkeypatch.setattr(checksum, "CHUNK_BYTES", 1 << 40)
    data = bytearray(128 << 20)
    hasher = checksum.ChunkHasher()
    ticks: list[float] = []
    stop = threading.Event()

    def note() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())

    # Around the call the threads may take turns for an interval; in the middle third only a released GIL lets ticks in.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    thread = threading.Thread(target=note)
    thread.start()
    try:
        assert any(_ticked_midway(hasher, data, ticks) for _ in range(20))
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def _ticked_midway(hasher, data, ticks) -> bool:
    ticks.clear()
    begin = time.perf_counter()
    hasher.update(data)
    third = (time.perf_counter() - begin) / 3
    return any(begin + third < tick < begin + 2 * third for tick in list(ticks))
