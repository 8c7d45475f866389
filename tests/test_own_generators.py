"""Generators of Python's and NumPy's that the user hands over go on where they were, and take no state that is none."""

from __future__ import annotations

import contextlib
import random
import re

import numpy as np
import pytest
from support.images import problems, restore, snapshot

from easyckpt.errors import ConfigError, DamagedCheckpoint
from easyckpt.state.build import make_component
from easyckpt.state.generators import own_state, set_own_state

KINDS = {
    "Python": lambda: random.Random(1),
    "default": lambda: np.random.default_rng(2),
    "Mersenne": lambda: np.random.Generator(np.random.MT19937(3)),
    "Philox": lambda: np.random.Generator(np.random.Philox(4)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(5)),
    "legacy": lambda: np.random.RandomState(6),
    "legacy over PCG64": lambda: np.random.RandomState(np.random.PCG64(7)),
}


def draw(generator) -> list[float]:
    """Normal numbers too: some kinds keep the second one of a pair."""
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random()]
    return [float(generator.normal()), float(generator.uniform()), int(generator.bytes(3)[0])]


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_where_it_was_and_stays_the_same_object(kind):
    generator = KINDS[kind]()
    draw(generator)
    image = snapshot(g=generator)
    expected = [draw(generator), draw(generator)]
    fresh = KINDS[kind]()
    restore(image, g=fresh)
    assert [draw(fresh), draw(fresh)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_looking_at_it_draws_nothing(kind):
    generator, other = KINDS[kind](), KINDS[kind]()
    snapshot(g=generator)
    assert draw(generator) == draw(other)


@pytest.mark.parametrize(("saved", "live"), [("Python", "default"), ("default", "Philox"), ("legacy", "Mersenne")])
def test_another_kind_is_refused_by_name(saved, live):
    (problem,) = problems(snapshot(g=KINDS[saved]()), g=KINDS[live]())
    assert re.search("g is a .* in the checkpoint and a .* here", problem)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Mersenne", lambda state: state["state"].update(pos=10**6)),
        ("Mersenne", lambda state: state["state"].update(pos=-1)),
        ("legacy", lambda state: state["state"].update(pos=625)),
        ("Philox", lambda state: state.update(buffer_pos=-3)),
        ("Python", lambda state: state.update(words=state["words"][:-8])),
        ("Python", lambda state: state.update(words=state["words"][:-3])),
        ("Python", lambda state: state.update(gauss="x")),
        ("default", lambda state: state.update(has_uint32=7)),
        ("legacy", lambda state: state.update(has_gauss=2)),
        ("default", lambda state: state.pop("state")),
        ("default", lambda state: state.update(bit_generator="MT19937")),
        ("SFC64", lambda state: state["state"].update(state=np.zeros(1, np.uint64))),
    ],
)
def test_a_state_that_is_none_is_refused_before_the_live_one_is_touched(kind, change):
    """NumPy would believe a position outside of its buffer, and read there."""
    generator = KINDS[kind]()
    component = make_component("g", generator)
    value = component.value()
    change(value["state"])
    component.value = lambda: value
    image = snapshot(g=component)
    live = KINDS[kind]()
    with pytest.raises(DamagedCheckpoint, match="'g' is damaged"):
        problems(image, g=live)
    assert draw(live) == draw(KINDS[kind]())
    with pytest.raises(ValueError, match=r"\w"):
        set_own_state(live, value["state"])


class OnlySeeded(np.random.PCG64):
    """As bit generators of other libraries may be: not made, and so not copied, without an argument."""

    def __init__(self, seed):
        super().__init__(seed)


def test_a_bit_generator_that_cannot_be_copied_is_a_problem_in_words():
    generator = np.random.Generator(OnlySeeded(1))
    (problem,) = problems(snapshot(g=generator), g=generator)
    assert "g is a numpy.Generator of OnlySeeded that cannot be copied" in problem


def test_a_subclass_is_refused_since_it_may_hold_more():
    class Counting(random.Random):
        pass

    for generator in (Counting(1), random.SystemRandom()):
        with pytest.raises(ConfigError, match="no state_dict"):
            make_component("g", generator)


def test_states_are_plain_values():
    assert own_state(KINDS["Python"]()).keys() == {"version", "words", "gauss"}


def test_the_next_child_that_is_spawned_is_the_same():
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([1, 2], spawn_key=(3,))))
    generator.spawn(2500)
    image = snapshot(g=generator)
    expected = draw(generator.spawn(1)[0])
    fresh = np.random.Generator(np.random.PCG64(np.random.SeedSequence([1, 2], spawn_key=(3,))))
    fresh.spawn(7)
    restore(image, g=fresh)
    assert draw(fresh.spawn(1)[0]) == expected


def test_children_that_cannot_be_the_same_are_a_problem_in_words():
    spawned, unspawned = np.random.default_rng(0), np.random.default_rng(0)
    image, before = snapshot(g=spawned), snapshot(g=unspawned)
    spawned.spawn(2)
    (problem,) = problems(before, g=spawned)
    assert "has spawned more generators here" in problem
    assert problems(image, g=np.random.default_rng(1)) == []  # none was spawned yet: its state is all there is
    image = snapshot(g=spawned)
    (problem,) = problems(image, g=np.random.default_rng(1))
    assert "is made of another seed here" in problem


@pytest.mark.parametrize("seed", [3, {}, {"children": -1}, {"children": "x"}, {"children": 10**9}])
def test_a_seed_that_is_none_is_refused(seed):
    component = make_component("g", np.random.default_rng(0))
    value = {**component.value(), "seed": seed}
    component.value = lambda: value
    image = snapshot(g=component)
    with contextlib.suppress(DamagedCheckpoint):
        assert problems(image, g=np.random.default_rng(0))
