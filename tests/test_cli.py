"""The command line: what it prints, how it ends, and that looking changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import easyckpt
from easyckpt import verification
from easyckpt.cli import app, output
from easyckpt.cli import rescue as rescue_command
from easyckpt.format import layout
from easyckpt.format.checksum import chunk_digests, digest_bytes, file_digest
from easyckpt.format.image import LeafSpec, plan_layout, shard_header
from easyckpt.format.manifest import FileRecord, Index, LeaseRecord, Manifest, RootRecord, ShardRecord, Timeline
from tests.support.commands import everything_in, run  # noqa: F401 - a fixture

RUN = "0123456789abcdef" * 2
TENSORS = {("model", "weight"): torch.arange(12.0).reshape(3, 4), ("optimizer", 0, "exp_avg"): torch.ones(5)}


def write_checkpoint(directory: Path, step: int, *, timeline: str = "main", **fields) -> Path:
    """A committed checkpoint of one rank, made of the format's own functions."""
    directory.mkdir(parents=True)
    specs = [
        LeafSpec(path, "float32", tuple(t.shape), tuple(range(t.dim())), "cpu", False) for path, t in TENSORS.items()
    ]
    image = plan_layout(specs, {"model": {}, "optimizer": {}}, 0, 1)
    data = bytearray(shard_header(image, True) + bytes(image.image_bytes))
    start = len(data) - image.image_bytes
    for leaf, tensor in zip(image.leaves, TENSORS.values(), strict=True):
        data[start + leaf.offset : start + leaf.offset + leaf.nbytes] = tensor.numpy().tobytes()
    chunks = tuple(chunk_digests([data]))
    shard = ShardRecord(
        name=layout.shard_file(0), size=len(data), header_bytes=start, write_replicated=True, chunks=chunks
    )
    same = {"run": RUN, "timeline": timeline, "step": step, "world_size": 1}
    index = Index(**same, rank=0, layout=image, objects={"trees": {}}, shard=shard).to_bytes()
    files = {
        layout.shard_file(0): FileRecord(len(data), file_digest(len(data), chunks)),
        layout.index_file(0): FileRecord(len(index), digest_bytes(index)),
    }
    manifest = Manifest(**{**same, "attempt": "a1", "created": 1.7e9, "files": files, "metrics": {}, **fields})
    (directory / layout.shard_file(0)).write_bytes(data)
    (directory / layout.index_file(0)).write_bytes(index)
    (directory / layout.MANIFEST).write_bytes(manifest.to_bytes())
    return directory


@pytest.fixture
def root(tmp_path):
    """A root with steps 10, 20 and 30, and a stale 40."""
    path = tmp_path / "exp"
    path.mkdir()
    line = Timeline("main", None, 0, False, 1.7e9)
    (path / layout.ROOT_FILE).write_bytes(RootRecord(run=RUN, created=1.7e9, timelines=(line,)).to_bytes())
    for step in (10, 20, 30):
        write_checkpoint(path / layout.step_dir(step), step, metrics={"loss": 0.5, "worst": float("nan")})
    write_checkpoint(path / layout.stale_dir(40, "main"), 40)
    return path


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# -- help

COMMANDS = get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_an_example_and_its_exit_codes_and_flows(run, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "1000")
    ran = run(name, "--help")
    assert ran.code == 0
    assert f"Example: easyckpt {name} " in ran.out
    assert "Exit code" in ran.out
    lines = [line.strip() for line in ran.out.splitlines()]
    for paragraph in COMMANDS[name].help.split("\n\n"):
        assert paragraph in lines, "a paragraph is one line, which the terminal wraps, and nothing of it is lost"


# -- ls


def test_ls_lists_committed_steps_in_order(root, run):
    ran = run("ls", root, "--json")
    assert ran.code == 0
    assert ran.err == ""
    assert ran.document["run"] == RUN
    assert [row["step"] for row in ran.document["checkpoints"]] == [10, 20, 30]
    assert all(row["valid"] and row["bytes"] > 4096 for row in ran.document["checkpoints"])
    assert ran.document["checkpoints"][0]["metrics"] == {"loss": 0.5, "worst": "nan"}


