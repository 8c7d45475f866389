"""Ranks meet, agree and part through real stores; killed peers and dead predecessors are told apart from the living.

Races are tried with threads over a real TCPStore; what needs process groups and kills runs in real processes, for
which this file is also the program: ``python test_rendezvous.py SCENARIO RANK WORLD_SIZE INIT_METHOD``.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from easyckpt import opening
from easyckpt.distributed import rendezvous
from easyckpt.distributed.channel import StoreChannel
from easyckpt.distributed.ranks import Ranks, discover
from easyckpt.distributed.rendezvous import LocalChannel, StoreClient, connect, settle_locality
from easyckpt.distributed.store import base_store, store_of
from easyckpt.errors import PeerError, PeerFailed, PeerTimeout, UsageError
from easyckpt.storage import process
from tests.support.zygote import fork_program

LIMIT = 120.0
#: Longer than the time between two signs of life.
SHORT = 1.0


# Threads over one store


def tcp_store():
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture
def job(monkeypatch):
    """together(work, world_size): runs work(Ranks) for every rank in a thread each; the store is `.store`."""
    store = tcp_store()
    monkeypatch.setattr(rendezvous, "store_of", lambda group: store)
    monkeypatch.setattr(rendezvous, "_place_of", lambda group, purpose: f"easyckpt/meet/{purpose}/")

    def together(work, world_size=3):
        with ThreadPoolExecutor(world_size) as pool:
            futures = [pool.submit(work, Ranks(rank, world_size, rank, world_size)) for rank in range(world_size)]
            return [future.exception(LIMIT) or future.result() for future in futures]

    together.store = store
    return together


def test_exchange_gives_every_value_to_every_rank_and_keys_stay_few(job):
    def work(ranks):
        channel, _mailbox = connect(ranks, "a", LIMIT)
        results = []
        for number in range(200):
            if number % 7 == ranks.rank:
                time.sleep(0.005)  # each rank is the late one now and then
            results.append(channel.exchange("x", [ranks.rank, number], LIMIT))
            if number == 3:
                few.append(job.store.num_keys())
        many.append(job.store.num_keys())
        return results

    few, many = [], []
    expected = [[[rank, number] for rank in range(3)] for number in range(200)]
    assert job(work) == [expected] * 3
    # Two exchange keys a rank at most; the rest was there from the beginning.
    assert max(many) <= min(few) + 3
    assert max(many) <= 3 * 2 + 3 + 1 + 1 + 2 * 2 + 1


def test_values_are_json_and_broadcast_is_rank_0s(job):
    value = {"a": (1, None), "b": float("inf"), "ä": "\ud800"}

    def work(ranks):
        channel, _mailbox = connect(ranks, "a", LIMIT)
        return channel.broadcast("b", value if ranks.rank == 0 else "ignored", LIMIT)

    expected = {"a": [1, None], "b": float("inf"), "ä": "\ud800"}
    assert job(work) == [expected] * 3
    assert LocalChannel().exchange("x", value, 1) == [expected]
    assert LocalChannel().broadcast("x", value, 1) == expected


def test_many_checkpointers_in_a_row_never_mix(job):
    """Ranks run ahead of each other from meeting to meeting, as slow and fast ones do."""

    def work(ranks):
        dice = random.Random(ranks.rank)
        seen = []
        for number in range(25):
            channel, mailbox = connect(ranks, "a", LIMIT)
            if dice.random() < 0.5:
                time.sleep(dice.random() / 100)
            mailbox.post([number, ranks.rank])
            if number % 2:
                seen.append(channel.exchange("x", number, LIMIT))
                assert mailbox.posts() == [[number, rank] for rank in range(3)]
                channel.exchange("end", None, LIMIT)
            channel.close()
            mailbox.close()
        return seen

    assert job(work) == [[[number] * 3 for number in range(1, 25, 2)]] * 3


def test_two_at_once_are_apart_and_leave_nothing_behind(job):
    def work(ranks):
        channels = [connect(ranks, purpose, LIMIT)[0] for purpose in ("a", "b")]
        assert channels[1].exchange("x", 1, LIMIT) == [1] * 3
        assert channels[0].exchange("x", 2, LIMIT) == [2] * 3
        for channel in channels:
            channel.close(linger=LIMIT if ranks.rank == 0 else 0.0)
            with pytest.raises(PeerError, match="closed"):
                channel.exchange("x", 3, LIMIT)
        return True

    assert job(work) == [True] * 3
    # What stays is fixed: the keys of the two meetings, and the one that always exists.
    assert job.store.num_keys() == 2 * (2 + 2 + 1) + 1


def test_rank_0_lingers_until_the_others_have_left(job):
    order = []

    def work(ranks):
        channel, _ = connect(ranks, "a", LIMIT)
        if ranks.rank:
            time.sleep(0.3)
            order.append(ranks.rank)
        channel.close(linger=LIMIT)
        order.append("left" if ranks.rank else "rank 0 left")

    job(work)
    assert order.index("rank 0 left") > max(order.index(1), order.index(2))


def test_dead_predecessors_are_not_listened_to_and_swept_away(job, monkeypatch):
    """A group dies in the middle of everything, its keys stay, another one of the same names comes."""
    monkeypatch.setattr(rendezvous, "_own_prefixes", set())
    sizes = []
    for generation in range(3):
        through = threading.Barrier(3)

        def work(ranks, generation=generation, through=through):
            if ranks.rank == 0:
                time.sleep(0.05)  # the others say hello to what the dead left behind
            channel, mailbox = connect(ranks, "a", LIMIT)
            assert mailbox.board() is None
            assert mailbox.posts()[ranks.rank] is None
            assert channel.exchange("x", generation, LIMIT) == [generation] * 3
            channel.exchange("y", generation, LIMIT)
            through.wait(LIMIT)  # a failure is heard before what else is there
            mailbox.post(generation)
            if ranks.rank == 0:
                mailbox.publish(generation)
            elif ranks.rank == 1:
                channel.fail("died")
            return True

        assert job(work) == [True] * 3
        sizes.append(job.store.num_keys())
        rendezvous._own_prefixes.clear()  # as in a new process
    assert sizes[1] == sizes[2]
    assert sizes[2] <= sizes[0] + 1


def test_a_hello_of_the_dead_alone_does_not_complete_a_meeting(job):
    job.store.set("easyckpt/meet/a/hello/1", "dead")
    job.store.set("easyckpt/meet/a/ack/1", "easyckpt/dead/ dead")
    job.store.set("easyckpt/meet/a/welcome", json.dumps({"prefix": "easyckpt/dead/", "tokens": {"1": "dead"}}))
    with pytest.raises(PeerTimeout, match=r"^rank 1 did not come to 'the meeting of all ranks' within 0\.2 s"):
        connect(Ranks(0, 2, 0, 2), "a", 0.2)
    with pytest.raises(PeerTimeout, match=r"^rank 0 did not come"):
        connect(Ranks(1, 2, 1, 2), "a", 0.2)


def test_a_missing_rank_is_named_and_all_learn_of_it(job):
    ready = threading.Barrier(3)

    def work(ranks):
        channel, _mailbox = connect(ranks, "a", LIMIT)
        ready.wait(LIMIT)
        if ranks.rank == 2:
            ready.wait(LIMIT)  # comes after the others have given up
        try:
            with pytest.raises(PeerTimeout, match=r"rank 2 did not come to 'vote' within 0\.3 s"):
                channel.exchange("vote", 1, 0.3 if ranks.rank < 2 else LIMIT)
        finally:
            if ranks.rank != 2:
                ready.wait(LIMIT)
        start = time.monotonic()
        with pytest.raises(PeerTimeout, match="not tried"):
            channel.exchange("next", 1, LIMIT)
        return time.monotonic() - start < 1

    assert job(work) == [True] * 3


def test_a_rank_that_gives_up_is_heard_at_once(job):
    def work(ranks):
        channel, _mailbox = connect(ranks, "a", LIMIT)
        if ranks.rank == 1:
            channel.fail("model is not a module")
        else:
            with pytest.raises(PeerFailed, match="rank 1 gave up: model is not a module"):
                channel.exchange("x", 1, LIMIT)
        with pytest.raises(PeerFailed):
            channel.exchange("x", 1, LIMIT)
        return True

    assert job(work) == [True] * 3


def test_ranks_out_of_step_are_told(job):
    def work(ranks):
        channel, _mailbox = connect(ranks, "a", LIMIT)
        with pytest.raises(PeerError, match=r"out of step.*'load'|out of step.*'save'"):
            channel.exchange("load" if ranks.rank == 1 else "save", 1, LIMIT)
        return True

    assert job(work, 2) == [True] * 2


def test_a_rank_that_gets_on_is_waited_for_longer_than_the_timeout(job):
    def work(ranks):
        channel, _mailbox = connect(ranks, "a", LIMIT)
        begun = time.monotonic()
        while ranks.rank == 1 and time.monotonic() - begun < 4 * SHORT:
            channel.busy()
            time.sleep(0.05)
        answers = channel.exchange("x", ranks.rank, SHORT)
        return answers, time.monotonic() - begun >= 4 * SHORT

    assert job(work) == [([0, 1, 2], True)] * 3


def test_a_rank_that_got_on_and_fell_silent_is_waited_for_no_longer(job):
    gone = threading.Event()

    def work(ranks):
        channel, _mailbox = connect(ranks, "a", LIMIT)
        channel.busy()  # what it said before an earlier agreement is no sign of life for the next one
        channel.exchange("before", None, LIMIT)
        if ranks.rank == 1:
            channel.busy()
            gone.wait(LIMIT)
            return
        try:
            channel.exchange("x", ranks.rank, SHORT)
        finally:
            gone.set()
        return

    results = job(work)
    assert [type(result) for result in results] == [PeerTimeout, type(None), PeerTimeout]
    assert "rank 1" in str(results[0])


def test_an_interrupted_exchange_breaks_the_channel(monkeypatch):
    channel = StoreChannel(StoreClient(dist.HashStore(), LIMIT, 2), "p/", 0, 2)

    def interrupt(keys, deadline=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(channel._client, "check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        channel.exchange("x", 1, LIMIT)
    with pytest.raises(PeerError, match="interrupted"):
        channel.exchange("x", 1, LIMIT)


def test_an_interrupted_exchange_is_told_to_those_that_wait():
    store = dist.HashStore()
    one, other = (StoreChannel(StoreClient(store, LIMIT, 2), "p/", rank, 2) for rank in (0, 1))
    check, asked = one._client.check, []

    def interrupt(keys, deadline=None):
        asked.append(keys)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return check(keys, deadline)

    one._client.check = interrupt
    with pytest.raises(KeyboardInterrupt):
        one.exchange("x", 1, LIMIT)
    with pytest.raises(PeerFailed, match="interrupted on rank 0"):
        other.exchange("x", 1, LIMIT)


def test_locality_is_counted_by_what_is_shared(job):
    def work(ranks):
        channel, _mailbox = connect(ranks, "a", LIMIT)
        settled = settle_locality(ranks, channel, "node b" if ranks.rank == 1 else "node a", LIMIT)
        return settled.local_rank, settled.local_world_size, settled.neighbours

    assert job(work) == [(0, 2, (2,)), (0, 1, ()), (1, 2, (0,))]


def test_hosts_that_were_made_alike_are_told_apart_by_their_boot(memory_dir, monkeypatch):
    """Machines of one image have one name, and the same device and inode numbers for /dev/shm."""
    nodes = []
    for boot in ("one", "two", "one", None):

        def read_boot(path, boot=boot, **_):
            assert path == "/proc/sys/kernel/random/boot_id"
            if boot is None:
                raise PermissionError(path)
            return io.StringIO(f"{boot}\n")

        monkeypatch.setattr(process, "open", read_boot, raising=False)
        nodes.append(opening._node(str(memory_dir)))
    assert nodes[0] == nodes[2]
    assert len({*nodes}) == 3
    assert all(node.startswith(f"{socket.gethostname()}/") for node in nodes)


def test_a_single_process_meets_nobody():
    channel, mailbox = connect(Ranks(0, 1, 0, 1), "a", 1.0)
    assert channel.exchange("x", 5, 1.0) == [5]
    assert mailbox.posts() == [None]
    channel.fail("x")
    channel.close(linger=5.0)
    mailbox.close()


# Real processes


def say(**facts):
    print(json.dumps(facts), flush=True)


def full(ranks):
    """Everything in one life: two groups, a destroyed process group, goodbye."""
    subgroup = dist.new_group([0, 2])
    channel, mailbox = connect(ranks, "a", LIMIT)
    store = base_store(store_of(dist.group.WORLD))
    if ranks.rank != 1:
        inner = discover(subgroup)
        assert inner.world_size == 2
        small, _ = connect(inner, "a", LIMIT)
        assert small.exchange("x", ranks.rank, LIMIT) == [0, 2]
        small.close(LIMIT)
    channel.exchange("quiet", None, LIMIT)
    channel.exchange("quiet", None, LIMIT)
    keys = store.num_keys()
    channel.exchange("quiet", None, LIMIT)
    for number in range(100):
        assert channel.exchange("x", number + ranks.rank, LIMIT) == [number, number + 1, number + 2]
        mailbox.post(number)
    channel.exchange("quiet", None, LIMIT)
    assert store.num_keys() <= keys + 3, (store.num_keys(), keys)
    channel.exchange("quiet", None, LIMIT)
    del store
    dist.destroy_process_group()
    with pytest.raises(UsageError):
        discover(None, {"WORLD_SIZE": "3"})
    assert channel.exchange("after", ranks.rank, LIMIT) == [0, 1, 2]
    assert mailbox.posts() == [99] * 3
    channel.exchange("end", None, LIMIT)
    if ranks.rank == 0:
        channel.close(LIMIT)
        mailbox.close()
        say(done=True)
        return
    if ranks.rank == 1:
        channel.close()
        say(done=True)
        return
    # Rank 0 does not leave before this rank does, since it hosts the store.
    time.sleep(0.5)
    assert mailbox.posts()[1] == 99
    channel.close()
    say(done=True)


def killed(ranks):
    """Rank 2 dies, then rank 0, which hosts the store."""
    channel, mailbox = connect(ranks, "a", LIMIT)
    spare, _ = connect(ranks, "b", LIMIT)
    channel.exchange("x", None, LIMIT)
    if ranks.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank 2 did not come to 'vote' within 4 s"):
        channel.exchange("vote", None, 4.0)
    assert time.monotonic() - start < 20
    mailbox.post("over")
    if ranks.rank == 0:
        while mailbox.posts()[1] != "over":
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError, match="gone or does not answer"):
        spare.exchange("x", None, LIMIT)
    with pytest.raises(PeerError, match="gone or does not answer"):
        mailbox.board()
    spare.close(LIMIT)
    say(done=True)


def plain(ranks):
    """The short way, for other kinds of store."""
    channel, mailbox = connect(ranks, "a", LIMIT)
    dist.destroy_process_group()
    for number in range(30):
        assert channel.exchange("x", number, LIMIT) == [number] * ranks.world_size
    mailbox.post(1)
    channel.exchange("x", None, LIMIT)
    assert mailbox.posts() == [1] * ranks.world_size
    channel.close(LIMIT)
    mailbox.close()
    say(done=True)


def restarted(ranks):
    """Under torchrun: the first life ends in a kill with everything open, the second must not notice."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    channel, mailbox = connect(ranks, "a", LIMIT)
    assert mailbox.board() is None
    assert channel.exchange("life", life, LIMIT) == [life] * 2
    mailbox.post(life)
    if ranks.rank == 0:
        mailbox.publish(life)
    channel.exchange("x", None, LIMIT)
    if life == 0 and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if life == 0:
        channel.exchange("y", None, LIMIT)  # ends with the kill by torchrun
    channel.close(LIMIT)
    say(done=True, life=life, agent=os.environ["TORCHELASTIC_USE_AGENT_STORE"])


QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def run(directory, scenario, world_size, init_method):
    """Start all ranks; returns (exit code, facts that it said, stderr) of each."""
    program = f"import runpy\nrunpy.run_path({__file__!r}, run_name='__main__')"
    children = [
        fork_program(program, scenario, rank, world_size, init_method, directory=directory, **QUIET)
        for rank in range(world_size)
    ]
    results = []
    for child in children:
        out, err = child.communicate(timeout=2 * LIMIT)
        results.append((child.returncode, [json.loads(line) for line in out.splitlines()], err))
    return results


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


DONE = [{"done": True}]


def test_processes_through_a_whole_life(tmp_path):
    for code, facts, err in run(tmp_path, "full", 3, f"tcp://127.0.0.1:{free_port()}"):
        assert (code, facts) == (0, DONE), err


def test_killed_processes_are_named_and_a_lost_store_is_clear(tmp_path):
    zero, one, two = run(tmp_path, "killed", 3, f"tcp://127.0.0.1:{free_port()}")
    assert zero[:2] == (-signal.SIGKILL, []), zero
    assert one[:2] == (0, DONE), one
    assert two[:2] == (-signal.SIGKILL, []), two


def test_processes_over_a_file_store(tmp_path):
    for code, facts, err in run(tmp_path, "plain", 2, f"file://{tmp_path}/store"):
        assert (code, facts) == (0, DONE), err


def test_a_restart_by_torchrun_does_not_see_the_killed_one():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    result = subprocess.run(
        [*command, "--monitor-interval=0.1", __file__, "restarted"],
        check=False,
        env={**os.environ, **QUIET, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    assert result.returncode == 0, result.stderr
    facts = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert facts == [{"done": True, "life": 1, "agent": "True"}] * 2


def main():
    scenario, *place = sys.argv[1:]
    if place:
        rank, world_size, init_method = place
        dist.init_process_group("gloo", init_method, rank=int(rank), world_size=int(world_size))
    else:
        # torchrun keeps one store over all restarts, in which gloo by itself (torch 2.13) finds the killed ranks'
        # addresses. A prefix hides them from gloo; easyckpt looks below it.
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    globals()[scenario](discover())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
