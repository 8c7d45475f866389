"""`easyckpt export`: the file holds exactly the module's weights, cast, whole, and the checkpoint stays as it was."""

from __future__ import annotations

import io
import math
import os
import signal
import struct
import zipfile
from collections import Counter
from dataclasses import dataclass
from itertools import permutations

import pytest
import safetensors.torch
import torch
from torch import nn

import easyckpt
from easyckpt import exporting, pieces
from easyckpt.format import layout
from easyckpt.format.dtypes import dtype_name
from easyckpt.format.leaf import LeafSpec
from easyckpt.storage.localfile import LocalFileReader, LocalFileWriter
from tests.support.commands import everything_in, run  # noqa: F401 - a fixture

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Model(nn.Module):
    """Tied weights, buffers, a channels-last and an empty parameter, several dtypes, and a tensor of many pieces."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1500, 1001)
        self.norm = nn.BatchNorm1d(4)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.head = nn.Linear(1001, 1500, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("wide", torch.randn(3, dtype=torch.float64))


def load(path):
    if path.suffix == ".pth":
        return torch.load(path, weights_only=True)
    return safetensors.torch.load_file(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("export") / "exp"
    model = Model()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "ema": {"w": torch.randn(4)}}
    with easyckpt.Checkpointer(root, state, signals=()) as ckpt:
        ckpt.save(1, wait=True)
    return root, model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_the_file_loads_strictly_and_holds_the_weights_cast(trained, tmp_path, run, suffix, dtype):
    root, model = trained
    out = tmp_path / f"model{suffix}"
    before = everything_in(root)
    ran = run("export", f"{root}@1", out, "--dtype", dtype, "--json")
    assert ran.code == 0
    assert ran.document["file_bytes"] == out.stat().st_size
    assert ran.document["tied"] == {"head.weight": "embedding.weight"}
    loaded = load(out)
    assert set(loaded) == set(model.state_dict())
    for name, live in model.state_dict().items():
        wanted = live.to(DTYPES[dtype]) if live.is_floating_point() else live
        assert loaded[name].dtype == wanted.dtype
        assert torch.equal(loaded[name], wanted), name
    Model().load_state_dict(loaded, strict=True)
    assert everything_in(root) == before
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_pth_is_as_torch_would_write_it(trained, tmp_path, run):
    """Ties, memory formats and checksums; mapping it works too."""
    root, model = trained
    out = tmp_path / "model.pth"
    assert run("export", root, out, "--dtype", "fp32").code == 0
    loaded = load(out)
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    assert loaded["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert loaded["turned"].stride() == model.turned.stride()
    assert zipfile.ZipFile(out).testzip() is None
    data = out.read_bytes()
    for info in zipfile.ZipFile(out).infolist():  # readers that go from front to back look at the descriptors instead
        begin = info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26))
        descriptor = data[begin + info.file_size : begin + info.file_size + 8]
        assert not info.file_size or descriptor == b"PK\x07\x08" + struct.pack("<L", info.CRC)
    mapped = torch.load(out, weights_only=True, mmap=True)
    assert all(torch.equal(mapped[name], tensor) for name, tensor in model.state_dict().items() if tensor.dim() != 1)
    torch.save(dict(model.state_dict()), tmp_path / "theirs.pth")
    assert abs((tmp_path / "theirs.pth").stat().st_size - out.stat().st_size) < 1 << 12


def test_both_sizes_are_printed(trained, tmp_path, run):
    root, model = trained
    ran = run("export", root, tmp_path / "m.safetensors", "--dtype", "fp16", "--json")
    once = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values() if tensor.numel()}
    assert ran.document["checkpoint_bytes"] == sum(once.values())
    table = run("export", root, tmp_path / "n.safetensors", "--dtype", "fp16").out
    assert "tensors of model in step 1" in table
    assert str(ran.document["checkpoint_bytes"]) in table
    assert str(ran.document["file_bytes"]) in table


def test_values_beyond_half_precision_are_counted_and_said(tmp_path, run):
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[65504.0, -1e6, float("inf")]]))
    with easyckpt.Checkpointer(tmp_path / "exp", {"model": model}, signals=()) as ckpt:
        ckpt.save(1, wait=True)
    ran = run("export", tmp_path / "exp", tmp_path / "m.pth", "--dtype", "fp16", "--json")
    assert ran.document["overflows"] == {"weight": 1}
    assert "1 values are too large for fp16" in ran.err
    assert load(tmp_path / "m.pth")["weight"].tolist() == [[65504.0, -float("inf"), float("inf")]]
    assert run("export", tmp_path / "exp", tmp_path / "n.pth", "--dtype", "bf16", "--json").document["overflows"] == {}


def test_a_component_can_be_chosen(trained, tmp_path, run):
    root, _ = trained
    assert run("export", root, tmp_path / "ema.pth", "--dtype", "fp32", "--component", "ema").code == 0
    assert load(tmp_path / "ema.pth")["w"].shape == (4,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["out.bin", "--dtype", "fp16"], "must be a .safetensors"),
        (["there.pth", "--dtype", "fp16"], "exists already"),
        (["exp/m.pth", "--dtype", "fp16"], "lies in the checkpoint root"),
        (["exp/step-00000001/m.pth", "--dtype", "fp16", "--force"], "lies in the checkpoint root"),
        (["m.pth", "--dtype", "fp16", "--component", "nobody"], "no component 'nobody'"),
        (["m.pth", "--dtype", "fp16", "--component", "optimizer"], "holds no tensors"),
        (["m\\n.pth", "--dtype", "fp16"], "no name for a file"),
        (["nowhere/m.pth", "--dtype", "fp16"], "nowhere does not exist: make it first"),
        (["there.pth/m.pth", "--dtype", "fp16"], "there.pth is not a directory"),
        (["m.pth", "--dtype", "float16"], "'bf16'"),
        (["m.pth"], "bf16"),
        (["m.pth", "--dtype", "fp16", "--component", "Optimiser"], "it holds optimizer, "),
    ],
)
def test_bad_input_writes_nothing(trained, tmp_path, run, monkeypatch, arguments, words):
    root, _ = trained
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp").symlink_to(root)
    (tmp_path / "there.pth").write_bytes(b"mine")
    before, outside = everything_in(root), sorted(path.name for path in tmp_path.iterdir())
    ran = run("export", "exp@1", *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert everything_in(root) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == outside
    assert (tmp_path / "there.pth").read_bytes() == b"mine"


def test_force_replaces_the_file(trained, tmp_path, run):
    root, _ = trained
    (tmp_path / "m.pth").write_bytes(b"old")
    assert run("export", root, tmp_path / "m.pth", "--dtype", "bf16", "--force").code == 0
    assert "embedding.weight" in load(tmp_path / "m.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_damage_leaves_the_old_file_and_no_half_of_a_new_one(tmp_path, run, suffix):
    with easyckpt.Checkpointer(tmp_path / "exp", {"model": nn.Linear(3000, 1000)}, signals=()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, wait=True)
    shard = tmp_path / "exp" / layout.step_dir(3) / layout.shard_file(0)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # in the second chunk: a part was written by then
    shard.write_bytes(data)
    out = tmp_path / f"m{suffix}"
    out.write_bytes(b"old")
    ran = run("export", tmp_path / "exp", out, "--dtype", "fp32", "--force")
    assert ran.code == 1
    assert "chunk 1" in ran.err
    assert f"older ones: steps 2, 1; `easyckpt verify {tmp_path / 'exp'}` tells which are whole" in ran.err
    assert out.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exp", out.name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_write_leaves_nothing(trained, tmp_path, run, monkeypatch, number):
    write_at = LocalFileWriter.write_at

    def signalled(self, *arguments):
        write_at(self, *arguments)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(LocalFileWriter, "write_at", signalled)
    assert run("export", trained[0], tmp_path / "m.safetensors", "--dtype", "fp16").code == 130
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_durable_before_it_has_its_name(trained, tmp_path, run, monkeypatch):
    calls = []
    sync, rename = LocalFileWriter.sync, exporting.LocalStorage.rename
    monkeypatch.setattr(LocalFileWriter, "sync", lambda self: (calls.append("sync"), sync(self))[1])
    monkeypatch.setattr(
        exporting.LocalStorage, "rename", lambda self, *names: (calls.append("rename"), rename(self, *names))[1]
    )
    assert run("export", trained[0], tmp_path / "m.pth", "--dtype", "fp16").code == 0
    assert calls == ["sync", "rename"]


class Turned(nn.Module):
    """One large parameter whose memory runs along its last dimension but one."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(math.prod(shape))).reshape(shape).transpose(-1, -2))


