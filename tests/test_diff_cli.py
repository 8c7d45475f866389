"""`easyckpt diff` and `stat`: what they say of checkpoints and files, and how they end."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import easyckpt
from easyckpt.comparison import Comparison, compare_components
from easyckpt.contents import ignore
from easyckpt.errors import ForeignFormat
from easyckpt.format import layout
from easyckpt.format.safetensors import make_header
from easyckpt.format.sizes import size_text
from easyckpt.tensorfiles import TensorFile
from tests.support.commands import run  # noqa: F401 - a fixture


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


@pytest.fixture
def root(tmp_path):
    """Steps 1 and 2 of a small training."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "box": {"seen": 0}}
    with easyckpt.Checkpointer(tmp_path / "exp", state, signals=()) as ckpt:
        for step in (1, 2):
            model(torch.arange(6)).square().sum().backward()
            optimizer.step()
            state["box"]["seen"] = step
            ckpt.save(step, wait=True)
    return tmp_path / "exp"


# -- diff of checkpoints


def test_a_checkpoint_is_equal_to_itself(root, run):
    ran = run("diff", f"{root}@1", root / layout.step_dir(1), "--json")
    assert ran.code == 0
    assert ran.document["equal"]
    assert ran.document["components"]["model"]["tensors"] == 6
    assert ran.document["components"]["model"]["equal"]


@pytest.mark.parametrize(("losses", "code"), [((1.0, 1.0), 0), ((1.0, 2.0), 1)])
def test_runs_that_have_logged_the_same_are_equal_whenever_that_was(tmp_path, run, losses, code):
    for name, loss in zip("ab", losses, strict=True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        with easyckpt.Checkpointer(tmp_path / name, {"model": nn.Linear(2, 2)}, signals=()) as ckpt:
            ckpt.load()
            ckpt.log(loss=loss)
            ckpt.save(1, wait=True)
    ran = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert ran.code == code, ran.document
    assert [name for name, part in ran.document["components"].items() if not part["equal"]] == (
        ["easyckpt.metrics"] if code else []
    )


def test_two_steps_differ_component_by_component(root, run):
    ran = run("diff", f"{root}@1", f"{root}@2", "--json", "--tensors")
    assert ran.code == 1
    components = ran.document["components"]
    assert not components["model"]["equal"]
    assert components["model"]["first"] == "model.embedding.weight"
    assert components["easyckpt.data"]["equal"]
    found = {row["path"]: row for row in ran.document["differences"]}
    assert found["optimizer.state.0.step"]["largest"] == 1.0
    assert found["box.seen"]["note"] == "1 against 2"


def test_people_get_a_table_and_the_first_difference(root, run):
    ran = run("diff", f"{root}@1", f"{root}@2")
    assert ran.code == 1
    assert "equal to the bit" in ran.out
    assert "the first: model.embedding.weight: [0, 0]: " in ran.out
    assert "exp_avg_sq" not in ran.out
    assert "optimizer.state.0.exp_avg_sq" in run("diff", f"{root}@1", f"{root}@2", "--tensors").out
    assert run("diff", root, root).out.rstrip().endswith("equal to the bit")


def test_damage_is_said_and_not_taken_for_a_difference(root, run):
    shard = root / layout.step_dir(2) / layout.shard_file(0)
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1
    shard.write_bytes(data)
    ran = run("diff", f"{root}@1", f"{root}@2", "--json")
    assert ran.code == 1
    assert ran.document["error"]["kind"] == "DamagedCheckpoint"


# -- diff of files


TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "é": torch.tensor(True)}


def changed():
    return {**TENSORS, "b": torch.tensor([1.0, 1.5, 1.0], dtype=torch.bfloat16)}


@pytest.fixture
def saved(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "a.safetensors")
    safetensors.torch.save_file(changed(), tmp_path / "b.safetensors")
    torch.save(TENSORS, tmp_path / "a.pth")
    torch.save(changed(), tmp_path / "b.pt")
    return tmp_path


@pytest.mark.parametrize("one", ["a.safetensors", "a.pth"])
@pytest.mark.parametrize("other", ["a.safetensors", "a.pth"])
def test_equal_files_are_equal_whatever_their_format(saved, run, one, other):
    assert run("diff", saved / one, saved / other).code == 0


