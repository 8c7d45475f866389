"""A training that goes on with other arguments, or on other ranks, than those it was stopped with."""

from __future__ import annotations

import pytest
import transformers

from easyckpt import WorldSizeChanged
from tests.trainers.launch import run
from tests.trainers.semantics.trainings import forget_memory, make

VERSION = transformers.__version__.partition(".")[0]


def test_other_ranks_are_told_what_a_trainers_user_can_do(out, tmp_path):
    words = [out, tmp_path / "heard"]
    ended = run(VERSION, words, ranks=2, beside=tmp_path / "said", job="tests.trainers.listening")
    assert ended.codes == [0, 0], ended.said
    forget_memory()
    with pytest.raises(WorldSizeChanged, match=r"saved by 2 ranks.*as many processes.*without TrainerWrapper") as told:
        make(out).train(resume_from_checkpoint=True)
    assert "from_pretrained" in str(told.value)
    trainer = make(out, wrap=False, max_steps=25, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-24"))
    assert trainer.state.global_step == 25
