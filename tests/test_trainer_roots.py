"""The command line, and restoring, in the output directory of a Trainer: its files, and our manifest beside them."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import easyckpt
from easyckpt.errors import UsageError
from easyckpt.format import layout
from easyckpt.format.checksum import CHUNK_BYTES
from easyckpt.format.manifest import Manifest
from easyckpt.format.parts import pack, unpack
from tests.support import trainer_root
from tests.support.commands import everything_in, run  # noqa: F401 - a fixture
from tests.support.trainer_root import BEFORE, FILES, ODD, WEIGHTS


@pytest.fixture
def root(tmp_path):
    """Steps 2, 4 and 6, and a checkpoint of the Trainer's own of step 5."""
    path = tmp_path / "out"
    trainer_root.make(path, trainer_root.state_of())
    trainer_root.make_foreign(path, 5)
    return path


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# -- what is there


def test_ls_lists_ours_and_judges_no_other(root, run):
    before = everything_in(root)
    ran = run("ls", root, "--json")
    assert ran.code == 0, ran.err
    rows = {row["step"]: row for row in ran.document["checkpoints"]}
    assert list(rows) == [2, 4, 5, 6]
    assert {step: (row["kind"], row["valid"]) for step, row in rows.items()} == {
        2: ("committed", True), 4: ("committed", True), 5: ("foreign", None), 6: ("committed", True)
    }  # fmt: skip
    assert len(ran.document["timelines"]) == 1
    said = run("ls", root).out
    assert "checkpoint-5: no manifest.json: written without easyckpt" in said
    assert "not valid" not in said
    one = run("ls", root / "checkpoint-5", "--json").document["checkpoints"]
    assert [row["kind"] for row in one] == ["foreign"]
    assert everything_in(root) == before


@pytest.mark.parametrize("command", ["show", "stat", "verify"])
def test_one_checkpoint_is_named_by_its_step_or_its_directory(root, run, command):
    by_step, by_name = (run(command, f"{root}{end}", "--json") for end in ("@4", "/checkpoint-4"))
    assert by_step.code == by_name.code == 0, by_step.err + by_name.err
    assert by_step.document == by_name.document
    assert json.dumps(by_step.document).count("checkpoint-4")


@pytest.mark.parametrize("command", ["show", "stat", "verify", "pin"])
@pytest.mark.parametrize("end", ["@5", "/checkpoint-5"])
def test_what_the_trainer_wrote_by_itself_is_not_looked_into(root, run, command, end):
    ran = run(command, f"{root}{end}")
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert "damage" not in ran.err


def test_show_tells_components_files_and_where_tensors_are(root, run):
    shown = run("show", root, "--tensors", "--json").document
    assert (shown["step"], shown["metrics"]) == (6, {"loss": 1 / 6})
    assert set(shown["files"]) == set(FILES)
    assert shown["components"]["model"] == {"tensors": 4, "bytes": 232, "dtypes": ["float32"]}
    assert shown["components"]["odd"]["tensors"] == 2
    assert [t["path"] for t in shown["tensors"] if t["path"].startswith("odd")] == ["odd.tensor", "odd.flag"]


def test_the_files_are_those_of_the_framework(root):
    """Else nothing here tells anything."""
    assert not any(layout.parse_shard_file(path.name) is not None for path in root.rglob("*"))
    weights = load_file(root / "checkpoint-6" / WEIGHTS)
    assert set(weights) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert len(torch.load(root / "checkpoint-6" / trainer_root.OPTIMIZER, weights_only=True)) == 12


# -- verify


def test_verify_reads_all_of_ours(root, run):
    ran = run("verify", root, "--json")
    assert ran.code == 0, ran.out
    assert [(row["step"], row["good"]) for row in ran.document["checkpoints"]] == [(2, True), (4, True), (6, True)]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_in_any_file_is_told(root, run, name):
    flip(root / "checkpoint-4" / name, -1)
    ran = run("verify", root, "--json")
    assert ran.code == 1
    assert [row["step"] for row in ran.document["checkpoints"] if not row["good"]] == [4]
    (problem,) = next(row for row in ran.document["checkpoints"] if row["step"] == 4)["problems"]
    assert problem["file"] == name.rpartition("/")[2]


def rewritten(directory: Path, change) -> None:
    """Seal the manifest anew after `change` has been made to its first part."""
    manifest = Manifest.from_bytes((directory / layout.MANIFEST).read_bytes())
    part = json.loads(unpack(manifest.parts[0]))
    change(part)
    manifest = dataclasses.replace(manifest, parts=(pack(json.dumps(part).encode()), *manifest.parts[1:]))
    (directory / layout.MANIFEST).write_bytes(manifest.to_bytes())


