"""The benchmark of the Hugging Face Trainer compares within a round, and says what was missed."""

from __future__ import annotations

import pytest

from benchmarks import hf_trainer


def figures(speed, blocked=(), steady=8.0, until=20.0):
    return {
        "parameters": 1, "state_bytes": 12, "until_last": until * speed, "whole": (until + 1) * speed,
        "steady": [steady * speed] * 3, "beside": [8.0 * speed] * 3,
        "blocked": [seconds * speed for seconds in blocked], "between": [0.004], "first": 0.1,
        "steps": [speed] * 11, "kept": [],
    }  # fmt: skip


def a_round(speed, ours=0.1, until=18.0, memory=8.04):
    return {
        "stock": figures(speed, [4.0, 5.0]),
        "easyckpt": figures(speed, [ours, ours], until=until),
        "memmove": figures(speed),
        "memory": figures(speed, steady=memory),
        "turns": figures(speed, steady=memory),
    }


def judged(**worse):
    rounds = [a_round(speed, **worse) for speed in (1.0, 3.0, 1.1)]  # the machine was busy in the second
    summaries = {name: hf_trainer.summarised(rounds, name) for name in rounds[0]}
    reached = hf_trainer.goals(summaries)
    text = hf_trainer.question(rounds, {"DLRover": "ValueError: no"}, reached)
    assert "**DLRover** does not run here: `ValueError: no`" in text
    assert len({len(hf_trainer.row(name, one)) for name, one in summaries.items()} | {len(hf_trainer.HEADER)}) == 1
    return {key: goal["met"] for key, goal in reached.items()}


def test_goals_that_were_reached():
    assert judged() == {"blocked": True, "until_last": True, "steady": True}


@pytest.mark.parametrize(
    ("missed", "worse"), [("blocked", {"ours": 0.3}), ("until_last", {"until": 20.1}), ("steady", {"memory": 8.1})]
)
def test_goals_that_were_missed(missed, worse):
    assert [key for key, met in judged(**worse).items() if not met] == [missed]
