"""How much memory snapshots may take: cgroups of both versions, shared memory, several ranks."""

from __future__ import annotations

import os
import threading

import pytest
from support.tmpfs import TMPFS_BYTES, tmpfs

from easyckpt.format import memory_names
from easyckpt.memory import budget
from easyckpt.memory.budget import Budget, cgroup_limit_left, held_bytes, node_lock
from easyckpt.memory.slot import Slot

__all__ = ["tmpfs"]

GIB = 1 << 30
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def left(cgroups: str, mounts: str, files: dict[str, str]) -> int | None:
    return cgroup_limit_left(cgroups, mounts, files.get)


def test_v2_counts_page_cache_as_free_but_not_shared_memory():
    files = {
        "/sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/job/memory.high": "max\n",
        "/sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
        "/sys/fs/cgroup/job/memory.stat": f"anon {GIB}\nfile {4 * GIB}\nshmem {GIB}\n"
        f"active_file {GIB}\ninactive_file {2 * GIB}\nactive_anon 5\n",
    }
    assert left("0::/job\n", V2_MOUNT, files) == 6 * GIB


def test_v2_takes_the_tightest_group_above():
    files = {
        "/sys/fs/cgroup/a/b/memory.max": "max",
        "/sys/fs/cgroup/a/b/memory.high": "max",
        "/sys/fs/cgroup/a/b/memory.current": "1000",
        "/sys/fs/cgroup/a/memory.max": f"{2 * GIB}",
        "/sys/fs/cgroup/a/memory.current": f"{GIB}",
    }
    assert left("0::/a/b\n", V2_MOUNT, files) == GIB
    files["/sys/fs/cgroup/a/b/memory.high"] = str(GIB // 2 + 1000)
    assert left("0::/a/b\n", V2_MOUNT, files) == GIB // 2


def test_v2_inside_a_container_that_sees_its_group_as_the_root():
    files = {"/sys/fs/cgroup/memory.max": "5000", "/sys/fs/cgroup/memory.current": "2000"}
    assert left("0::/\n", V2_MOUNT, files) == 3000


def test_a_group_that_names_a_path_of_the_host():
    """cgroup v1 in docker: the group's path is the host's, the mount shows the container's group at its root."""
    mounts = "32 24 0:28 /docker/0123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "5000",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "2000",
        "/sys/fs/cgroup/memory/memory.stat": "cache 900\ntotal_active_file 100\ntotal_inactive_file 200\n"
        "active_file 7\n",
    }
    assert left("5:memory:/docker/0123\n", mounts, files) == 3300
    assert left("5:memory:/elsewhere\n", mounts, files) == 3300
    files["/sys/fs/cgroup/memory/sub/memory.limit_in_bytes"] = "1000"
    files["/sys/fs/cgroup/memory/sub/memory.usage_in_bytes"] = "900"
    assert left("5:memory:/docker/0123/sub\n", mounts, files) == 100


def test_v1_without_a_limit():
    files = {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "2000",
    }
    assert left("3:cpu:/\n5:memory:/\n0::/\n", V1_MOUNTS, files) is None


def test_hybrid_uses_the_version_that_has_the_controller():
    mounts = V1_MOUNTS + "33 24 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    files = {
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000",
        "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "4000",
    }
    assert left("5:memory:/job\n0::/job\n", mounts, files) == 1000


def test_over_the_limit_is_nothing_left():
    files = {"/sys/fs/cgroup/memory.max": "1000", "/sys/fs/cgroup/memory.current": "2000"}
    assert left("0::/\n", V2_MOUNT, files) == 0


@pytest.mark.parametrize(
    ("cgroups", "mounts", "files"),
    [
        ("", "", {}),
        ("0::/\n", "", {}),
        ("nonsense", V2_MOUNT + "short line\n\n - cgroup2\n", {}),
        ("0::/\n", V2_MOUNT, {"/sys/fs/cgroup/memory.max": "many", "/sys/fs/cgroup/memory.current": "-1"}),
        ("0::/\n", V2_MOUNT, {"/sys/fs/cgroup/memory.max": "5"}),
        ("0::/../../etc\n", V2_MOUNT, {}),
    ],
)
def test_nonsense_limits_nothing(cgroups, mounts, files):
    assert left(cgroups, mounts, files) is None


def test_usable_is_a_part_of_the_tightest():
    assert Budget(100, None, 1000).usable == 80
    assert Budget(100, 50, 1000).usable == 40
    assert Budget(100, 50, 10).usable == 8
    assert Budget(100, 50, 10).private_usable == 40
    assert Budget(100, 0, 10).usable == 0


def test_measured_here(tmpfs):
    measured = budget.available(tmpfs)
    assert measured.shm_free == TMPFS_BYTES
    assert measured.free_memory > 0
    assert measured.usable == int(0.8 * TMPFS_BYTES)
    slot = Slot.create(os.path.join(tmpfs, "x"), 32 << 20, 1)
    assert budget.available(tmpfs).shm_free <= 32 << 20
    slot.close(unlink=True)
    assert budget.available(os.path.join(tmpfs, "nowhere")).usable == 0


def test_held_bytes_counts_this_arena_alone(memory_dir):
    mine = memory_names.arena_id("ab" * 16, "/root")
    other = memory_names.arena_id("cd" * 16, "/root")
    assert held_bytes(str(memory_dir), "me", mine) == 0
    slots = [
        Slot.create(str(memory_dir / memory_names.slot_file("me", arena, rank, 0)), 1 << 20, 1)
        for arena, rank in ((mine, 0), (mine, 1), (other, 0))
    ]
    assert held_bytes(str(memory_dir), "me", mine) == slots[0].nbytes + slots[1].nbytes
    assert held_bytes(str(memory_dir / "nowhere"), "me", mine) == 0
    for slot in slots:
        slot.close(unlink=True)


def test_node_lock_is_held_by_one(memory_dir):
    inside = threading.Event()
    leave = threading.Event()

    def hold():
        with node_lock(str(memory_dir), "me") as got:
            assert got
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    with node_lock(str(memory_dir), "me", timeout=0.0) as got:
        assert not got
    leave.set()
    with node_lock(str(memory_dir), "me", timeout=60.0) as got:
        assert got
    thread.join()


def test_node_lock_never_follows_a_link(memory_dir, caplog):
    os.symlink("/etc/hostname", memory_dir / memory_names.node_lock_file("me"))
    with node_lock(str(memory_dir), "me") as got:
        assert not got
    assert "symbolic link" in caplog.text
    with node_lock(str(memory_dir / "nowhere"), "me") as got:
        assert not got