def test_a_large_transposed_tensor_is_read_once_and_leaves_no_file(tmp_path, run, monkeypatch):
    monkeypatch.setattr(pieces, "_SLAB", 1 << 20)
    model = Turned(2500, 4001)
    with easyckpt.Checkpointer(tmp_path / "exp", {"model": model}, signals=()) as ckpt:
        ckpt.save(1, wait=True)
    read, real = Counter(), LocalFileReader.read_into

    def counted(self, buffer, offset):
        count = real(self, buffer, offset)
        read[os.path.basename(self._path)] += count
        return count

    monkeypatch.setattr(LocalFileReader, "read_into", counted)
    out = tmp_path / "m.safetensors"
    assert run("export", tmp_path / "exp", out, "--dtype", "fp32").code == 0
    nbytes = model.weight.nbytes
    assert nbytes < read.pop(layout.shard_file(0)) < 1.1 * nbytes
    assert sum(read.values()) == nbytes, "and once where its parts were put"
    assert torch.equal(load(out)["weight"], model.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exp", out.name]


@dataclass
class InMemory:
    """A tensor that counts what is read of it."""

    tensor: torch.Tensor
    order: tuple[int, ...]
    count: int = 0

    def __post_init__(self):
        self.spec = LeafSpec(("t",), dtype_name(self.tensor.dtype), tuple(self.tensor.shape), self.order, "cpu", False)
        self.nbytes = self.tensor.nbytes
        self.stored = self.tensor.permute(self.order).contiguous().view(-1).view(torch.uint8)

    def read(self, begin, end):
        end = min(end, begin + 48, self.nbytes)
        self.count += end - begin
        return self.stored[begin:end]


class Kept(io.BytesIO):
    """Scratch that is memory."""

    def write_at(self, buffer, offset):
        self.seek(offset)
        self.write(buffer)

    def read_into(self, buffer, offset):
        self.seek(offset)
        return self.readinto(buffer)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int32, torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(7, 5), (3, 1, 5), (2, 3, 2, 4), (0, 3), (1, 40), (3, 0, 2)])
