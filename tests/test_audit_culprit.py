"""What decides an audit's verdict, and what is named: the first difference, in the notes, the steps, or the state."""

from __future__ import annotations

from typing import Any

import pytest

from easyckpt.cli.audit.culprit import culprit
from easyckpt.cli.audit.findings import Findings, Part, _compare_metrics, unrepeated_notes
from easyckpt.cli.audit.notes import Notes

LOADED = 4
STRANGER = "torch.Generator, the global noise of __main__"


def notes(moves: bool = True, **change: Any) -> list[Notes]:
    """Of a run that goes on from step 4 to 8; `change` holds from step 6 on; the stranger is drawn from at step 7."""
    told = {
        "generators": {"torch": "a"},
        "strangers": {STRANGER: "b"},
        "rates": {"o": [0.1]},
        "batches": {"t": [1, "c"]},
    }
    steps = {step: {"step": step, **told, **(change if step >= 6 else {})} for step in range(5, 9)}
    for step in (7, 8) if moves else ():
        steps[step]["strangers"] = {name: f"{digest} drawn" for name, digest in steps[step]["strangers"].items()}
    return [Notes(LOADED, "storage", 1, steps)]


def findings(mine: list[Notes] | None = None, **change: Any) -> Findings:
    values: dict[str, Any] = {
        "name": "storage",
        "loaded": LOADED,
        "tier": "storage",
        "steps": [6, 8],
        "unshared": [],
        "ended": (8, 8),
        "parts": {"model": Part("model")},
        "metrics": {},
        "notes": mine or notes(),
        "series": {},
    }
    return Findings(**{**values, **change})


def test_nothing_differs():
    assert culprit(findings(), notes()) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {"strangers": {STRANGER: "x"}},
            "a torch.Generator that is not part of the state (the global noise of __main__)",
        ),
        ({"generators": {"torch": "x"}}, "the global generator of torch"),
        ({"batches": {"t": [1, "x"]}}, "the batches of the loader 't' are others"),
        ({"rates": {"o": [0.2]}}, "the learning rate of 'o' is 0.2 where it was 0.1"),
    ],
)
def test_what_is_noted_differs_though_all_that_is_stored_is_equal(change, what):
    found = culprit(findings(notes(**change)), notes())
    assert found is not None
    assert found.what.startswith(what)
    assert found.step == 6


@pytest.mark.parametrize(
    ("change", "aside"),
    [
        ({"strangers": {STRANGER: "x"}}, STRANGER),
        ({"generators": {"torch": "x"}}, "torch"),
        ({"batches": {"t": [1, "x"]}}, "the batches of t"),
    ],
)
def test_what_straight_runs_do_not_share_decides_nothing(change, aside):
    assert unrepeated_notes(notes(**change), notes()) == [aside]
    assert culprit(findings(notes(**change)), notes(), unseeded=[aside]) is None


def test_a_generator_that_is_never_drawn_from_again_or_made_anew_at_each_use_is_no_loss():
    other = {"strangers": {STRANGER: "x"}}
    assert culprit(findings(notes(**other)), notes()) is not None
    unused = notes(moves=False)
    for note in unused[0].steps.values():
        note["strangers"] = {STRANGER: "x"}
    assert culprit(findings(unused), notes(moves=False)) is None
    anew, straight = notes(**other), notes()
    anew[0].steps[8]["strangers"] = straight[0].steps[8]["strangers"] = {STRANGER: "seeded"}
    assert culprit(findings(anew), straight) is None


def test_a_scheduler_that_counts_otherwise_is_a_loss_though_it_has_not_moved_yet():
    place = "torch.StepLR, the global sched of __main__"
    mine, straight = (notes(moves=False, strangers={place: state}) for state in ("0", "1"))
    found = culprit(findings(mine), straight)
    assert found is not None
    assert (
        found.what == "a torch.StepLR that is not part of the state (the global sched of __main__) is not where it was"
    )
    assert '"scheduler": scheduler' in found.advice