def test_ls_all_lists_stale_ones_too(root, run):
    rows = run("ls", root, "--all", "--json").document["checkpoints"]
    assert [(row["step"], row["kind"]) for row in rows if row["kind"] == "stale"] == [(40, "stale")]


def test_ls_shows_a_table_to_people(root, run):
    ran = run("ls", root)
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == ["step", "10", "20", "30"]
    assert layout.stale_dir(40, "main") not in ran.out


def test_the_table_fits_80_columns_and_what_does_not_is_below_it(root, run):
    os.truncate(root / layout.step_dir(20) / layout.shard_file(0), 100)
    (root / layout.tmp_dir(50, "a1b2c3d4-000001")).mkdir()
    write_checkpoint(root / layout.step_dir(60_000_000), 60_000_000, timeline="0123abcd")
    table, _, below = run("ls", root, "--all").out.partition("\n\n")
    assert max(len(line) for line in table.splitlines()) <= 80
    assert "committed, not valid" in table
    first, second, third = below.splitlines()
    assert first.startswith(f"{layout.step_dir(20)}: {layout.shard_file(0)} has 100 bytes")
    assert second == f"{layout.stale_dir(40, 'main')}: stale"
    assert third.startswith(f"{layout.tmp_dir(50, 'a1b2c3d4-000001')}: no {layout.MANIFEST}")


def test_ls_shows_a_checkpoint_that_is_not_valid_and_why(root, run):
    os.truncate(root / layout.step_dir(20) / layout.shard_file(0), 100)
    row = run("ls", root, "--json").document["checkpoints"][1]
    assert row["valid"] is False
    assert layout.shard_file(0) in row["problem"]


def test_ls_of_a_root_without_checkpoints_is_no_error(tmp_path, root, run):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / layout.ROOT_FILE).write_bytes((root / layout.ROOT_FILE).read_bytes())
    ran = run("ls", empty, "--json")
    assert (ran.code, ran.document["checkpoints"]) == (0, [])


# -- show


def test_show_means_the_newest(root, run):
    document = run("show", root, "--json").document
    assert document["step"] == 30
    assert document["components"]["model"] == {"tensors": 1, "bytes": 48, "dtypes": ["float32"]}
    assert set(document["files"]) == {layout.shard_file(0), layout.index_file(0)}


@pytest.mark.parametrize("spelling", ["{root}@20", "{root}/step-00000020", "{root}/step-00000020/"])
def test_show_takes_a_step(root, run, spelling):
    assert run("show", spelling.format(root=root), "--json").document["step"] == 20


def test_show_takes_a_relative_step_directory(root, run, monkeypatch):
    monkeypatch.chdir(root / layout.step_dir(10))
    assert run("show", ".", "--json").document["step"] == 10


def test_show_lists_tensors_when_asked(root, run):
    assert "tensors" not in run("show", root, "--json").document
    tensors = run("show", root, "--tensors", "--json").document["tensors"]
    assert [(t["path"], t["shape"]) for t in tensors] == [("model.weight", [3, 4]), ("optimizer.0.exp_avg", [5])]
    assert "optimizer.0.exp_avg" in run("show", root, "--tensors").out


def test_a_directory_with_an_at_sign_in_its_name_is_taken_as_it_is(root, run):
    renamed = root.rename(root.with_name("exp@7"))
    assert run("show", renamed, "--json").document["step"] == 30
    assert run("show", f"{renamed}@10", "--json").document["step"] == 10


def test_another_layouts_directory_with_our_manifest_is_accepted(tmp_path, run):
    directory = write_checkpoint(tmp_path / "out" / "checkpoint-7", 7)
    assert run("show", directory, "--json").document["step"] == 7
    assert run("verify", directory, "--json").document["good"] is True


@pytest.mark.parametrize("name", [layout.index_file(0), layout.shard_file(0)])
def test_show_of_a_damaged_step_says_so_and_ends_with_1(root, run, name):
    (root / layout.step_dir(20) / name).unlink()
    ran = run("show", f"{root}@20")
    assert ran.code == 1
    if name == layout.index_file(0):
        assert ran.err == f"easyckpt: {root}: step 20 is damaged: {name} is missing; see `easyckpt verify`\n"
    else:
        assert f"not valid: {name} is missing; see `easyckpt verify`" in ran.out


