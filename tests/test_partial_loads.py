"""What only one side has: refused, or left out and said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt.errors import ConfigError, StateMismatch


def save(root: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    state = {"model": model, "ema": {"weight": torch.ones(3)}}
    with easyckpt.Checkpointer(root, state, signals=()) as checkpointer:
        checkpointer.load()
        checkpointer.save(7, wait=True)


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


@pytest.mark.parametrize("how", ["load", "restore"])
def test_what_a_load_without_strict_leaves_out_is_said(tmp_path, caplog, how):
    """A renamed layer would else train on from fresh weights, and nobody would know."""
    save(tmp_path / "run")
    model = nn.ModuleDict({"0": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    before = model["head"].weight.clone()
    if how == "load":
        with easyckpt.Checkpointer(tmp_path / "run", {"model": model}, signals=()) as checkpointer:
            assert checkpointer.load(strict=False).step == 7
    else:
        assert easyckpt.restore(tmp_path / "run", {"model": model}, strict=False).step == 7
    assert torch.equal(model["head"].weight, before)
    assert "restored in part only" in caplog.text
    for name in ("'1.weight' is in the checkpoint and not here", "'head.weight' is here and not in the checkpoint"):
        assert name in caplog.text
    assert ("component 'ema'" in caplog.text) == (how == "load")


def test_a_whole_load_says_nothing_of_parts(tmp_path, caplog):
    save(tmp_path / "run")
    state = {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))}
    easyckpt.restore(tmp_path / "run", state, strict=False)
    assert "in part" not in caplog.text


def test_strict_is_offered_only_where_it_helps(tmp_path):
    save(tmp_path / "run")
    with pytest.raises(StateMismatch, match="strict=False"):
        easyckpt.restore(tmp_path / "run", {"model": Renamed()})
    with pytest.raises(StateMismatch) as caught:
        easyckpt.restore(tmp_path / "run", {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))})
    assert "strict=False" not in str(caught.value)
    assert "shape" in str(caught.value)


def test_components_of_a_restore_can_be_chosen(tmp_path):
    save(tmp_path / "run")
    odd, ema = nn.Linear(1, 1), {"weight": torch.zeros(3)}
    easyckpt.restore(tmp_path / "run", {"model": odd, "ema": ema}, components=["ema"])
    assert torch.equal(ema["weight"], torch.ones(3))


@pytest.mark.parametrize("root", ["s3://bucket/run", "gs://bucket/run", "file:///tmp/run"])
def test_a_url_is_no_root(tmp_path, monkeypatch, root):
    """It would become a directory called s3:, on a disk that goes with the node."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="URL"):
        easyckpt.Checkpointer(root, {"model": nn.Linear(1, 1)}, signals=())
    with pytest.raises(ConfigError, match="URL"):
        easyckpt.restore(root, {"model": nn.Linear(1, 1)})
    assert list(tmp_path.iterdir()) == []