def test_the_rate_of_a_scheduler_that_is_in_the_state_is_not_blamed_on_handing_it_over():
    mine = notes(rates={"o": [0.2]}, schedulers=["sched"])
    found = culprit(findings(mine), notes())
    assert found is not None
    assert "the scheduler 'sched' is in the state" in found.advice
    assert 'progress["epoch"]' in found.advice


def test_what_a_pass_over_a_loader_draws_by_itself_is_taken_through_batches():
    place = "torch.Generator, a variable of the iterator RandomSampler.__iter__()"
    found = culprit(findings(notes(strangers={place: "x"})), notes(strangers={place: "y"}))
    assert found is not None
    assert "ckpt.batches" in found.advice


def test_the_component_that_differs_first_is_named():
    parts = {
        "model": Part("model", first_step=8, first_tensor="model.w"),
        "opt": Part("opt", first_step=6, first_tensor="opt.param_groups.0.weight_decay"),
    }
    found = culprit(findings(parts=parts), notes())
    assert found is not None
    assert "weight_decay" in found.what
    assert "batches" not in found.advice


@pytest.mark.parametrize(
    ("stranger", "named"),
    [
        ("random.Random, the global rng of sympy.core.random", False),
        ("random.Random, '_prng' of a dict", False),
        ("random.Random, the global rng of __main__", True),
        ("random.Random, the attribute _random of a OwnOrder", True),
        ("numpy.Generator, the global rng of some.library", True),
    ],
)
def test_what_a_library_seeds_for_itself_explains_no_difference_between_straight_runs(stranger, named):
    mine, theirs = notes(strangers={stranger: "x"}), notes(strangers={stranger: "y"})
    parts = {"model": Part("model", first_step=8, first_tensor="model.w")}
    found = culprit(findings(mine, parts=parts), theirs, resumed=False)
    assert found is not None
    assert ("not part of the state" in found.what) == named


def test_of_several_generators_at_one_place_those_that_are_left_from_before_are_nobodys_loss():
    straight = notes(strangers={STRANGER: "old", f"{STRANGER} (2)": "b"})
    assert culprit(findings(), straight) is None
    assert culprit(findings(notes(strangers={STRANGER: "x"})), straight) is not None


@pytest.mark.parametrize(
    ("ended", "unshared", "what"),
    [
        ((6, 8), [8], "it ends after step 6, and the straight run after step 8"),
        ((8, 6), [8], "it ends after step 8, and the straight run after step 6"),
        ((8, 8), [5, 7], "the runs have not both stored step 5, 7"),
    ],
)
def test_a_run_that_ends_elsewhere_or_stores_other_steps_is_not_exact(ended, unshared, what):
    found = culprit(findings(ended=ended, unshared=unshared), notes())
    assert found is not None
    assert found.what == what


def test_the_first_difference_decides_of_which_kind_it_may_be():
    late = {"ended": (8, 10), "unshared": [10]}
    found = culprit(findings(notes(rates={"o": [0.2]}), **late), notes())
    assert found is not None
    assert found.step == 6
    found = culprit(findings(parts={"model": Part("model", first_step=6, first_tensor="model.w")}, **late), notes())
    assert found is not None
    assert "model.w" in found.what


def test_what_only_one_of_the_runs_has_logged_differs_at_the_end_too():
    one = {5: {"loss": 1.0}, 6: {"loss": 2.0}}
    for ours, theirs in ((one, {5: {"loss": 1.0}}), ({5: {"loss": 1.0}}, one), ({}, one)):
        metric = _compare_metrics(ours, theirs, LOADED)["loss"]
        assert not metric.equal
    assert _compare_metrics(one, one, LOADED)["loss"].equal
    assert _compare_metrics({6: {"n": 10**400}}, {6: {"n": 1}}, LOADED)["n"].largest == float("inf")
