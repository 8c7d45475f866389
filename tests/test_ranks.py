"""Ranks: found from the process group and the environment; what cannot be right is refused."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from easyckpt.distributed.ranks import Ranks, discover
from easyckpt.errors import UsageError


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_single_process_needs_no_group():
    assert discover(None, {}) == Ranks(0, 1, 0, 1)
    assert discover(None, {"WORLD_SIZE": "1"}).alone
    assert discover(None, {"WORLD_SIZE": ""}).alone


def test_world_size_without_a_group_is_refused():
    with pytest.raises(UsageError, match=r"WORLD_SIZE is 4.*init_process_group"):
        discover(None, {"WORLD_SIZE": "4", "RANK": "0"})


def test_the_group_wins_over_the_environment(group):
    ranks = discover(None, {"WORLD_SIZE": "4", "RANK": "3"})
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.group is group


def test_local_ranks_come_from_torchrun_or_are_taken_to_share_the_node(group):
    torchrun = discover(None, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"})
    assert (torchrun.local_rank, torchrun.local_world_size) == (2, 8)
    for environ in ({}, {"LOCAL_RANK": "2"}, {"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "8"}, {"LOCAL_RANK": "8"}):
        ranks = discover(None, environ)
        assert (ranks.local_rank, ranks.local_world_size) == (0, 1)
    assert discover(dist.new_group([0]), {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"}).local_world_size == 1


def test_a_group_without_this_process_is_refused(group):
    with pytest.raises(UsageError, match="not a member"):
        discover(dist.GroupMember.NON_GROUP_MEMBER, {})


def test_a_destroyed_group_is_refused(group):
    dist.destroy_process_group()
    with pytest.raises(UsageError, match="not initialised"):
        discover(group, {})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(UsageError, match="not a live process group"):
        discover(group, {})