@pytest.mark.parametrize("one", ["a.safetensors", "a.pth"])
@pytest.mark.parametrize("other", ["b.safetensors", "b.pt"])
def test_a_difference_between_files_is_named(saved, run, one, other):
    ran = run("diff", saved / one, saved / other, "--json", "--tensors")
    assert ran.code == 1
    assert [(row["path"], row["largest"], row["differing"]) for row in ran.document["differences"]] == [
        ("tensors.b", 0.5, 1)
    ]


def test_what_a_training_file_holds_is_compared_part_by_part(tmp_path, run):
    base = {"model": TENSORS, "optimizer": {"lr": 0.1, "state": {0: {"exp_avg": torch.zeros(3)}}}, "step": 3}
    torch.save(base, tmp_path / "a.pth")
    torch.save({**base, "optimizer": {**base["optimizer"], "lr": 0.2}, "step": 4}, tmp_path / "b.pth")
    ran = run("diff", tmp_path / "a.pth", tmp_path / "b.pth", "--json", "--tensors")
    assert ran.document["components"]["model"]["equal"]
    assert [row["path"] for row in ran.document["differences"]] == ["optimizer.lr", "step"]


def test_strided_and_permuted_tensors_of_a_file_are_compared_by_their_elements(tmp_path, run):
    values = torch.arange(24, dtype=torch.int16).reshape(4, 6)
    wide = torch.zeros(8, 12, dtype=torch.int16)
    wide[::2, ::2] = values
    torch.save({"t": values}, tmp_path / "a.pth")
    torch.save({"t": wide[::2, ::2]}, tmp_path / "b.pth")
    torch.save({"t": values.t().contiguous().t()}, tmp_path / "c.pth")
    assert run("diff", tmp_path / "a.pth", tmp_path / "b.pth").code == 0
    assert run("diff", tmp_path / "a.pth", tmp_path / "c.pth").code == 0
    assert run("diff", tmp_path / "b.pth", tmp_path / "c.pth").code == 0


class Evil:
    def __reduce__(self):
        return print, ("code out of the file",)


def test_nothing_in_a_file_is_run(tmp_path, run):
    torch.save({"t": Evil()}, tmp_path / "evil.pth")
    ran = run("diff", tmp_path / "evil.pth", tmp_path / "evil.pth")
    assert ran.code == 2
    assert "more than tensors" in ran.err
    assert "code out of the file" not in ran.out + ran.err


def test_bad_input_is_said(root, saved, run):
    (saved / "not.safetensors").write_bytes(b"x" * 100)
    (saved / "not.pth").write_bytes(b"x" * 100)
    for arguments in [
        (f"{root}@1", saved / "a.pth"),
        (root, saved / "nowhere"),
        (saved / "a.pth", saved / "nowhere.pth"),
        (saved / "a.pth", saved / "not.pth"),
        (saved / "not.safetensors", saved / "a.pth"),
    ]:
        ran = run("diff", *arguments)
        assert ran.code == 2, arguments
        assert ran.err.startswith("easyckpt: ")
        assert ran.out == ""


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 200), st.booleans())
def test_no_safetensors_file_breaks_the_reader(tmp_path_factory, noise, position, cut):
    header = make_header([("w", "float32", (2, 3)), ("b", "int64", (1,))], {"format": "pt"})
    data = header[:position] + noise + header[position + len(noise) :] + bytes(32)
    path = tmp_path_factory.mktemp("files") / "f.safetensors"
    path.write_bytes(data[: len(data) - 5] if cut else data)
    try:
        with TensorFile(str(path), ignore) as file:
            compare_components(file.components, file.components, 0, Comparison())
    except ForeignFormat:
        return
    safetensors.torch.load_file(path)  # what is taken here, the library takes too


@pytest.mark.parametrize(
    "places",
    [
        [(0, 8), (4, 12)],
        [(0, 8), (4, 16)],
        [(0, 8), (12, 20)],
        [(0, 8), (8, 12)],
        [(8, 16), (16, 24)],
        [(0, 8), (8, 24)],
    ],
)
def test_tensors_that_overlap_or_leave_holes_are_refused(tmp_path, run, places):
    table = {f"t{n}": {"dtype": "F32", "shape": [2], "data_offsets": place} for n, place in enumerate(places)}
    text = json.dumps(table).encode()
    path = tmp_path / "f.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(max(end for _, end in places)))
    ran = run("diff", path, path)
    assert ran.code == 2
    assert "does not lie where it should" in ran.err


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, run, ending):
    pipe = tmp_path / f"pipe{ending}"
    os.mkfifo(pipe)
    ran = run("diff", pipe, pipe)
    assert ran.code == 2
    assert "is not a regular file" in ran.err


