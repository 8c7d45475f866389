"""What only one side has: refused, or left out and said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt.cli import app
from easyckpt.errors import ConfigError, StateMismatch
from easyckpt.format import layout


def save(root: Path | str) -> None:
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


@pytest.mark.parametrize(
    "components", ["model", b"model", 3, iter(["model"])], ids=["text", "bytes", "number", "iterator"]
)
def test_components_that_are_no_list_of_names_are_refused(tmp_path, components):
    """A name by itself would be taken letter by letter, and an iterator is empty after the first look."""
    save(tmp_path / "run")
    state = {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "ema": {"weight": torch.zeros(3)}}
    with pytest.raises(ConfigError, match=r"components must be a list of names, such as \['model'\]"):
        easyckpt.restore(tmp_path / "run", state, components=components)
    with easyckpt.Checkpointer(tmp_path / "run", state, signals=()) as checkpointer:
        with pytest.raises(ConfigError, match="components must be a list of names"):
            checkpointer.load(components=components)
        assert checkpointer.load(components={"model"}).step == 7


def test_a_root_is_named(tmp_path, monkeypatch):
    """'' would be the current directory."""
    monkeypatch.chdir(tmp_path)
    for call in (easyckpt.Checkpointer, easyckpt.restore):
        with pytest.raises(ConfigError, match="root must be the path of a directory, not ''"):
            call("", {"model": nn.Linear(1, 1)})
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/run")
    assert (tmp_path / "run" / layout.ROOT_FILE).exists()
    assert easyckpt.restore("~/run", {"ema": {"weight": torch.zeros(3)}}).path.startswith(str(tmp_path / "run"))
    for target in ("~/run", "~/run@7", f"~/run/{layout.step_dir(7)}"):
        with pytest.raises(SystemExit) as ended:
            app(["verify", target])
        assert ended.value.code == 0
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("root", ["s3://bucket/run", "gs://bucket/run", "file:///tmp/run"])
def test_a_url_is_no_root(tmp_path, monkeypatch, root):
    """It would become a directory called s3:, on a disk that goes with the node."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="URL"):
        easyckpt.Checkpointer(root, {"model": nn.Linear(1, 1)}, signals=())
    with pytest.raises(ConfigError, match="URL"):
        easyckpt.restore(root, {"model": nn.Linear(1, 1)})
    assert list(tmp_path.iterdir()) == []