# -- verify


def test_verify_means_all_and_reads_every_file(root, run):
    ran = run("verify", root, "--json")
    assert ran.code == 0
    assert [(c["step"], c["good"]) for c in ran.document["checkpoints"]] == [(10, True), (20, True), (30, True)]


def test_verify_leaves_out_what_a_job_removes_meanwhile(root, run, monkeypatch):
    verified = verification.verify

    def rotated(storage, entry, **how):
        if entry.step == 10:
            shutil.rmtree(root / entry.name)
        return verified(storage, entry, **how)

    monkeypatch.setattr(verification, "verify", rotated)
    ran = run("verify", root, "--json")
    assert ran.code == 0, ran.err
    assert [c["step"] for c in ran.document["checkpoints"]] == [20, 30]


def test_verify_says_which_file_tensor_and_chunk_is_bad(root, run):
    flip(root / layout.step_dir(20) / layout.shard_file(0), 4096 + 4)
    ran = run("verify", root, "--json")
    assert ran.code == 1
    assert [c["good"] for c in ran.document["checkpoints"]] == [True, False, True]
    (problem,) = ran.document["checkpoints"][1]["problems"]
    assert (problem["file"], problem["chunk"]) == (layout.shard_file(0), 0)
    assert "model.weight" in problem["tensor"]
    told = run("verify", root)
    assert told.code == 1
    assert layout.shard_file(0) in told.out
    assert "model.weight" in told.out
    assert "chunk 0" in told.out


def test_verify_says_what_else_there_is_where_something_is_damaged(root, run):
    assert run("verify", root, "--json").document["advice"] is None
    flip(root / layout.step_dir(30) / layout.shard_file(0), 4096 + 4)
    told = run("verify", root).out.splitlines()[-1]
    assert told.startswith("whole: steps 20, 10. load() and restore() pass over what is damaged by themselves")
    told = run("verify", f"{root}@30").out.splitlines()[-1]
    assert told.startswith(f"older ones: steps 20, 10; `easyckpt verify {root}` tells which are whole. load()")
    flip(root / layout.step_dir(10) / layout.shard_file(0), 4096 + 4)
    assert "there is no older checkpoint" in run("verify", f"{root}@10").out


def test_verify_finds_a_flipped_bit_at_every_byte_of_the_small_files(root, run):
    for name in (layout.MANIFEST, layout.index_file(0)):
        path = root / layout.step_dir(10) / name
        whole = path.read_bytes()
        for offset in range(0, len(whole), 97):
            flip(path, offset)
            assert run("verify", f"{root}@10").code == 1, (name, offset)
            path.write_bytes(whole)


@pytest.mark.parametrize("name", [layout.MANIFEST, layout.index_file(0), layout.shard_file(0)])
@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_verify_finds_truncated_and_missing_files(root, run, name, harm):
    path = root / layout.step_dir(30) / name
    if harm == "remove":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    ran = run("verify", f"{root}@30", "--json")
    assert ran.code == 1
    assert ran.document["checkpoints"][0]["problems"]


def test_verify_of_one_good_step_does_not_mind_another_bad_one(root, run):
    (root / layout.step_dir(20) / layout.MANIFEST).write_bytes(b"{")
    assert run("verify", f"{root}@30").code == 0
    assert run("verify", root).code == 1


def test_verify_tells_a_damaged_root_record(root, run):
    flip(root / layout.ROOT_FILE, 40)
    ran = run("verify", root, "--json")
    assert ran.code == 1
    assert ran.document["problem"]
    assert all(checkpoint["good"] for checkpoint in ran.document["checkpoints"])


# -- rescue


@dataclass(frozen=True)
class Rescued:
    step: int
    path: str
    bytes: int