DAMAGES = {
    "a place outside of its file": lambda part: part["places"].__setitem__(0, [1, 10**9]),
    "no place": lambda part: part["places"].__setitem__(0, None),
    "too few places": lambda part: part["places"].pop(),
    "a file that is not there": lambda part: part["files"].__setitem__(0, "other.bin"),
    "another rank's layout": lambda part: part["layout"].__setitem__("rank", 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_told(root, run, damage):
    rewritten(root / "checkpoint-4", DAMAGES[damage])
    ran = run("verify", f"{root}@4", "--json")
    assert ran.code == 1
    (problem,) = ran.document["checkpoints"][0]["problems"]
    assert problem["file"] == layout.MANIFEST
    assert run("stat", f"{root}@4").code == 1
    assert run("show", f"{root}@4").code == 1


# -- tensors


@pytest.fixture
def both(tmp_path):
    """The same training twice, in a Trainer's root and in one of ours. A tensor of it is larger than a chunk."""
    odd = CHUNK_BYTES // 8 + 1000
    made = trainer_root.make(tmp_path / "out", trainer_root.state_of(odd=odd), until=4)
    trainer_root.make_native(tmp_path / "own", trainer_root.state_of(odd=odd), until=4)
    return tmp_path / "out", tmp_path / "own", made


def test_diff_compares_what_a_program_gets_back_whatever_the_files_are(both, run):
    out, own, _ = both
    ran = run("diff", f"{out}@4", f"{own}@4", "--json")
    assert ran.code == 0, ran.out
    assert ran.document["components"]["odd"]["tensors"] == 2
    other = run("diff", f"{out}@2", f"{own}@4", "--json", "--tensors")
    assert other.code == 1
    of_odd = [d for d in other.document["differences"] if d["component"] == "odd"]
    assert [(d["path"], d["largest"], d["differing"]) for d in of_odd] == [
        ("odd.tensor", pytest.approx(2.0), CHUNK_BYTES // 8 + 1000)
    ]  # fmt: skip


def test_an_element_over_the_end_of_a_chunk_is_read(both, run):
    """Of eight bytes, of which the chunk ends in the middle, since three stand before the first."""
    out, _, made = both
    read = {"odd": {"tensor": torch.zeros(CHUNK_BYTES // 8 + 1000, dtype=torch.float64), "flag": torch.zeros(3)}}
    data = (out / "checkpoint-4" / ODD).read_bytes()
    assert data.startswith(BEFORE)
    assert len(data) > CHUNK_BYTES
    file = run("export", f"{out}@4", out.parent / "odd.pth", "--dtype", "fp32", "--component", "odd")
    assert file.code == 0, file.err
    exported = torch.load(out.parent / "odd.pth", weights_only=True)
    assert exported["tensor"].equal(made["odd"]["tensor"].float())
    easyckpt.restore(out, {"odd": read["odd"]})
    assert read["odd"]["tensor"].equal(made["odd"]["tensor"])


def test_stat_counts_what_it_counts_in_a_root_of_ours(both, run):
    out, own, _ = both
    here, there = (run("stat", f"{root}@4", "--json").document for root in (out, own))
    for name in ("weights", "optimizer", "ratio", "components", "dtypes", "largest"):
        assert here[name] == there[name], name


@pytest.mark.parametrize("offset", [0, -1], ids=["before all tensors", "in the last one"])
def test_nothing_is_taken_out_of_a_file_that_is_not_as_committed(root, run, tmp_path, offset):
    flip(root / "checkpoint-4" / ODD, offset)
    for command in (("diff", f"{root}@4", f"{root}@6"), ("diff", f"{root}@6", f"{root}@4")):
        ran = run(*command)
        assert ran.code == 1
        assert f"checkpoint-4/{ODD}: its bytes are not those that were committed" in ran.err
        assert ran.out == ""
    out = tmp_path / "odd.pth"
    assert run("export", f"{root}@4", out, "--dtype", "fp32", "--component", "odd").code == 1
    assert not out.exists()
    assert run("export", f"{root}@4", tmp_path / "model.pth", "--dtype", "fp32").code == 0  # another file


def test_weights_are_exported(root, run, tmp_path):
    out = tmp_path / "model.safetensors"
    assert run("export", f"{root}/checkpoint-6", out, "--dtype", "fp32").code == 0
    theirs = load_file(root / "checkpoint-6" / WEIGHTS)
    ours = load_file(out)
    assert set(ours) == set(theirs)
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_a_checkpoint_of_a_model_alone_is_listed_and_verified_and_not_looked_into(tmp_path, run):
    root = tmp_path / "out"
    trainer_root.make(root, trainer_root.state_of(), until=2, whole=False)
    assert run("verify", root).code == 0
    shown = run("show", root, "--json")
    assert (shown.code, shown.document["components"]) == (0, {})
    for command in (("stat", root), ("diff", root, root), ("export", root, tmp_path / "m.pth", "--dtype", "fp32")):
        ran = run(*command)
        assert ran.code == 2
        assert "save_only_model" in ran.err


# -- restoring


def test_restore_reads_it_beside_the_job(root):
    fresh, made = trainer_root.state_of(seed=1), trainer_root.state_of()
    trainer_root.make_native(root.parent / "own", made, until=4)
    restored = easyckpt.restore(root, {"model": fresh["model"]}, step=4)
    assert (restored.step, restored.path) == (4, str(root / "checkpoint-4"))
    for name, tensor in fresh["model"].state_dict().items():
        assert tensor.equal(made["model"].state_dict()[name]), name
    with pytest.raises(UsageError, match="step=4"):
        easyckpt.restore(root / "checkpoint-4", {"model": fresh["model"]})


def test_a_directory_that_was_copied_by_hand_is_taken_for_what_it_is(root, tmp_path, run):
    shutil.copytree(root / "checkpoint-4", tmp_path / "copied" / "checkpoint-4")
    assert [row["step"] for row in run("ls", tmp_path / "copied", "--json").document["checkpoints"]] == [4]
    assert run("verify", tmp_path / "copied" / "checkpoint-4").code == 0
    assert easyckpt.restore(tmp_path / "copied", {"model": trainer_root.state_of()["model"]}).step == 4


# -- changing it


def test_prune_and_pin_know_ours_alone(root, run):
    assert run("pin", f"{root}@2").code == 0
    assert (root / "_easyckpt" / "pins" / "step-2").exists()
    ran = run("prune", root, "--keep", "1", "--json")
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-5", "checkpoint-6"]
    assert [row["step"] for row in ran.document["checkpoints"]] == [2, 4, 6]
    assert run("unpin", f"{root}/checkpoint-2").code == 0
    assert run("prune", root, "--keep", "1", "--keep-best", "1", "--metric", "loss").code == 0
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    assert {path.name for path in root.iterdir()} == {"_easyckpt", "checkpoint-5", "checkpoint-6"}


def says(root: Path, step: int, best: object) -> None:
    """Have the checkpoint of `step` call another one the best, as the Trainer does."""
    state = json.dumps({"best_model_checkpoint": best, "log_history": [{"loss": math.nan}]}).encode()
    directory = root / f"checkpoint-{step}"
    (directory / "trainer_state.json").write_bytes(state)


def test_prune_keeps_what_the_trainer_calls_the_best(root, run):
    says(root, 4, "/moved/since/checkpoint-4")
    says(root, 6, "/moved/since/checkpoint-2")
    said = run("prune", root, "--keep", "1", "--dry-run").out
    assert "the Trainer's best" in said
    rows = {row["step"]: row for row in run("prune", root, "--keep", "1", "--json").document["checkpoints"]}
    assert {step: (row["removed"], row["reasons"]) for step, row in rows.items()} == {
        2: (False, ["newest", "chosen"]), 4: (True, ["excess"]), 6: (False, ["newest"])
    }  # fmt: skip
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-5", "checkpoint-6"]


@pytest.mark.parametrize("best", [None, "/moved/since/checkpoint-9", "/moved/since/other", 7, "\0"])
def test_a_best_that_is_not_there_keeps_nothing(root, run, best):
    says(root, 6, best)
    assert run("prune", root, "--keep", "1").code == 0
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]


def test_where_the_newest_does_not_tell_the_best_an_older_one_does(root, run):
    says(root, 4, "checkpoint-2")
    (root / "checkpoint-6" / "trainer_state.json").write_bytes(b"\xff{")
    (root / "checkpoint-5" / "trainer_state.json").unlink()
    assert run("prune", root, "--keep", "1").code == 0
    assert (root / "checkpoint-2").exists()


def test_the_best_of_another_training_whose_numbers_are_higher_is_not_that_of_the_line(root, run):
    says(root, 6, "checkpoint-2")
    shutil.copytree(root / "checkpoint-5", root / "checkpoint-10000")
    says(root, 10000, "checkpoint-9000")
    assert run("prune", root, "--keep", "1").code == 0
    assert (root / "checkpoint-2").exists()


def test_cp_makes_a_root_of_the_same_kind_from_which_training_goes_on(root, run, tmp_path):
    before = everything_in(root)
    for step in (4, 2):
        assert run("cp", f"{root}@{step}", tmp_path / "new").code == 0
    assert everything_in(root) == before
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"_easyckpt", "checkpoint-2", "checkpoint-4"}
    assert run("verify", tmp_path / "new").code == 0
    assert run("cp", f"{root}@4", tmp_path / "new").code == 2
    state = trainer_root.state_of(seed=1)
    trainer_root.make(tmp_path / "new", state, until=6)
    assert run("diff", f"{root}@6", f"{tmp_path}/new@6").code == 0
    assert run("cp", f"{root}@4", root / "checkpoint-4" / "inside").code == 2
    assert run("cp", f"{root}@4", tmp_path / "checkpoint-9").code == 2


def test_a_copy_that_is_refused_leaves_no_directory(root, run, tmp_path):
    flip(root / "checkpoint-4" / ODD, -1)
    assert run("cp", f"{root}@4", tmp_path / "new").code == 1
    assert not (tmp_path / "new").exists()


def test_rescue_says_that_it_cannot(root, run):
    ran = run("rescue", root)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert "resume_from_checkpoint" in ran.err


# -- the job


def test_doctor_and_watch_find_the_records(root, run):
    findings = run("doctor", root, "--json").document
    assert any("newest checkpoint: step 6" in json.dumps(finding) for finding in findings["findings"])
    watched = run("watch", root, "--json").document
    assert (watched["checkpoints"]["count"], watched["last_commit"]["step"]) == (3, 6)
    assert watched["metrics"]["loss"] == 1 / 6
