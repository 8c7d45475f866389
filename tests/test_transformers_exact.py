"""The Hugging Face Trainer, wrapped: a killed and resumed training is the straight one to the bit, whatever it trains.

`trainers/scenarios/` has the table. Each training is killed by SIGKILL and resumed from what that leaves, once with
its memory and once without. CI runs a sample with the newest transformers 4 and 5, `make soak` the whole table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.launch import VERSIONS, has
from tests.trainers.matrix import TIERS, Record, Resumed, Trial, differences, kill_and_resume, lose_snapshots
from tests.trainers.scenarios import TABLE, Scenario

#: One of each kind of difficulty.
SAMPLE = ("noise_ga2", "group_len_epochs", "noise_w2_pers", "iter_multi_epoch", "lora", "plain_tied")
SAMPLE += ("log4", "eval_epoch_killed", "early", "best", "never_saved", "ddp_mlm", "counting", "copied_loop")
FRESH = ("base", "noise_w2", "hf_iter_multi", "lora", "ddp_mlm")
#: How far behind what has been finished a restart may be, by the number of ranks.
ALLOWED = {1: 1, 2: 2}


def goes_on_exactly(trial: Trial, straight: list[Record], tiers: tuple[str, ...] = TIERS) -> None:
    seen = []
    for resumed in kill_and_resume(trial, tiers):
        assert differences(straight, resumed.records) == [], f"from {resumed.tier}, at step {resumed.began}"
        assert set(resumed.began) <= promised(trial.scenario, resumed), resumed.tier
        assert len(set(resumed.began)) == 1
        seen.append(resumed.tier)
    assert seen == [tier for tier in tiers if tier == "memory" or trial.scenario.saved is not None]


def promised(scenario: Scenario, resumed: Resumed) -> set[int]:
    """The steps from which a killed training may go on."""
    if resumed.tier == "storage":
        return {scenario.saved or 0}
    return set(range(scenario.until - ALLOWED[scenario.ranks], scenario.until + 1))


def is_exact(name: str, version: str, directory: Path) -> None:
    trial = Trial(TABLE[name], version, directory)
    straight = trial.straight()
    assert {record["steps"] for record in straight} == {trial.scenario.steps}
    if not trial.scenario.unlike_stock:
        assert differences(trial.straight("stock"), straight) == [], "wrapped against stock"
    goes_on_exactly(trial, straight)


#: Each of the sample with one version, turn by turn, and these with both.
BOTH = ("iter_multi_epoch", "eval_epoch_killed", "ddp_mlm")
SAMPLED = [(name, VERSIONS[number % 2]) for number, name in enumerate(SAMPLE)]
SAMPLED += [(name, version) for name in BOTH for version in VERSIONS if (name, version) not in SAMPLED]


@pytest.mark.parametrize(("name", "version"), SAMPLED)
def test_a_sample_of_the_table(name, version, tmp_path):
    is_exact(name, version, tmp_path)


@pytest.mark.parametrize("version", [pytest.param("4", marks=pytest.mark.soak), "5"])
def test_in_new_interpreters(version, tmp_path):
    is_exact_in_new_interpreters("mlm", version, tmp_path, ("memory",))


def is_exact_in_new_interpreters(name: str, version: str, directory: Path, tiers: tuple[str, ...] = TIERS) -> None:
    """And so a fork of a process that has run nothing is as good as one: the straight training is one here."""
    straight = Trial(TABLE[name], version, directory).straight()
    goes_on_exactly(Trial(TABLE[name], version, directory, fresh=True), straight, tiers)


@pytest.mark.parametrize("version", VERSIONS)
def test_stopped_in_order(version, tmp_path):
    trial = Trial(TABLE["mlm"], version, tmp_path)
    resumed = trial.resumed(trial.stopped(), "resumed")
    assert differences(trial.straight(), resumed) == []
    assert resumed[0]["began"] in {10, 12}  # the newest that was saved, or that there was


@pytest.mark.parametrize("version", VERSIONS)
def test_killed_again_and_again(version, tmp_path):
    """Each start goes on from what the one before has left, whichever tier it is in."""
    trial = Trial(TABLE["mlm_ga2"], version, tmp_path)
    out = tmp_path / "run"
    trial.kill(out, 4)
    trial.kill(out, 7, "--resume")
    trial.kill(out, 12, "--resume", "--committed", 10)
    lose_snapshots()
    trial.kill(out, 11, "--resume")
    trial.kill(out, 17, "--resume")
    resumed = trial.resumed(out, "resumed")
    assert differences(trial.straight(), resumed) == []
    assert resumed[0]["began"] in {16, 17}


@pytest.mark.parametrize("name", ["mlm", "iter_multi", "log4"])
def test_the_stock_trainer_is_not_exact(name, tmp_path):
    """The traps are real: else the tests above could not fail."""
    trial = Trial(TABLE[name], VERSIONS[-1], tmp_path, mode="stock")
    straight = trial.straight()
    (resumed,) = kill_and_resume(trial, ("storage",))
    assert differences(straight, resumed.records)


#: The Trainer's own saving at SIGTERM comes before a step, between its batches, and at its end.
MOMENTS = ("on_step_end", "on_substep_end", "on_optimizer_step")


@pytest.mark.soak
@pytest.mark.parametrize("options", [{}, {"signals": []}, {"signals": [], "save_mem_interval": 5}], ids=str)
@pytest.mark.parametrize("moment", MOMENTS)
def test_saved_just_in_time(moment, options, tmp_path):
    trial = Trial(TABLE["just_in_time_ga2"], "5", tmp_path)
    out = trial.signalled(moment, options)
    assert [path.name for path in out.glob("checkpoint-*") if not any(path.iterdir())] == []
    lose_snapshots()
    resumed = trial.resumed(out, "resumed")
    assert differences(trial.straight(), resumed) == []
    assert resumed[0]["began"] in {12, 13}


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", TABLE)
def test_the_whole_table(name, version, tmp_path, campaign_part):
    needs = TABLE[name].needs
    if needs and not has(version, needs):
        pytest.skip(f"{needs} is not installed beside transformers {version}: see requirements/{needs}-{version}.txt")
    is_exact(name, version, tmp_path)
    tests = len(TABLE) * len(VERSIONS)
    campaign_part("transformers_exact", seed=None, tests=tests, cases=[f"{name} on transformers {version}"])


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FRESH)
def test_the_table_in_new_interpreters(name, version, tmp_path):
    """Ranks are under torchrun here."""
    is_exact_in_new_interpreters(name, version, tmp_path)