def test_rescue_tells_what_it_committed_and_uses_the_run_s_settings(root, run, monkeypatch, memory_dir, tmp_path):
    calls = []

    def fake(root, config, naming, *, on_wait):
        calls.append((root, config.memory_dir, config.lease_timeout))
        return [Rescued(31, f"{root}/{layout.step_dir(31)}", 4096)]

    monkeypatch.setattr(rescue_command.saving_rescue, "rescue", fake)
    ran = run("rescue", root, "--json")
    assert (ran.code, ran.document["rescued"][0]["step"]) == (0, 31)
    assert layout.step_dir(31) in run("rescue", root, "--memory-dir", "/elsewhere").out
    monkeypatch.delenv("EASYCKPT_MEMORY_DIR")
    settings = tmp_path / "run.yaml"
    settings.write_text("memory_dir: /as/in/yaml\nlease_timeout: 90\n")
    run("rescue", root, "--config", settings)
    assert calls == [(str(root), str(memory_dir), 60), (str(root), "/elsewhere", 60), (str(root), "/as/in/yaml", 90)]


def test_rescue_with_nothing_in_memory_says_so(root, run, memory_dir):
    ran = run("rescue", root, "--memory-dir", memory_dir, "--json")
    assert (ran.code, ran.document["rescued"]) == (0, [])


