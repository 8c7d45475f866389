"""A checkpoint that a callback asks for on one rank of two, and on both."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.trainers.launch import run
from tests.trainers.semantics.trainings import checkpoints, whole

VERSION = transformers.__version__.partition(".")[0]


@pytest.mark.parametrize("who", ["0", "1"])
def test_one_rank_alone_is_told_what_it_did(out, tmp_path, who):
    record = tmp_path / "ended"
    run(VERSION, [out, record, who], ranks=2, beside=tmp_path / "said", job="tests.trainers.askers")
    told = Path(f"{record}.{who}").read_text()
    assert told.startswith("PeerTimeout: rank ")
    assert "the checkpoint of step 6" in told
    assert "control.should_save on all ranks" in told
    assert checkpoints(out) == [4]
    assert whole(out, 4)


def test_all_ranks_together_get_their_checkpoint(out, tmp_path):
    words = [out, tmp_path / "ended", "all"]
    ended = run(VERSION, words, ranks=2, beside=tmp_path / "said", job="tests.trainers.askers")
    assert ended.codes == [0, 0], ended.said
    assert checkpoints(out) == [4, 6, 8, 12]
    assert whole(out, 6)
