"""Which checkpoints stay and why, whatever the numbers say: examples, and a naive model of the same rules."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import RUN, line, root_record

from easyckpt.catalog import Catalog, Entry
from easyckpt.config import CheckpointConfig
from easyckpt.format.manifest import Manifest
from easyckpt.saving.policy import Policy, decide, judge

NAN, INF = math.nan, math.inf


def entry(step, kind="committed", problem=None, *, timeline="main", aside_for=None, **metrics):
    """`aside_for` is the timeline in the name of a stale one."""
    manifest = Manifest(
        run=RUN, timeline=timeline, step=step, world_size=1, attempt="t", created=1.0, files={}, metrics=metrics
    )
    name = f"{kind}{step}{aside_for or ''}"
    return Entry(step=step, name=name, kind=kind, manifest=manifest, problem=problem, timeline=aside_for or timeline)


def going(entries, *, pinned=(), held=(), **policy):
    verdicts = judge(entries, Policy(**{"newest": 1, **policy}), pinned=pinned, held=held)
    return [verdict.entry.step for verdict in verdicts if verdict.goes]


def reasons(verdicts):
    return {verdict.entry.step: verdict.reasons for verdict in verdicts}


def test_the_newest_by_step_number_stay_whatever_their_order():
    assert going([entry(30), entry(9), entry(100), entry(20)], newest=2) == [9, 20]


def test_none_keeps_all():
    assert going([entry(1), entry(2)], newest=None) == []


def test_pinned_steps_stay_and_do_not_count():
    assert going([entry(1), entry(2), entry(3), entry(4)], newest=2, pinned={2, 4}) == []
    assert going([entry(1), entry(2), entry(3), entry(4)], newest=1, pinned={4}) == [1, 2]


def test_of_those_that_were_chosen_the_last_that_is_there_stays_and_counts():
    there = [entry(1), entry(2), entry(3), entry(4)]
    assert going(there, newest=2, chosen=(1,)) == [2, 3]
    assert going(there, newest=2, chosen=(1, 2)) == [1, 3]
    assert going(there, newest=2, chosen=(1, 5)) == [2, 3]
    assert going(there, newest=1, chosen=(1,)) == [2, 3]


def test_held_steps_stay_as_long_as_they_are_held():
    assert going([entry(1), entry(2), entry(3)], newest=1, held={1}) == [2]


def test_only_valid_committed_ones_count():
    mixed = [entry(1), entry(2), entry(3, problem="torn"), entry(4, "stale"), entry(5, "temporary"), entry(6, "trash")]
    assert going(mixed, newest=2) == []
    assert going(mixed, newest=1) == [1]


def test_every_kth_step_stays_for_ever_beside_the_newest():
    assert going([entry(step) for step in (0, 5, 10, 15, 20, 25, 30, 35)], newest=2, every=10) == [5, 15, 25]


def test_the_best_stay_by_the_lowest_or_the_highest_metric():
    entries = [entry(step, loss=loss) for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5), (5, 4.0))]
    assert going(entries, best=2, metric="loss") == [1, 4]
    assert going(entries, best=2, metric="loss", mode="max") == [1, 2, 3]  # 5 is the newest as well


def test_of_equal_metrics_the_earlier_step_is_better():
    entries = [entry(step, loss=1.0) for step in (1, 2, 3)]
    assert going(entries, best=1, metric="loss") == [2]
    assert going(entries, best=1, metric="loss", mode="max") == [2]


@pytest.mark.parametrize("value", [NAN, INF, -INF, "0.1", None, [0.0], 1j])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_no_finite_number_is_never_best(value, mode):
    entries = [entry(1, loss=value), entry(2), entry(3, loss=0.5), entry(4, loss=0.4), entry(5)]
    assert going(entries, best=3, metric="loss", mode=mode) == [1, 2]


def test_numbers_too_large_for_a_float_are_compared_all_the_same():
    entries = [entry(1, n=10**400), entry(2, n=2.5), entry(3, n=-(10**400)), entry(4)]
    assert going(entries, best=1, metric="n") == [1, 2]
    assert going(entries, best=1, metric="n", mode="max") == [2, 3]


def test_a_pinned_checkpoint_takes_no_place_among_the_best():
    entries = [entry(1, loss=0.1), entry(2, loss=0.2), entry(3, loss=0.3), entry(4, loss=9.0)]
    assert going(entries, best=1, metric="loss", pinned={1}) == [3]


def test_one_that_is_kept_twice_counts_for_both_rules():
    entries = [entry(1, loss=4.0), entry(2, loss=0.3), entry(3, loss=0.2), entry(4, loss=0.1)]
    assert going(entries, newest=2, best=2, metric="loss") == [1, 2]


def test_each_verdict_says_why():
    entries = [entry(10, loss=0.1), entry(15, loss=0.2), entry(17), entry(18), entry(20)]
    policy = Policy(newest=1, every=10, best=2, metric="loss")
    assert reasons(judge(entries, policy, pinned={17}, held={18})) == {
        10: ("every", "best"), 15: ("best",), 17: ("pinned",), 18: ("held",), 20: ("newest", "every"),
    }  # fmt: skip
    assert reasons(judge([entry(1), entry(2)], Policy(newest=1))) == {1: ("excess",), 2: ("newest",)}


def test_the_settings_of_a_job_are_its_policy():
    config = CheckpointConfig(max_ckpt_num=3, keep_every=100, keep_best=2, best_metric="acc", best_mode="max")
    assert Policy.of(config) == Policy(newest=3, every=100, best=2, metric="acc", mode="max")
    assert Policy.of(CheckpointConfig()) == Policy(newest=5)


# With other lines of training, and what was set aside.


def verdicts_of(entries, *lines, **settings):
    found = Catalog(sorted(entries, key=lambda e: (e.step, e.name)))
    policy = settings.pop("policy", Policy(newest=1))
    return reasons(decide(root_record(*lines), found, policy, **settings)), [
        v.entry.name for v in decide(root_record(*lines), found, policy, **settings) if v.goes
    ]


def test_what_is_damaged_or_of_another_line_stays_and_counts_for_nothing():
    entries = [entry(10), entry(15, timeline="next"), entry(20), entry(30, problem="torn")]
    why, gone = verdicts_of(entries, line(), line("next", "main", 10))
    assert why == {10: ("excess",), 15: ("newest",), 20: ("other line",), 30: ("not valid",)}
    assert gone == ["committed10"]


@pytest.mark.parametrize("explicit", [True, False])
def test_what_was_set_aside_by_name_goes_only_when_that_is_asked_for(explicit):
    entries = [entry(10), entry(15, timeline="next"), entry(30, "stale", aside_for="next")]
    lines = line(), line("next", "main", 10, explicit)
    keeps = Policy(newest=5)
    assert verdicts_of(entries, *lines, policy=keeps)[1] == ([] if explicit else ["stale30next"])
    assert verdicts_of(entries, *lines, policy=keeps, stale=True)[1] == ["stale30next"]


@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_a_pin_also_holds_for_a_step_that_was_set_aside(stale, explicit):
    entries = [entry(15, timeline="next"), entry(30, "stale", aside_for="next")]
    why, gone = verdicts_of(entries, line(), line("next", "main", 10, explicit), stale=stale, pinned={30})
    assert (why[30], gone) == (("pinned",), [])


def test_a_step_that_is_held_under_its_number_holds_nothing_that_was_set_aside():
    """The step that was just committed is held; what a fallback had set aside under its number goes."""
    entries = [entry(30, timeline="next"), entry(30, "stale", aside_for="next")]
    _, gone = verdicts_of(entries, line(), line("next", "main", 10), held={30})
    assert gone == ["stale30next"]


# Against a naive model.

METRIC = st.one_of(
    st.none(), st.floats(), st.integers(-3, 3), st.sampled_from([0.5, 0.5, NAN, INF, "text", 10**400, True])
)
ENTRY = st.tuples(
    st.integers(0, 40),
    st.sampled_from(["committed", "committed", "committed", "stale", "temporary", "trash"]),
    st.sampled_from([None, None, None, "torn"]),
    METRIC,
)


def naive(items, newest, every, best, mode, pinned, held):
    """Steps that stay of the valid committed ones, by the rules one after the other."""
    valid = {step: metric for step, kind, problem, metric in items if kind == "committed" and problem is None}
    free = sorted(step for step in valid if step not in pinned)
    stays = set(free) if newest is None else {step for step in free if sum(other > step for other in free) < newest}
    stays |= {step for step in valid if every and step % every == 0}
    numbers = {s: m for s in free if type(m := valid[s]) in (int, float, bool) and m == m and m not in (INF, -INF)}
    for step, metric in numbers.items():
        sign = 1 if mode == "min" else -1
        better = sum((sign * other, s) < (sign * metric, step) for s, other in numbers.items())
        if better < best:
            stays.add(step)
    stays |= {step for step in valid if step in pinned or step in held}
    return stays | ({max(valid)} if valid else set())


@given(
    st.lists(ENTRY, unique_by=lambda item: item[0]),
    st.one_of(st.none(), st.integers(0, 5)),
    st.one_of(st.none(), st.integers(1, 12)),
    st.integers(0, 4),
    st.sampled_from(["min", "max"]),
    st.sets(st.integers(0, 40)),
    st.sets(st.integers(0, 40)),
)
def test_it_decides_as_a_naive_model_does(items, newest, every, best, mode, pinned, held):
    entries = [entry(step, kind, problem, **({} if m is None else {"loss": m})) for step, kind, problem, m in items]
    policy = Policy(newest=newest, every=every, best=best, metric="loss" if best else None, mode=mode)
    verdicts = judge(entries, policy, pinned=pinned, held=held)
    assert {v.entry.step for v in verdicts if not v.goes} == naive(items, newest, every, best, mode, pinned, held)
    assert [v.entry.step for v in verdicts] == sorted(
        step for step, kind, problem, _ in items if kind == "committed" and problem is None
    )
    assert all(v.reasons for v in verdicts)
    assert all((v.reasons == ("excess",)) == v.goes for v in verdicts)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["main", "old", "next"]), st.booleans(), st.booleans()),
        unique_by=lambda item: item[0],
    ),
    st.integers(0, 30),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 40)),
    st.integers(0, 4),
)
def test_with_all_lines_and_what_was_set_aside_nothing_goes_that_must_stay(
    items, fork, explicit, stale, pinned, newest
):
    """The line is main up to `fork`, then next; "old" is no line of this root."""
    entries = [
        entry(step, "stale" if aside else "committed", "torn" if torn else None, timeline=timeline,
              aside_for="next" if aside else None)
        for step, timeline, aside, torn in items
    ]  # fmt: skip
    record = root_record(line(), line("next", "main", fork, explicit))
    verdicts = decide(record, Catalog(entries), Policy(newest=newest), pinned=pinned, stale=stale)
    assert [v.entry for v in verdicts] == entries
    gone = [v.entry for v in verdicts if v.goes]
    on_line = [
        e for e in entries if e.kind == "committed" and e.valid
        and (e.manifest.timeline == "next" or (e.manifest.timeline == "main" and e.step <= fork))
    ]  # fmt: skip
    assert all(e.step not in pinned for e in gone)
    assert all(e in on_line or e.kind == "stale" for e in gone)
    if on_line:
        assert max(on_line, key=lambda e: e.step) not in gone
    replaced = not explicit and any(e.manifest.timeline == "next" for e in on_line)
    aside = [e for e in entries if e.kind == "stale" and e.step not in pinned]
    assert [e for e in gone if e.kind == "stale"] == (aside if stale or replaced else [])
