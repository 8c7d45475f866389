"""What the stock Trainer leaves is believed only if it is whole: each file, damaged in each way, is named."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from easyckpt.errors import DamagedCheckpoint, ForeignFormat
from easyckpt.integrations.transformers import stock

ARCHIVES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "training_args.bin")
NEEDED = ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def generators():
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}


def save(directory, step=10):
    """A checkpoint with the files of the Trainer, in the order in which it writes them."""
    directory.mkdir(parents=True)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (directory / name).write_text('{"model_type": "linear"}')
    torch.save({"learning_rate": 0.1, "of": range(3)}, directory / "training_args.bin")  # nothing that may be loaded
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    torch.save(scheduler.state_dict(), directory / "scheduler.pt")
    torch.save({"scale": 65536.0, "_growth_tracker": 3}, directory / "scaler.pt")
    torch.save(generators(), directory / "rng_state.pth")
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    return directory


@pytest.fixture
def whole(tmp_path):
    directory = save(tmp_path / "checkpoint-10")
    assert stock.problem(str(directory)) is None
    return directory


def shards(directory, index, *files):
    """The weights in several files, and an index that names them."""
    (directory / "model.safetensors").unlink()
    for number, name in enumerate(files):
        tensors = {f"layer{number}": torch.randn(3)}
        (torch.save if name.endswith(".bin") else save_file)(tensors, directory / name)
    places = {f"layer{number}": name for number, name in enumerate(files)}
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def as_shards(directory):
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shards(directory, "model.safetensors.index.json", *names)
    return [*names, "model.safetensors.index.json"]


def as_pickles(directory):
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    shards(directory, "pytorch_model.bin.index.json", *names)
    return [*names, "pytorch_model.bin.index.json"]


def as_one_pickle(directory):
    (directory / "model.safetensors").unlink()
    torch.save({"weight": torch.randn(3)}, directory / "pytorch_model.bin")
    return ["pytorch_model.bin"]


def as_adapter(directory):
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text("{}")
    return ["adapter_model.safetensors", "adapter_config.json"]


def as_adapters(directory):
    for name in ("one", "two"):
        (directory / name).mkdir()
        save_file({"weight": torch.randn(3)}, directory / name / "adapter_model.safetensors")
    (directory / "model.safetensors").unlink()
    return ["one/adapter_model.safetensors", "two/adapter_model.safetensors"]


def as_a_link(directory):
    (directory / "model.safetensors").rename(directory.parent / "elsewhere.safetensors")
    (directory / "model.safetensors").symlink_to("../elsewhere.safetensors")
    return ["model.safetensors"]


LAYOUTS = [as_shards, as_pickles, as_one_pickle, as_adapter, as_adapters, as_a_link]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_of_weights_is_known_and_each_file_of_it_looked_at(whole, layout):
    names = layout(whole)
    assert stock.problem(str(whole)) is None
    for name in names:
        path = whole / name
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2])
        assert name in stock.problem(str(whole))
        path.write_bytes(good)
    assert stock.problem(str(whole)) is None


@pytest.mark.parametrize("layout", [as_shards, as_pickles])
def test_a_file_that_an_index_names_has_to_be_there(whole, layout):
    first, _, index = layout(whole)
    (whole / first).unlink()
    assert stock.problem(str(whole)) == f"{first} is missing: {index} says that it holds weights"


@pytest.mark.parametrize("table", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_names_no_files_is_none(whole, table):
    index = as_shards(whole)[-1]
    (whole / index).write_text(table)
    assert index in stock.problem(str(whole))


def test_an_index_leads_nowhere_else(whole):
    index = as_shards(whole)[-1]
    save_file({"a": torch.ones(1)}, whole.parent / "other.safetensors")
    (whole / index).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "../other.safetensors is missing" in stock.problem(str(whole))


# -- damage


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_resume_needs_has_to_be_there(whole, name):
    (whole / name).unlink()
    found = stock.problem(str(whole))
    assert name in found
    silent = name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    assert ("silently go on with" in found) == silent


def test_weights_alone_are_not_trained_on(whole):
    """As save_only_model leaves them."""
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (whole / name).unlink()
    assert "save_only_model" in stock.problem(str(whole))


@pytest.mark.parametrize("keep", [0, 1, 7, 0.5, -1])
@pytest.mark.parametrize(
    "name", [*ARCHIVES, "model.safetensors", "config.json", "generation_config.json", "trainer_state.json"]
)
def test_a_file_that_is_empty_or_cut_is_found(whole, name, keep):
    path = whole / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert stock.problem(str(whole)).startswith(name)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json"])
def test_a_file_that_is_too_long_is_found(whole, name):
    with (whole / name).open("ab") as file:
        file.write(b"\0" * 100)
    assert stock.problem(str(whole)).startswith(name)


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_rotten_record_of_an_archive_is_found(whole, name):
    path = whole / name
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if record.file_size]
    for record in records:
        lengths = struct.unpack("<HH", content[record.header_offset + 26 :][:4])  # of what is before the bytes
        at = record.header_offset + 30 + sum(lengths) + record.file_size // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        assert stock.problem(str(whole)) == f"{name}: the checksum of {record.filename} is wrong"
    path.write_bytes(content)
    assert stock.problem(str(whole)) is None


def test_no_flipped_bit_of_an_archive_changes_what_is_loaded(whole):
    """Between and around the records, too: found, or of no consequence."""
    path = whole / "scheduler.pt"
    content, expected = path.read_bytes(), stock.load_pickle(str(path))
    found = 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        if stock.problem(str(whole)) is not None:
            found += 1
        else:
            assert stock.load_pickle(str(path)) == expected, at
    assert found > len(content) // 3  # much of it is padding


def test_no_flipped_bit_of_a_header_hides_where_tensors_are(whole):
    path = whole / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for at in range(header):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        if stock.problem(str(whole)) is None:  # a name may have become another one, which the load will say
            assert sorted(tensor.numel() for tensor in load_file(path).values()) == [3, 12]


@pytest.mark.parametrize(
    "state", ["[]", "{}", '{"global_step": "10"}', '{"global_step": true}', '{"global_step": -1}', "["]
)
def test_a_state_without_a_step_is_none(whole, state):
    (whole / "trainer_state.json").write_text(state)
    assert stock.problem(str(whole)).startswith("trainer_state.json")


def test_json_without_end_is_said_and_not_raised(whole):
    (whole / "trainer_state.json").write_text("[" * 1_000_000)
    assert stock.problem(str(whole)).startswith("trainer_state.json is no JSON")


def test_the_step_has_to_be_that_of_the_name(tmp_path, whole):
    moved = whole.rename(tmp_path / "checkpoint-12")
    assert stock.problem(f"{moved}/") == "trainer_state.json is of step 10, the directory's name says 12"
    assert stock.problem(str(moved.rename(tmp_path / "the-best-one"))) is None


def test_the_trainers_own_mark_of_an_unfinished_checkpoint_counts(whole):
    (whole / "checkpoint-is-incomplete.txt").touch()
    assert "checkpoint-is-incomplete.txt" in stock.problem(str(whole))


def test_each_rank_has_generators(whole):
    assert "rng_state_0.pth is missing" in stock.problem(str(whole), world_size=2)
    assert "there are rng_state.pth, for another number of processes" in stock.problem(str(whole), world_size=2)
    for rank in range(2):
        torch.save(generators(), whole / f"rng_state_{rank}.pth")
    assert stock.problem(str(whole), world_size=2) is None
    (whole / "rng_state.pth").unlink()
    assert "rng_state_0.pth, rng_state_1.pth" in stock.problem(str(whole))
    (whole / "rng_state_1.pth").write_bytes(b"")
    assert stock.problem(str(whole), world_size=2) == "rng_state_1.pth is empty"


def test_what_is_no_directory_or_no_file_is_said(tmp_path, whole):
    assert "No such file" in stock.problem(str(tmp_path / "checkpoint-9"))
    assert "Not a directory" in stock.problem(str(whole / "config.json"))
    (whole / "optimizer.pt").unlink()
    os.mkfifo(whole / "optimizer.pt")
    assert "optimizer.pt is not a regular file" in stock.problem(str(whole))
    (whole / "optimizer.pt").unlink()
    (whole / "optimizer.pt").mkdir()
    assert "Is a directory" in stock.problem(str(whole))


def test_an_empty_directory_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    assert "trainer_state.json is missing" in stock.problem(str(tmp_path / "checkpoint-3"))


def test_files_that_others_have_added_are_left_alone(whole):
    (whole / "vocabulary.bin").write_bytes(b"not of torch")
    (whole / "notes.json").write_text("not JSON")
    (whole / "samples").mkdir()
    assert stock.problem(str(whole)) is None


def test_archives_of_others_are_refused(whole):
    with zipfile.ZipFile(whole / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 1000)
    assert stock.problem(str(whole)) == "optimizer.pt is an archive, but not one of torch.save"


def test_a_pickle_without_an_archive_is_refused_by_name(whole):
    torch.save({"a": 1}, whole / "optimizer.pt", _use_new_zipfile_serialization=False)
    assert stock.problem(str(whole)).startswith("optimizer.pt is no archive of torch 1.6 or newer")


# -- loading


def test_generators_go_on_where_they_were(whole):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.save(generators(), whole / "rng_state.pth")
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(2)
    state = stock.load_pickle(str(whole / "rng_state.pth"))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


@pytest.mark.parametrize("core", ["core", "_core"])
def test_generators_that_another_numpy_has_written_are_read(whole, core):
    path = whole / "rng_state.pth"
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            renamed = content.replace(b"numpy._core.multi", b"numpy.core.multi")
            archive.writestr(name, renamed.replace(b"numpy.core.multi", f"numpy.{core}.multi".encode()))
    assert stock.problem(str(whole)) is None
    assert np.array_equal(stock.load_pickle(str(path))["numpy"][1], np.random.get_state()[1])


class Touch:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "pytorch_model.bin"])
def test_nothing_in_a_file_is_run(whole, tmp_path, name):
    torch.save({"state": Touch(tmp_path / "it-ran")}, whole / name)
    assert "holds more than tensors and plain values" in stock.problem(str(whole))
    with pytest.raises(ForeignFormat, match=r"Unsupported global: GLOBAL io\.open"):
        stock.load_pickle(str(whole / name))
    assert not (tmp_path / "it-ran").exists()
    torch.load(whole / name, weights_only=False)  # it would have
    assert (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.array(["a"], dtype=object), np.zeros(2, np.float32), np.random.default_rng(0)]
)
def test_of_numpy_only_its_generators_array_is_read(whole, value):
    torch.save({"numpy": value}, whole / "rng_state.pth")
    with pytest.raises(ForeignFormat):
        stock.load_pickle(str(whole / "rng_state.pth"))


def test_the_allow_list_holds_for_the_call_alone(whole):
    stock.load_pickle(str(whole / "rng_state.pth"))
    assert np.ndarray not in torch.serialization.get_safe_globals()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(whole / "rng_state.pth", weights_only=True)
    with torch.serialization.safe_globals([np.ndarray]):  # the user's own
        stock.load_pickle(str(whole / "rng_state.pth"))
        assert np.ndarray in torch.serialization.get_safe_globals()


def test_what_torch_cannot_read_is_damage(whole):
    (whole / "optimizer.pt").write_bytes(b"PK\3\4")
    with pytest.raises(DamagedCheckpoint):
        stock.load_pickle(str(whole / "optimizer.pt"))
    with pytest.raises(FileNotFoundError):
        stock.load_pickle(str(whole / "nothing.pt"))


def test_it_is_imported_without_transformers():
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['accelerate'] = None\n"
        "import easyckpt.integrations.transformers.stock"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