DIES = """
import os, signal, sys, torch, easyckpt
model = torch.nn.Linear(3, 3)
checkpointer = easyckpt.Checkpointer(sys.argv[1], {"model": model}, save_storage_interval=1000)
checkpointer.load()
for step in (1, 2, 3):
    torch.nn.init.constant_(model.weight, step)
    checkpointer.log(loss=step / 2, note="kept in metrics.jsonl only")
    checkpointer.save_if_needed(step)
checkpointer.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def dead(tmp_path):
    """The root of a run that was killed with step 3 in memory and nothing committed."""
    root = tmp_path / "run"
    died = subprocess.run([sys.executable, "-c", DIES, str(root)], capture_output=True, timeout=240, check=False)
    assert died.returncode == -9, died.stderr
    return root


def test_rescue_commits_what_a_killed_process_left_in_memory(dead, run):
    root = dead
    assert run("ls", root, "--json").document["checkpoints"] == []
    rescued = run("rescue", root, "--json")
    assert (rescued.code, rescued.err) == (0, "")
    assert rescued.document["rescued"][-1]["step"] == 3
    assert run("verify", root).code == 0
    model = torch.nn.Linear(3, 3)
    restored = easyckpt.restore(root, {"model": model})
    assert (restored.step, restored.metrics) == (3, {"loss": 1.5})
    assert torch.equal(model.weight, torch.full((3, 3), 3.0))
    assert run("rescue", root, "--json").document["rescued"] == []


def test_rescue_says_whom_it_waits_for_as_long_as_the_run_s_lease_timeout(dead, run, monkeypatch):
    """The lease names a process of another host: nothing tells whether it lives but that it renews no more."""
    record = LeaseRecord.from_bytes((dead / layout.LEASE).read_bytes())
    elsewhere = replace(record, host="elsewhere", boot="another/1/2")
    (dead / layout.LEASE).write_bytes(elsewhere.to_bytes())
    monkeypatch.setenv("EASYCKPT_LEASE_TIMEOUT", "1")
    monkeypatch.setenv("EASYCKPT_LEASE_INTERVAL", "0.2")
    rescued = run("rescue", dead, "--json")
    assert rescued.document["rescued"][-1]["step"] == 3
    assert "waiting for" in rescued.err
    assert "on host elsewhere" in rescued.err
    assert "after 1 s" in rescued.err


# -- bad input: one line, exit code 2, nothing changed


def newer(path: Path) -> None:
    record = RootRecord.from_bytes(path.read_bytes())
    path.write_bytes(replace(record, format=record.format + 1).to_bytes())


def spoil_empty_name(root):
    return ""


def spoil_no_such_root(root):
    return root.with_name("nowhere")


def spoil_file_for_directory(root):
    return root / layout.ROOT_FILE


def spoil_foreign_directory(root):
    other = root.with_name("other")
    other.mkdir()
    (other / "model.pt").write_bytes(b"PK")
    return other


def spoil_foreign_record(root):
    (root / layout.ROOT_FILE).write_bytes(b'{"name": "somebody else"}')
    return root


def spoil_newer_root(root):
    newer(root / layout.ROOT_FILE)
    return root


def spoil_no_such_step(root):
    return f"{root}@31"


def spoil_step_directory_with_step(root):
    return f"{root}/{layout.step_dir(30)}@30"


BAD = [value for name, value in sorted(globals().items()) if name.startswith("spoil_")]
SAYS = {
    "spoil_empty_name": "root must be the path of a directory",
    "spoil_no_such_root": "no such directory",
    "spoil_file_for_directory": "a file",
    "spoil_foreign_directory": "not an easyckpt root",
    "spoil_newer_root": "upgrade easyckpt",
    "spoil_no_such_step": "from step 10 to 30",
}


@pytest.mark.parametrize("command", ["ls", "show", "verify", "rescue"])
@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__)
def test_bad_input_is_one_line_and_code_2(root, run, command, spoil):
    target = spoil(root)
    before = everything_in(root.parent)
    ran = run(command, target)
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    if not (command == "rescue" and "@" in str(target)):
        assert SAYS.get(spoil.__name__, "") in ran.err
    told = run(command, target, "--json")
    assert told.code == 2
    assert told.document["error"]["message"]
    assert everything_in(root.parent) == before


@pytest.mark.parametrize("harm", [b"", b"{", b"\xff" * 100, b'{"kind": "other"}'])
def test_show_needs_a_whole_manifest(root, run, harm):
    (root / layout.step_dir(30) / layout.MANIFEST).write_bytes(harm)
    ran = run("show", f"{root}@30")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    shown = run("show", root, "--json")
    assert shown.document["step"] == 20, "the newest valid one is shown where none is named"
    assert re.search(r"exp: step 30 is not valid \(.+\): step 20 is taken\n", shown.err)
    assert run("show", f"{root}@20").err == ""
    for step in (10, 20):
        (root / layout.step_dir(step) / layout.MANIFEST).unlink()
    ran = run("show", root)
    assert ran.code == 2
    assert "no checkpoint in it is valid: step 30 is not valid (" in ran.err


def test_a_newer_checkpoint_cannot_be_judged(root, run):
    path = root / layout.step_dir(30) / layout.MANIFEST
    path.write_bytes(replace(Manifest.from_bytes(path.read_bytes()), features=("time travel",)).to_bytes())
    for command in ("show", "verify"):
        ran = run(command, f"{root}@30")
        assert (ran.code, len(ran.err.splitlines())) == (2, 1)
        assert "time travel" in ran.err


def test_no_permission_is_one_line_and_code_2(root, run, monkeypatch):
    def refuse(self, path):
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr("easyckpt.storage.local.LocalStorage.listdir", refuse)
    ran = run("ls", root)
    assert (ran.code, ran.err) == (2, f"easyckpt: {root}: Permission denied\n")


def test_nothing_to_verify_is_not_good(tmp_path, root, run):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / layout.ROOT_FILE).write_bytes((root / layout.ROOT_FILE).read_bytes())
    assert run("verify", empty).code == 2
    assert run("show", empty).code == 2


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_looking_changes_nothing(root, run, command):
    before = everything_in(root)
    run(command, root)
    assert everything_in(root) == before


def test_an_interrupted_command_is_not_called_damaged(root, run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("easyckpt.verification.verify", interrupt)
    assert run("verify", root).code == 130


def test_names_cannot_steer_the_terminal(tmp_path, run):
    nasty = "bad\x1b[31m[bold]name"
    ran = run("ls", tmp_path / nasty)
    assert "\x1b" not in ran.err
    assert "[bold]" in ran.err
    assert output.text(nasty).plain == "bad\\x1b[31m[bold]name"


# -- as a program


def program(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "easyckpt", *map(str, arguments)],
        capture_output=True, timeout=120, check=False, **options,
    )  # fmt: skip


def test_the_module_is_the_command(root):
    ran = program("verify", root, "--json")
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout)["good"] is True


def test_a_reader_that_has_seen_enough_is_no_error(root):
    command = f"{sys.executable} -m easyckpt ls {root} --all | true; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
