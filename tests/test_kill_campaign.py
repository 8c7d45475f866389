"""The kill campaign: a seeded sample always, the whole by `make soak`, which keeps its result."""

from __future__ import annotations

import os

import pytest

from tests.campaigns.kill import campaign

SEED = int(os.environ.get("KILL_SEED", "20261129"))
KILLS = 50


def assert_as_promised(figures, kills):
    assert figures.faults == []
    assert figures.kills == kills
    assert figures.chains_equal == figures.chains
    assert sum(figures.behind.values()) > 0  # else nothing was compared


@pytest.mark.parametrize(("ranks", "kills", "slow"), [(1, 3, False), (1, 2, True), (2, 3, False), (4, 2, False)])
def test_a_sample_of_the_campaign(tmp_path, ranks, kills, slow):
    assert_as_promised(campaign(tmp_path, ranks, kills, SEED, slow=slow), kills)


CASES = [(1, False, 0), (2, False, 1), (4, False, 1), (1, True, 0), (2, True, 0), (4, True, 0)]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "slow", "under_torchrun"), CASES)
def test_the_whole_campaign(tmp_path, ranks, slow, under_torchrun, campaign_part):
    kills = KILLS if not slow else KILLS // 2
    figures = campaign(tmp_path, ranks, kills, SEED, slow=slow, torchrun_chains=under_torchrun)
    assert_as_promised(figures, kills)
    campaign_part("kill", seed=SEED, tests=len(CASES), kills=kills, cases=[figures.as_json()])