def test_any_order_of_memory_is_put_into_that_of_the_indices_in_one_reading(monkeypatch, shape, dtype):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    for slab in (32, 96, 4096):
        monkeypatch.setattr(pieces, "_SLAB", slab)
        for order in permutations(range(len(shape))):
            stretch = InMemory(tensor, order)
            out = b"".join(bytes(pieces.memory_of(piece)) for piece in pieces.logical_pieces(stretch, Kept()))
            assert out == bytes(pieces.memory_of(tensor.view(-1).view(torch.uint8))), (slab, order)
            assert stretch.count == tensor.nbytes


def test_several_modules_must_be_told_apart(tmp_path, run):
    state = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    with easyckpt.Checkpointer(tmp_path / "exp", state, signals=()) as ckpt:
        ckpt.save(1, wait=True)
    ran = run("export", tmp_path / "exp", tmp_path / "m.pth", "--dtype", "fp16")
    assert ran.code == 2
    assert "one, two" in ran.err
    assert run("export", tmp_path / "exp", tmp_path / "m.pth", "--dtype", "fp16", "--component", "two").code == 0


class Extra(nn.Linear):
    """A module that is saved by way of its state_dict."""

    def get_extra_state(self):
        return {"note": 1}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_left_out_and_named(tmp_path, run):
    with easyckpt.Checkpointer(tmp_path / "exp", {"model": Extra(2, 2)}, signals=()) as ckpt:
        ckpt.save(1, wait=True)
    ran = run("export", tmp_path / "exp", tmp_path / "m.pth", "--dtype", "fp32", "--json")
    assert ran.code == 0
    assert any("_extra_state" in path for path in ran.document["left_out"])
    assert set(load(tmp_path / "m.pth")) == {"weight", "bias"}
