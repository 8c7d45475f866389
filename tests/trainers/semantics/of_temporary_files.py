"""What a resumed training puts into the system's temporary directory is gone while it trains: a kill leaves nothing."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.trainers.semantics.trainings import At, Stopped, make, same, stop, straight, weights


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_step_that_a_kill_may_end_has_no_files_of_ours_there(out, temporary, tmp_path):
    with pytest.raises(Stopped):
        make(out, callbacks=[At(5, stop)]).train()
    found = {}
    looks = [At(step, lambda control, step=step: found.update({step: ours(temporary)})) for step in (5, 6)]
    trainer = make(out, callbacks=looks)
    trainer.train(resume_from_checkpoint=True)
    assert found[6] == []
    assert found.get(5, []) == []
    assert same(weights(trainer), straight(tmp_path))


def ours(directory):
    return [name for name in os.listdir(directory) if name.startswith("easyckpt")]