def test_elements_across_the_reader_s_blocks_are_compared(tmp_path, run):
    """A header of any length puts elements across every boundary."""
    count = (9 << 20) // 8
    for name, last in (("a", 0), ("b", 1)):
        values = torch.arange(count)
        values[-1] += last
        text = json.dumps({"t": {"dtype": "I64", "shape": [count], "data_offsets": [0, count * 8]}}).encode()
        data = len(text).to_bytes(8, "little") + text + values.numpy().tobytes()
        (tmp_path / f"{name}.safetensors").write_bytes(data)
        assert (8 + len(text)) % 8 != 0
    ran = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json", "--tensors")
    assert [(row["differing"], row["largest"]) for row in ran.document["differences"]] == [(1, 1)]


# -- stat


def test_stat_counts_tied_weights_once_and_no_step_counters(root, run):
    ran = run("stat", root, "--json")
    assert ran.code == 0
    document = ran.document
    parameters = 10 * 4 + 4 + 4
    assert document["step"] == 2
    assert document["weights"]["elements"] == parameters + 4 + 4 + 1  # buffers of the norm
    assert document["optimizer"]["elements"] == 2 * parameters
    assert document["ratio"] == 2 * parameters / (parameters + 9)
    assert document["components"]["model"] == {
        "kind": "module", "tensors": 6, "elements": parameters + 9, "bytes": 4 * (parameters + 8) + 8,
    }  # fmt: skip
    assert document["dtypes"]["float32"]["elements"] == parameters + 8 + 2 * parameters + 3
    sizes = [tensor["bytes"] for tensor in document["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 10


def test_stat_tells_people_the_ratio(root, run):
    out = run("stat", f"{root}@1").out
    assert "optimizer state / weights: 1.684" in out
    assert "model (module)" in out


def test_stat_says_what_is_wrong(root, run):
    assert run("stat", f"{root}@7").code == 2
    (root / layout.step_dir(2) / layout.index_file(0)).unlink()
    assert run("stat", root / layout.step_dir(2)).code == 1


# -- sizes


def test_every_command_tells_the_same_size_of_a_checkpoint(root, run, tmp_path):
    """That of all ranks' files, which is also what the job itself has said of its commit."""
    directory = root / layout.step_dir(2)
    size = sum((directory / name).stat().st_size for name in (layout.shard_file(0), layout.index_file(0)))
    shown, stats, watched = (run(command, root, "--json").document for command in ("show", "stat", "watch"))
    told = {
        "ls": run("ls", root, "--json").document["checkpoints"][-1]["bytes"],
        "show": shown["bytes"],
        "stat": stats["bytes"],
        "verify": run("verify", f"{root}@2", "--json").document["checkpoints"][0]["bytes"],
        "watch": watched["checkpoints"]["newest"]["bytes"],
        "the last commit": watched["last_commit"]["bytes"],
        "prune": run("prune", root, "--keep", 1, "--dry-run", "--json").document["checkpoints"][-1]["bytes"],
        "cp": run("cp", f"{root}@2", tmp_path / "copy", "--json").document["bytes"],
    }
    assert told == dict.fromkeys(told, size)
    for command in ("ls", "show", "stat", "watch"):
        assert size_text(size) in run(command, root).out, command


def test_every_command_tells_the_same_size_of_its_tensors(root, run, tmp_path):
    shown, stats = (run(command, root, "--json").document["components"] for command in ("show", "stat"))
    assert {name: part["bytes"] for name, part in shown.items()} == {
        name: part["bytes"] for name, part in stats.items()
    }
    exported = run("export", root, tmp_path / "m.pth", "--dtype", "fp32", "--json").document
    assert exported["checkpoint_bytes"] == stats["model"]["bytes"]
    for command in ("show", "stat"):
        assert "tensor size" in run(command, root).out
