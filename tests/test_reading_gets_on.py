"""Ranks that have less to read wait for one that reads: it says of each piece that it gets on."""

from __future__ import annotations

import pytest
import torch

from easyckpt.dialects import of_trainer
from easyckpt.format.checksum import CHUNK_BYTES
from easyckpt.integrations.transformers import stock
from easyckpt.prospect import Prospect
from tests.support import trainer_root
from tests.test_transformers_stock import save

CHUNKS = 3


@pytest.fixture
def root(tmp_path):
    trainer_root.make(tmp_path / "out", trainer_root.state_of(odd=CHUNKS * CHUNK_BYTES // 8), until=2)
    return tmp_path / "out"


def signs_of(root, look, monkeypatch):
    """How often the ranks that wait are told, while `look` looks into the checkpoints of `root`."""
    signs = []
    with Prospect(root, of_trainer(trainer_root.SmallPlan()), signals=()) as prospect:
        monkeypatch.setattr(type(prospect.channel), "busy", lambda channel: signs.append(1))
        state = {"progress": {"epoch": 0, "kept": torch.zeros(7, dtype=torch.int64)}}
        assert look(prospect, state).step == 2
        assert state["progress"]["epoch"] == 2
    return len(signs)


def test_of_each_chunk_of_a_file_of_another_framework_s(root, monkeypatch):
    assert signs_of(root, lambda prospect, state: prospect.look(state), monkeypatch) >= CHUNKS


def test_of_a_checkpoint_elsewhere_too(root, tmp_path, monkeypatch):
    path = str(root / "checkpoint-2")
    signs = signs_of(tmp_path / "other", lambda prospect, state: prospect.look_elsewhere(path, state), monkeypatch)
    assert signs >= CHUNKS


def test_of_the_archives_of_a_checkpoint_without_checksums(tmp_path):
    signs = []
    directory = save(tmp_path / "checkpoint-10")
    torch.save({"state": torch.zeros(CHUNK_BYTES)}, directory / "optimizer.pt")
    assert stock.problem(str(directory), busy=lambda: signs.append(1)) is None
    assert len(signs) >= CHUNKS
