"""The kill campaign: a seeded sample always, the whole by `make soak`, which writes its result beside itself."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.campaigns.kill import campaign

RESULT = Path(__file__).parent / "campaigns" / "results" / "kill.json"
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


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_whole_campaign(tmp_path):
    begun = time.monotonic()
    cases = [(1, False, 0), (2, False, 1), (4, False, 1), (1, True, 0), (2, True, 0), (4, True, 0)]
    done = []
    for number, (ranks, slow, under_torchrun) in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        kills = KILLS if not slow else KILLS // 2
        figures = campaign(directory, ranks, kills, SEED, slow=slow, torchrun_chains=under_torchrun)
        done.append((figures, kills))
        result = {
            "seed": SEED,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "seconds": round(time.monotonic() - begun),
            "cases": [figures.as_json() for figures, _ in done],
        }
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for figures, kills in done:
        assert_as_promised(figures, kills)
