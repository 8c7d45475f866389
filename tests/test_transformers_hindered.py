"""Where one rank cannot do its part of a save that the Trainer makes by itself, no other is left waiting."""

from __future__ import annotations

import pytest

from tests.trainers.launch import VERSIONS, run


def raised(version, tmp_path, *what):
    ended = run(
        version,
        [tmp_path / "out", tmp_path / "raised", *what],
        ranks=2,
        beside=tmp_path / "said",
        job="tests.trainers.hindered",
    )
    assert ended.codes == [0, 0], ended.said
    return [(tmp_path / f"raised.{rank}").read_text() for rank in range(2)]


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_an_error_of_the_commit_is_raised_on_all_ranks(version, tmp_path):
    first, second = raised(version, tmp_path, "commit", 0)
    assert first.startswith("SaveFailed: checkpoint-4 was not committed: ")
    assert second == first.replace("SaveFailed: ", "SaveFailed: rank 0: ")
    assert (tmp_path / "out" / "checkpoint-2" / "manifest.json").exists()


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_is_told_of(version, tmp_path, rank):
    said = raised(version, tmp_path, "write", rank)
    assert "directory" in said[rank]
    assert said[1 - rank].startswith("PeerFailed: ")
    assert f"rank {rank} gave up: the Trainer could not save step 4" in said[1 - rank]
