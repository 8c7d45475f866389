"""The lease: one writer for a root, takeover only from the dead, and the late sleeper stops."""

import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from support.recording import VARIANTS, RecordingStorage

from easyckpt import failpoints
from easyckpt.errors import LeaseLost, OutOfSpace, RootInUse
from easyckpt.format import layout
from easyckpt.format.manifest import LeaseRecord
from easyckpt.memory.owner import OwnerLock
from easyckpt.storage import lease as lease_module
from easyckpt.storage import lease_chain, process
from easyckpt.storage.lease import Lease
from easyckpt.storage.local import LocalStorage

RUN = "0123456789abcdef" * 2
TIMEOUT = 60.0


class FakeClock:
    """Time passes only in sleep; `at` maps moments to what others do then."""

    def __init__(self, at=None, wall=1e9):
        self.now = 0.0
        self.wall = wall
        self.at = dict(at or {})

    def monotonic(self):
        return self.now

    def time(self):
        return self.wall + self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds
        for moment in sorted(self.at):
            if moment <= self.now:
                self.at.pop(moment)()


@pytest.fixture
def storage(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    storage.makedirs("")
    return storage


def make(storage, *, clock=None, lock=None, is_free=None, environ=None, timeout=TIMEOUT, incarnation="i1"):
    return Lease(
        storage,
        root_lock_path=lock,
        incarnation=incarnation,
        run=RUN,
        timeout=timeout,
        clock=clock or FakeClock(),
        is_free=is_free,
        environ=environ or {},
    )


def foreign(storage, **changes):
    """A lease of another host's process, as it lies in the root."""
    record = replace(
        LeaseRecord(
            host="node7",
            boot="elsewhere/1/2",
            pid=4711,
            run=RUN,
            incarnation="other",
            token="f" * 32,
            lock="/dev/shm/other.owner",
            renewed=5,
            time=123.0,
        ),
        **changes,
    )
    storage.replace(layout.LEASE, record.to_bytes())
    return record


def renew(storage, record):
    def do():
        storage.replace(layout.LEASE, replace(record, renewed=record.renewed + 1).to_bytes())

    return do


def on_disk(storage):
    return LeaseRecord.from_bytes(storage.read(layout.LEASE))


def test_free_root_is_taken_at_once_and_given_back(storage):
    clock = FakeClock()
    lease = make(storage, clock=clock)
    lease.acquire()
    lease.acquire()
    assert clock.now == 0
    record = on_disk(storage)
    assert (record.host, record.pid, record.run, record.renewed) == (socket.gethostname(), os.getpid(), RUN, 0)
    lease.check()
    lease.renew()
    lease.renew()
    assert on_disk(storage).renewed == 2
    lease.release()
    lease.release()
    assert storage.listdir("") == []
    with pytest.raises(LeaseLost):
        lease.check()
    with pytest.raises(LeaseLost):
        lease.renew()
    lease.acquire()
    lease.check()


def test_silent_owner_of_another_host_is_waited_for(storage):
    foreign(storage)
    said = []
    clock = FakeClock()
    lease = make(storage, clock=clock)
    lease.acquire(said.append)
    assert clock.now == pytest.approx(TIMEOUT)
    assert len(said) == 6
    assert re.search(r"waiting for /.*process 4711 on host node7.*after 60 s", said[0])
    lease.check()
    assert storage.listdir("") == [layout.LEASE]


@pytest.mark.parametrize("moment", [0.5, 30, 59.5])
def test_renewal_seen_is_an_error_that_names_the_owner(storage, moment):
    record = foreign(storage)
    clock = FakeClock({moment: renew(storage, record)})
    with pytest.raises(RootInUse, match=r"process 4711 on host node7.*renewed its lease.*another root"):
        make(storage, clock=clock).acquire()
    assert clock.now <= moment + lease_module.POLL_SECONDS
    assert on_disk(storage).token == record.token


@pytest.mark.parametrize("wall", [0.0, 1e9, 4e9])
@pytest.mark.parametrize("theirs", [0.0, 1e9, 8e9])
def test_wall_clocks_mean_nothing(storage, wall, theirs):
    foreign(storage, time=theirs)
    clock = FakeClock(wall=wall)
    make(storage, clock=clock).acquire()
    assert clock.now == pytest.approx(TIMEOUT)


def test_owner_that_leaves_while_we_watch(storage):
    foreign(storage)
    clock = FakeClock({10: lambda: storage.remove(layout.LEASE)})
    lease = make(storage, clock=clock)
    lease.acquire()
    assert clock.now == 10
    lease.check()


def test_another_owner_that_comes_while_we_watch(storage):
    foreign(storage)
    clock = FakeClock({10: lambda: foreign(storage, token="e" * 32, host="node8")})
    with pytest.raises(RootInUse, match="node8"):
        make(storage, clock=clock).acquire()


@pytest.mark.parametrize("data", [b"", b"{", b"\xff" * 100, b'{"format": 99}'])
def test_unreadable_lease_is_waited_for_like_any_other(storage, data):
    storage.replace(layout.LEASE, data)
    with pytest.raises(RootInUse, match="cannot be read here"):
        make(storage, clock=FakeClock({5: lambda: storage.replace(layout.LEASE, data + b" ")})).acquire()
    clock = FakeClock()
    lease = make(storage, clock=clock)
    lease.acquire()
    assert clock.now == pytest.approx(TIMEOUT)
    lease.check()
    assert storage.listdir("") == [layout.LEASE]


# Proofs of death.


def here(storage, lock, **changes):
    return foreign(storage, host=socket.gethostname(), boot=lease_chain.place_of(lock), lock=lock, **changes)


@pytest.fixture
def lock_file(tmp_path):
    path = tmp_path / "rank0.lock"
    path.touch(mode=0o600)
    return str(path)


def test_free_record_lock_on_this_host_proves_death(storage, lock_file):
    here(storage, lock_file)
    clock = FakeClock()
    make(storage, clock=clock, is_free=OwnerLock.is_free).acquire()
    assert clock.now == 0


@pytest.mark.parametrize(("answer", "alive"), [(True, False), (False, True), (None, None)])
def test_who_only_looks_is_told_whether_the_owner_lives(storage, lock_file, answer, alive):
    record = here(storage, lock_file)
    assert lease_chain.lives(record, lambda path: answer) is alive
    for change in ({"host": "node7"}, {"boot": "another-boot/1/2"}, {"boot": ""}, {"lock": ""}, {"lock": "/no/such"}):
        assert lease_chain.lives(replace(record, **change), lambda path: answer) is None


@pytest.mark.parametrize("answer", [False, None])
def test_lock_that_is_held_or_unknown_proves_nothing(storage, lock_file, answer):
    here(storage, lock_file)
    clock = FakeClock()
    make(storage, clock=clock, is_free=lambda path: answer).acquire()
    assert clock.now == pytest.approx(TIMEOUT)


@pytest.mark.parametrize(
    "change", [{"host": "node7"}, {"boot": "another-boot/1/2"}, {"boot": ""}, {"lock": ""}, {"lock": "/no/such"}]
)
def test_lock_of_another_place_proves_nothing(storage, lock_file, change):
    record = here(storage, lock_file)
    storage.replace(layout.LEASE, replace(record, **change).to_bytes())
    clock = FakeClock()
    make(storage, clock=clock, is_free=lambda path: True).acquire()
    assert clock.now == pytest.approx(TIMEOUT)


def test_new_lock_file_under_the_old_path_proves_nothing(storage, lock_file):
    # RemoveIPC at logout, or another container's /dev/shm: the path is the same, the owner holds another file.
    here(storage, lock_file)
    os.rename(lock_file, lock_file + ".old")
    with open(lock_file, "w"):
        pass
    clock = FakeClock()
    make(storage, clock=clock, lock=lock_file, is_free=lambda path: True).acquire()
    assert clock.now == pytest.approx(TIMEOUT)


def test_own_lock_proves_death_of_who_held_it(storage, lock_file):
    here(storage, lock_file)
    clock = FakeClock()
    make(storage, clock=clock, lock=lock_file, is_free=lambda path: False).acquire()
    assert clock.now == 0


def test_owner_that_dies_while_we_watch(storage, lock_file):
    here(storage, lock_file)
    dead = []
    clock = FakeClock({7: lambda: dead.append(True)})
    make(storage, clock=clock, is_free=lambda path: bool(dead)).acquire()
    assert clock.now == 7


HOLDER = """
import sys
from easyckpt.memory.owner import OwnerLock
from easyckpt.storage.lease import Lease
from easyckpt.storage.local import LocalStorage

lock = OwnerLock(sys.argv[2])
assert lock.try_acquire()
lease = Lease(LocalStorage(sys.argv[1]), root_lock_path=lock.path, incarnation="i1", run=sys.argv[3], timeout=60,
              is_free=OwnerLock.is_free)
lease.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(storage, lock_file):
    """Another process that owns the root."""
    command = [sys.executable, "-c", HOLDER, storage.root, lock_file, RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_an_owner_whose_lock_file_was_removed_is_dead_once_its_process_is(storage, lock_file, holder):
    os.unlink(lock_file)
    clock, said = FakeClock({7: lambda: (holder.kill(), holder.wait())}), []
    make(storage, clock=clock, is_free=OwnerLock.is_free).acquire(said.append)
    assert clock.now == 7
    assert "a process of this number is still there" in said[0]


@pytest.mark.parametrize(
    ("change", "proven"),
    [
        ({}, True),
        ({"pid": os.getpid()}, True),  # the number is another process's by now
        ({"host": "node7"}, False),
        ({"process": ""}, False),
        ({"process": "another-boot/pid:[1]/time:[1]/1"}, False),
        ({"pid": 0}, False),
        ({"pid": 1, "process": process.identity()}, True),
        ({"pid": os.getpid(), "process": process.identity()}, False),
    ],
)
def test_a_process_is_dead_only_where_its_number_means_the_same(storage, lock_file, holder, change, proven):
    os.unlink(lock_file)
    holder.kill()
    holder.wait()
    storage.replace(layout.LEASE, replace(on_disk(storage), **change).to_bytes())
    clock = FakeClock()
    make(storage, clock=clock, is_free=OwnerLock.is_free).acquire()
    assert clock.now == (0 if proven else pytest.approx(TIMEOUT))


def test_numbers_of_another_namespace_of_processes_mean_nothing(storage, lock_file):
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    line = [*command, sys.executable, "-c", HOLDER, storage.root, lock_file, RUN]
    subprocess.run(line, stdin=subprocess.DEVNULL, check=True)
    os.unlink(lock_file)
    clock, said = FakeClock(), []
    make(storage, clock=clock, is_free=OwnerLock.is_free).acquire(said.append)
    assert clock.now == pytest.approx(TIMEOUT)
    assert "another container" in said[0]


def elastic(run, count):
    return {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": str(count)}


@pytest.mark.parametrize(
    ("theirs", "mine", "proven"),
    [
        (("job", 0), ("job", 1), True),
        (("job", 1), ("job", 1), False),
        (("job", 2), ("job", 1), False),
        (("job", 0), ("other", 1), False),
        (("none", 0), ("none", 1), False),
        ((None, 0), ("job", 1), False),
    ],
)
def test_higher_restart_count_of_the_same_elastic_run(storage, theirs, mine, proven):
    environ = {} if theirs[0] is None else elastic(*theirs)
    first = make(storage, environ=environ)
    first.acquire()
    foreign(storage, elastic_run=on_disk(storage).elastic_run, restart_count=on_disk(storage).restart_count)
    clock = FakeClock()
    make(storage, clock=clock, environ=elastic(*mine)).acquire()
    assert clock.now == (0 if proven else pytest.approx(TIMEOUT))


def test_two_owners_in_one_process(storage, lock_file):
    first = make(storage, lock=lock_file, is_free=lambda path: False)
    first.acquire()
    second = make(storage, lock=lock_file, is_free=lambda path: False)
    with pytest.raises(RootInUse, match="another Checkpointer of this process"):
        second.acquire()
    first.check()
    first.release()
    second.acquire()
    second.release()


def test_dropped_owner_in_one_process_is_no_owner(storage, lock_file):
    make(
        storage, lock=lock_file, is_free=lambda path: False
    ).acquire()  # never released: its Checkpointer failed and was thrown away
    clock = FakeClock()
    make(storage, lock=lock_file, clock=clock, is_free=lambda path: False).acquire()
    assert clock.now == 0


@pytest.mark.parametrize("answer", [True, None])
def test_lock_that_the_owner_never_held_proves_nothing(storage, lock_file, answer):
    # No memory tier: nobody holds the file that an earlier job left at that path.
    first = make(storage, lock=lock_file, is_free=lambda path: answer)
    first.acquire()
    lease_module._living.clear()  # as if it were another process
    clock = FakeClock({20: first.renew})
    with pytest.raises(RootInUse):
        make(storage, lock=lock_file, clock=clock, is_free=lambda path: answer).acquire()
    assert clock.now == 20


# Succession.


def test_late_sleeper_finds_its_successor(storage):
    sleeper = make(storage)
    sleeper.acquire()
    lease_module._living.clear()  # as if it were another process
    taker = make(storage)
    taker.acquire()
    taker.check()
    for call in (sleeper.check, sleeper.check, sleeper.renew):
        with pytest.raises(LeaseLost, match="taken over"):
            call()
    sleeper.release()
    taker.renew()
    assert on_disk(storage).renewed == 1


def test_sleeper_stops_already_at_the_claim(storage):
    sleeper = make(storage)
    sleeper.acquire()
    lease_module._living.clear()
    failpoints.arm("lease.takeover.claimed=error:EIO")
    with pytest.raises(OSError, match="Input/output"):
        make(storage).acquire()
    with pytest.raises(LeaseLost, match="taken over"):
        sleeper.renew()


def test_owner_that_renews_in_the_last_moment_keeps_the_root(storage, monkeypatch):
    record = foreign(storage)
    link = storage.link_exclusive

    def renewed_first(path, data):
        renew(storage, record)()
        return link(path, data)

    monkeypatch.setattr(storage, "link_exclusive", renewed_first)
    clock = FakeClock()
    lease = make(storage, clock=clock)
    clock.at[61] = renew(storage, replace(record, renewed=9))
    with pytest.raises(RootInUse, match="node7"):
        lease.acquire()
    assert storage.listdir("") == [layout.LEASE]


def test_removed_lease_is_lost(storage):
    lease = make(storage)
    lease.acquire()
    storage.remove(layout.LEASE)
    with pytest.raises(LeaseLost, match="removed, renamed or unmounted"):
        lease.check()
    other = make(storage)
    other.acquire()
    storage.replace(layout.ROOT_FILE, b"{}")
    storage.remove(layout.LEASE)
    with pytest.raises(LeaseLost, match="has lost its lease: somebody removed it"):
        other.check()


def test_a_lease_that_storage_does_not_let_go_of_is_given_up_all_the_same(storage, lock_file, monkeypatch):
    """A root on what has become read-only: the next Checkpointer of this process is not told that this one lives."""
    owner = make(storage, lock=lock_file)
    owner.acquire()

    def refuse(path):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove", refuse)
        with pytest.raises(OSError, match="Read-only"):
            owner.release()
    with pytest.raises(LeaseLost, match="does not own"):
        owner.check()
    make(storage, lock=lock_file).acquire()


def test_many_contenders_for_a_dead_owner_yield_one(storage):
    foreign(storage)
    leases = [make(LocalStorage(storage.root)) for _ in range(6)]
    barrier = threading.Barrier(len(leases))
    outcome = {}

    def contend(lease):
        barrier.wait()
        try:
            lease.acquire()
            outcome[lease] = "owner"
        except RootInUse:
            outcome[lease] = "refused"

    threads = [threading.Thread(target=contend, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [lease for lease, result in outcome.items() if result == "owner"]
    assert len(outcome) == len(leases)
    assert len(owners) == 1
    owners[0].check()
    assert storage.listdir("") == [layout.LEASE]


def test_contender_that_decided_too_early_does_not_rob_the_new_owner(storage):
    foreign(storage)
    slow, quick = make(storage), make(storage)
    decision = slow._look()
    quick.acquire()
    slow._take_over(decision)
    with pytest.raises(LeaseLost, match="does not own"):
        slow.check()
    quick.check()
    assert storage.listdir("") == [layout.LEASE]


@pytest.mark.parametrize("place", ["lease.takeover.claimed", "lease.takeover.taken"])
def test_contender_that_dies_on_the_way_is_succeeded(storage, place):
    foreign(storage)
    failpoints.arm(f"{place}=error:EIO")
    with pytest.raises(OSError, match="Input/output"):
        make(storage).acquire()
    clock = FakeClock()
    lease = make(storage, clock=clock)
    lease.acquire()
    assert clock.now == pytest.approx(TIMEOUT)
    lease.check()
    lease.renew()
    lease.release()
    assert not storage.exists(layout.LEASE)


def test_full_disk_while_renewing(storage):
    lease = make(storage)
    lease.acquire()
    failpoints.arm("storage.replace.written=error:ENOSPC")
    with pytest.raises(OutOfSpace):
        lease.renew()
    lease.check()
    lease.renew()


@pytest.mark.parametrize("variant", VARIANTS)
def test_power_cut_anywhere_leaves_a_root_that_can_be_taken(tmp_path, variant):
    storage = RecordingStorage(tmp_path / "root")
    storage.makedirs("")
    foreign(storage)
    begin = len(storage.operations)
    lease = make(storage)
    lease.acquire()
    taken = len(storage.operations)
    lease.renew()
    lease.release()
    lease_module._living.clear()
    for k in range(begin, len(storage.operations) + 1):
        storage.materialise(k, variant, tmp_path / str(k))
        after = LocalStorage(tmp_path / str(k))
        if k == taken:
            assert LeaseRecord.from_bytes(after.read(layout.LEASE)).host == socket.gethostname()
        survivor = make(after)
        survivor.acquire()
        survivor.check()
        survivor.release()


# Real processes.

OWNER_SCRIPT = """
import sys, time
from easyckpt.memory.owner import OwnerLock
from easyckpt.storage.lease import Lease
from easyckpt.storage.local import LocalStorage
lock = OwnerLock(sys.argv[2])
assert lock.try_acquire()
storage = LocalStorage(sys.argv[1])
storage.makedirs("")
lease = Lease(storage, root_lock_path=sys.argv[2], incarnation="i", run="0123456789abcdef" * 2, timeout=60,
              is_free=OwnerLock.is_free)
lease.acquire()
print("owner", flush=True)
sys.stdin.read(1)
lease.renew()
"""


def start_owner(storage, lock, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", OWNER_SCRIPT, storage.root, lock],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_killed_process_is_succeeded_at_once(storage, tmp_path):
    lock = str(tmp_path / "lock")
    with start_owner(storage, lock) as owner:
        assert owner.stdout.readline() == "owner\n"
        clock = FakeClock({20: renew(storage, on_disk(storage))})
        said = []
        with pytest.raises(RootInUse, match=f"process {owner.pid} "):
            make(storage, clock=clock, is_free=OwnerLock.is_free).acquire(said.append)
        assert said  # alive: it was waited for
        owner.kill()
        owner.wait()
    clock = FakeClock()
    make(storage, clock=clock, is_free=OwnerLock.is_free).acquire()
    assert clock.now == 0


@pytest.mark.parametrize("place", sorted(n for n in failpoints.NAMES if n.startswith(("lease.acq", "lease.take"))))
def test_killed_while_acquiring(storage, tmp_path, lock_file, place):
    if "takeover" in place:
        here(storage, lock_file)
    lock = str(tmp_path / "lock")
    with start_owner(storage, lock, EASYCKPT_FAILPOINTS=f"{place}=kill") as owner:
        assert owner.wait() == -9
    clock = FakeClock()
    lease = make(storage, clock=clock, is_free=OwnerLock.is_free)
    lease.acquire()
    assert clock.now == 0
    lease.check()
    lease.release()
    assert not storage.exists(layout.LEASE)


@pytest.mark.parametrize("place", ["storage.replace.written@2", "storage.link.before"])
def test_what_a_kill_within_a_renewal_or_a_takeover_leaves_is_removed_by_the_next_owner(
    storage, tmp_path, lock_file, place
):
    if "link" in place:
        here(storage, lock_file)
    lock = str(tmp_path / "lock")
    with start_owner(storage, lock, EASYCKPT_FAILPOINTS=f"{place}=kill") as owner:
        if "replace" in place:
            assert owner.stdout.readline() == "owner\n"
            owner.stdin.write("x")
            owner.stdin.flush()
        assert owner.wait() == -9
    assert len(storage.listdir("")) == 2  # the lease, and half of another
    lease = make(storage, is_free=OwnerLock.is_free)
    lease.acquire()
    assert storage.listdir("") == [layout.LEASE]


def test_what_belongs_to_a_successor_of_this_owner_is_left(storage):
    lease = make(storage)
    lease.acquire()
    names = [lease_chain.successor_file(lease._record.token), layout.temp_file("latest", "a"), "lease.json.tmp"]
    for name in names:
        storage.replace(name, b"x")
    lease_chain.remove_leftovers(storage, lease._record.token)
    assert sorted(storage.listdir("")) == sorted([layout.LEASE, *names])
