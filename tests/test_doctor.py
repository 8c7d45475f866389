"""Doctor: what it finds on a real machine, that it leaves nothing behind, and that it cleans only what nobody needs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import easyckpt
from easyckpt.cli.doctor import leftovers
from easyckpt.format import layout, memory_names
from easyckpt.memory.leftovers import OwnerNote
from easyckpt.memory.surroundings import remove_ipc_setting
from easyckpt.storage import probing
from easyckpt.storage.local import LocalStorage
from tests.support.commands import everything_in, run  # noqa: F401 - a fixture
from tests.support.livejobs import job  # noqa: F401 - a fixture


@pytest.fixture
def doctor(run, tmp_path):
    """`easyckpt doctor --json` on the root of the jobs, without measuring the speed."""

    def call(*arguments, root=tmp_path / "exp"):
        ran = run("doctor", root, "--json", "--speed", 0, *arguments)
        return ran, ran.document

    return call


def arena_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if memory_names.is_arena_file(path.name))


def slots(directory: Path) -> list[str]:
    return [name for name in arena_files(directory) if memory_names.is_slot_file(name)]


def of(document: dict, what: str) -> dict:
    return next(finding for finding in document["findings"] if finding["what"] == what)


# -- what it finds


def test_it_tells_of_memory_storage_and_machine_and_leaves_nothing_in_the_root(job, doctor, tmp_path):
    job().end()
    before = everything_in(tmp_path)
    ran, document = doctor("--speed", 4)
    assert ran.code == 0
    assert {finding["area"] for finding in document["findings"]} == {"memory", "storage", "machine"}
    assert all(finding["state"] in ("ok", "warning") for finding in document["findings"])
    assert of(document, "write speed")["finding"].endswith("/s (8.0 MiB)")
    assert document["guarantees"]["commit"]["state"] == "ok"
    assert "step 6" in of(document, "root")["finding"]
    after = everything_in(tmp_path)
    changed = [path for path in after if before.get(path, (0, b""))[1] != after[path][1]]
    assert (sorted(after), changed) == (sorted(before), [])


def test_it_says_how_many_snapshots_of_this_run_fit(job, doctor):
    job().end()
    assert "4 of 4 slots of" in of(doctor()[1], "for snapshots")["finding"]


def test_a_root_that_does_not_exist_is_tried_out_above_and_not_made(doctor, tmp_path):
    ran, document = doctor(root=tmp_path / "not" / "yet")
    assert ran.code == 0
    found = of(document, "root")
    assert found["state"] == "warning"
    assert f"{tmp_path / 'not' / 'yet'} does not exist yet" in found["finding"]
    assert f"the nearest existing parent, {tmp_path}, was looked at" in found["finding"]
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_root_is_bad(job, doctor, tmp_path):
    job().end()
    record = tmp_path / "exp" / layout.ROOT_FILE
    record.write_bytes(record.read_bytes().replace(b'"run"', b'"rum"'))
    ran, document = doctor()
    assert ran.code == 1
    assert of(document, "root")["state"] == "bad"
    assert document["guarantees"]["commit"]["state"] == "bad"


def test_a_file_is_no_root(doctor, tmp_path):
    (tmp_path / "file").write_text("x")
    assert doctor(root=tmp_path / "file")[0].code == 2


def test_all_without_clean_is_refused(doctor):
    assert doctor("--all")[0].code == 2


def test_the_table_for_people_names_what_to_change(job, run, tmp_path):
    job().kill()
    ran = run("doctor", tmp_path / "exp", "--speed", 0)
    assert ran.code == 0
    assert "waiting:" in ran.out
    assert f"easyckpt rescue {tmp_path / 'exp'}" in ran.out
    assert "snapshots in memory survive kill -9" in ran.out


def test_what_is_not_ok_comes_first_and_what_is_ok_only_if_asked_for(run, tmp_path):
    root = tmp_path / "not" / "yet"
    document = run("doctor", root, "--speed", 0, "--json").document
    fine = [finding for finding in document["findings"] if finding["state"] == "ok"]
    short, full = (run("doctor", root, "--speed", 0, *more).out for more in ([], ["--verbose"]))
    warning, advice, guarantees = "does not exist yet", "see that the path is right", "one job at a time writes a root"
    for said in (short, full):
        assert 0 < said.index(warning) < said.index(advice) < said.index(guarantees)
    assert short.splitlines()[-1] == f"{len(fine)} checks are ok; --verbose shows them"
    assert "rename of a directory" not in short
    assert full.index(guarantees) < full.index("rename of a directory")


# -- what was left in memory


def test_the_memory_of_a_live_job_is_never_taken(job, doctor, memory_dir):
    alive = job()
    before = arena_files(memory_dir)
    _, document = doctor("--clean", "--all")
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("in use", False)]
    assert arena_files(memory_dir) == before
    assert "it lives" in of(document, "lease")["meaning"]
    alive.end()


def test_what_a_restart_would_go_on_from_stays_unless_all_is_asked_for(job, doctor, memory_dir, tmp_path):
    job().kill()
    _, document = doctor("--clean")
    [item] = document["left"]
    assert (item["kind"], item["newest_step"], item["removed"]) == ("waiting", 6, False)
    assert "it is dead" in of(document, "lease")["meaning"]
    assert item["root"] == str(tmp_path / "exp")
    again = job("--steps", "7")
    assert (again.began_at, again.tier) == (6, "memory")
    again.kill()
    _, document = doctor("--clean", "--all")
    assert [item["removed"] for item in document["left"]] == [True]
    assert slots(memory_dir) == []


def test_what_is_committed_is_removed_and_a_restart_goes_on_at_once(job, doctor, memory_dir, tmp_path):
    job("--steps", "8").kill()
    _, document = doctor("--clean", root=tmp_path)  # which finds the root by the owner's note
    [item] = document["left"]
    assert (item["kind"], item["removed"], item["newest_step"]) == ("not needed", True, 8)
    assert slots(memory_dir) == []
    # The lease of the killed job names the owner file, by which a restart sees at once that it is dead.
    assert arena_files(memory_dir) != []
    assert doctor("--clean", root=tmp_path)[1]["left"] == []  # and that is nothing to speak of
    again = job("--steps", "9")
    assert (again.began_at, again.tier) == (8, "storage")
    again.end()


def deleted(root: Path) -> None:
    shutil.rmtree(root)


def moved(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def emptied(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def moved_and_begun_anew(root: Path) -> None:
    moved(root)
    with easyckpt.Checkpointer(root, {"w": {"w": torch.zeros(1)}}, signals=()) as ckpt:
        ckpt.load()
        ckpt.save(1, wait=True)


def a_day_later(monkeypatch) -> None:
    monkeypatch.setattr(leftovers, "time", SimpleNamespace(time=lambda: time.time() + 24 * 3600))


GONE = [
    (deleted, "there is no directory {root} any more"),
    (moved, "there is no directory {root} any more"),
    (emptied, "{root} is there, but holds no record of a run (easyckpt.json)"),
    (moved_and_begun_anew, "{root} belongs to another run now"),
]


@pytest.mark.parametrize(("goes", "why"), GONE, ids=[goes.__name__ for goes, _ in GONE])
def test_the_memory_of_a_root_that_is_gone_is_removed_after_a_day(
    job, doctor, memory_dir, tmp_path, monkeypatch, goes, why
):
    job().kill()
    goes(tmp_path / "exp")
    _, document = doctor("--clean", root=tmp_path)
    [item] = document["left"]
    assert (item["kind"], item["removed"]) == ("unclear", False)
    assert item["why"] == why.format(root=tmp_path / "exp") + ": it was deleted or moved"
    assert slots(memory_dir) != []
    a_day_later(monkeypatch)
    _, document = doctor(root=tmp_path)
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("not needed", False)]
    assert slots(memory_dir) != []  # without --clean it only says so
    _, document = doctor("--clean", root=tmp_path)
    assert [item["removed"] for item in document["left"]] == [True]
    assert slots(memory_dir) == []


def test_a_root_that_was_moved_and_is_moved_back_goes_on_from_memory(job, doctor, tmp_path):
    job().kill()
    moved(tmp_path / "exp")
    doctor("--clean", root=tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "exp")
    again = job("--steps", "7")
    assert (again.began_at, again.tier) == (6, "memory")


def test_the_memory_of_a_root_that_is_gone_goes_at_once_where_all_is_asked_for(job, doctor, memory_dir, tmp_path):
    job().kill()
    deleted(tmp_path / "exp")
    _, document = doctor("--clean", "--all", root=tmp_path)
    assert [item["removed"] for item in document["left"]] == [True]
    assert arena_files(memory_dir) == []


def owner_of(memory_dir: Path) -> Path:
    return memory_dir / next(name for name in arena_files(memory_dir) if not memory_names.is_slot_file(name))


def test_the_memory_of_a_root_that_may_not_be_mounted_stays(job, doctor, memory_dir, tmp_path):
    job().kill()
    shutil.rmtree(tmp_path / "exp")
    owner = owner_of(memory_dir)
    owner.write_bytes(OwnerNote(str(tmp_path / "exp"), os.stat(tmp_path).st_dev + 1).to_bytes())
    _, document = doctor("--clean", root=tmp_path)
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("unclear", False)]
    assert slots(memory_dir) != []


@pytest.mark.parametrize("note", [b"", b'{"root": "/', b"[]", OwnerNote("/another/root", 1).to_bytes()])
def test_a_note_that_does_not_fit_the_arena_is_not_believed(job, doctor, memory_dir, tmp_path, note):
    job("--steps", "8").kill()
    owner_of(memory_dir).write_bytes(note)
    _, document = doctor("--clean", root=tmp_path)
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("unclear", False)]
    _, document = doctor("--clean")  # the root that is named tells
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("not needed", True)]


def test_without_its_owner_file_an_arena_is_unclear(job, doctor, memory_dir):
    alive = job("--steps", "8")
    owner_of(memory_dir).unlink()  # somebody has; the job may live
    _, document = doctor("--clean")
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("unclear", False)]
    assert slots(memory_dir) != []
    alive.kill()


def test_links_and_files_that_others_may_open_are_not_touched(job, doctor, memory_dir):
    job("--steps", "8").kill()
    first, second, *_ = [memory_dir / name for name in slots(memory_dir)]
    elsewhere = memory_dir / "elsewhere"
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    second.chmod(0o644)
    doctor("--clean", "--all")
    assert elsewhere.exists()
    assert first.is_symlink()
    assert second.exists()
    assert slots(memory_dir) == sorted([first.name, second.name])


def test_a_snapshot_that_came_while_it_looked_is_not_removed(job, doctor):
    """A restart between the look and the removal: what is true once the locks are held decides."""
    job("--steps", "8").kill()
    real = leftovers.memory.remove

    def restart_first(arena, **how):
        job("--steps", "9").kill()  # leaves step 9, which is not committed
        return real(arena, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leftovers.memory, "remove", restart_first)
        _, document = doctor("--clean")
    [item] = document["left"]
    assert not item["removed"]
    assert "meanwhile" in item["kept_because"]
    assert job("--steps", "9").tier == "memory"


RANK = """
import sys
from easyckpt.memory.arena import Arena
from easyckpt.memory.place import user_name
arena = Arena(sys.argv[1], user_name(), "0123456789ab-01234567", int(sys.argv[2]), 2, run="r", incarnation="i",
              budget_bytes=1 << 30)
