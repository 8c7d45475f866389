"""A checkpoint that a callback asks for on one rank of two, and on both, and that one of them cannot save."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.trainers.launch import run
from tests.trainers.semantics.trainings import checkpoints, whole

VERSION = transformers.__version__.partition(".")[0]


def ended_with(out: Path, tmp_path: Path, who: str, how: str) -> list[str]:
    """What each rank has ended with."""
    record = tmp_path / "ended"
    run(VERSION, [out, record, who, how], ranks=2, beside=tmp_path / "said", job="tests.trainers.askers")
    return [Path(f"{record}.{rank}").read_text() for rank in (0, 1)]


@pytest.mark.parametrize("how", ["stock", "own"])
@pytest.mark.parametrize("who", ["0", "1"])
def test_one_rank_alone_is_told_what_it_did(out, tmp_path, who, how):
    told = ended_with(out, tmp_path, who, how)[int(who)]
    assert told.startswith("PeerTimeout: rank ")
    assert "the checkpoint of step 6" in told
    assert "control.should_save on all ranks" in told
    assert checkpoints(out) == [4]
    assert whole(out, 4)


@pytest.mark.parametrize("how", ["stock", "own"])
def test_all_ranks_together_get_their_checkpoint(out, tmp_path, how):
    assert ended_with(out, tmp_path, "all", how) == ["", ""]
    assert checkpoints(out) == [4, 6, 8, 12]
    assert whole(out, 6)


@pytest.mark.parametrize("how", ["before", "after", "interrupted", "unreadable"])
@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_cannot_save_is_told_to_the_other(out, tmp_path, who, how):
    told = ended_with(out, tmp_path, str(who), how)
    kind = "KeyboardInterrupt" if how == "interrupted" else "OSError"
    failed = 0 if told[0].startswith(kind) else 1
    assert failed == who or how == "unreadable"  # what several ranks see, the first of them reads
    assert told[failed].startswith(kind)
    assert told[1 - failed].startswith("PeerFailed: ")  # and no PeerTimeout
    assert kind in told[1 - failed]
    assert checkpoints(out) == [4]
    assert whole(out, 4)