arena.ensure(4096, 4096)
arena.wait_ready()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_group_is_left_alone_while_one_of_its_ranks_lives(doctor, memory_dir, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(memory_dir), str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout.readline() == b"ready\n"
    before = arena_files(memory_dir)
    ranks[1].kill()
    ranks[1].communicate()
    _, document = doctor("--clean", "--all", root=tmp_path)
    assert [(item["kind"], item["ranks"], item["removed"]) for item in document["left"]] == [("in use", [0, 1], False)]
    assert arena_files(memory_dir) == before
    ranks[0].kill()
    ranks[0].communicate()
    _, document = doctor("--clean", root=tmp_path)
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("not needed", True)]
    assert arena_files(memory_dir) == []


AUDIT = """
import sys
from easyckpt.memory.temporary import TemporaryMemory
memory = TemporaryMemory(None if len(sys.argv) < 2 else sys.argv[1])
print(memory.path, flush=True)
sys.stdin.readline()
"""


def test_the_directory_of_a_dead_audit_is_removed_and_that_of_a_live_one_stays(doctor, memory_dir, tmp_path):
    audit = subprocess.Popen(
        [sys.executable, "-c", AUDIT, str(memory_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    path = Path(audit.stdout.readline().strip())
    (path / "file").write_bytes(b"x")
    (path / "link").symlink_to(tmp_path)
    _, document = doctor("--clean", "--all", root=tmp_path)
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("in use", False)]
    assert (path / "file").exists()
    audit.kill()
    audit.communicate()
    _, document = doctor("--clean", root=tmp_path)
    assert [(item["kind"], item["removed"]) for item in document["left"]] == [("not needed", True)]
    assert not path.exists()
    assert tmp_path.exists()


# -- trying out the file system


def start_doctor(root: Path) -> tuple[subprocess.Popen, Path]:
    """A doctor that is busy with measuring, and its directory in the root."""
    command = [sys.executable, "-m", "easyckpt", "doctor", str(root), "--speed", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (found := [path for path in root.iterdir() if (path / "speed").exists()]):
        assert process.poll() is None
        time.sleep(0.01)
    return process, found[0]


def test_a_doctor_that_is_terminated_leaves_nothing(tmp_path):
    process, _ = start_doctor(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_doctor_leaves_is_no_checkpoint_and_is_removed_by_a_later_one(doctor, tmp_path, run):
    process, left = start_doctor(tmp_path)
    process.kill()
    process.wait()
    assert run("ls", tmp_path).code == 2  # nothing in it is taken for ours
    doctor("--clean", root=tmp_path)
    assert left.exists()  # it may be that of a doctor that runs now
    os.utime(left, (0, 0))
    doctor("--clean", root=tmp_path)
    assert not left.exists()


def test_a_file_system_that_holds_nothing_back_is_found_out(tmp_path):
    """A storage that behaves as bad file systems do: copies for renames, overwriting, no exclusive creation."""

    class Careless(LocalStorage):
        def rename(self, src, dst):
            shutil.rmtree(f"{self.root}/{dst}", ignore_errors=True)
            shutil.copytree(f"{self.root}/{src}", f"{self.root}/{dst}")
            shutil.rmtree(f"{self.root}/{src}")

        def link_exclusive(self, path, data):
            self.replace(path, data)
            return True

    with probing.private_directory(str(tmp_path)) as probes:
        good = [probes.keeps_directories(), probes.creates_once()]
    with probing.private_directory(str(tmp_path)) as probes:
        probes._storage = Careless(probes.path)
        assert probing.holds(probes.renames_in_place)[0] is False
        bad = [probes.keeps_directories(), probes.creates_once()]
    assert (good, bad) == ([True, True], [False, False])
    assert list(tmp_path.iterdir()) == []


def test_a_record_lock_is_seen_by_others(tmp_path):
    with probing.private_directory(str(tmp_path)) as probes:
        assert probes.locks_records()


@pytest.mark.parametrize(
    ("path", "kind", "where"),
    [
        ("/data/exp", "nfs4", "network"),
        ("/data", "nfs4", "network"),
        ("/database", "ext4", "local"),
        ("/scratch/a b/exp", "fuse.sshfs", "network"),
        ("/shm/x", "tmpfs", "memory"),
    ],
)
def test_the_mount_of_a_path_is_the_innermost_one(path, kind, where):
    mounts = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
28 27 0:25 / /data rw shared:1 - nfs4 server:/data rw
29 27 0:26 / /scratch/a\\040b rw - fuse.sshfs host: rw
30 27 0:27 / /shm rw - ext4 /dev/vdb rw
31 30 0:28 / /shm rw - tmpfs tmpfs rw
not a line
"""
    mount = probing.mount_of(path, mounts)
    assert (mount.kind, mount.where) == (kind, where)


@pytest.mark.parametrize(
    ("texts", "removes"),
    [
        ([], True),
        (["[Login]\n#RemoveIPC=yes\n"], True),
        (["[Login]\nRemoveIPC=no\n"], False),
        (["[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=yes\n"], True),
        (["[Login]\nRemoveIPC=no\n", "garbage"], False),
        (["[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=perhaps\n"], False),
    ],
)
def test_the_last_setting_of_logind_wins(tmp_path, texts, removes):
    paths = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.conf"
        path.write_text(text)
        paths.append(str(path))
    assert remove_ipc_setting([*paths, str(tmp_path / "missing")]) is removes


def test_the_document_is_json_with_a_reason_for_each_finding(doctor, tmp_path):
    _, document = doctor(root=tmp_path)
    assert all(finding["meaning"] for finding in document["findings"])
    assert json.dumps(document)
