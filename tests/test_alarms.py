"""Signals of one rank: each is answered by an emergency that has begun after it, or by the end."""

from __future__ import annotations

from easyckpt.saving.alarms import Alarms
from easyckpt.saving.messages import Board


def test_a_signal_is_answered_by_the_end_of_the_emergency_after_the_known_one():
    alarms = Alarms()
    first = alarms.ring()
    assert alarms.ask(Board()) == 1
    running = Board(emergency=1)
    alarms.hear(running)
    second = alarms.ring()
    assert alarms.ask(running) == 2
    assert not first.is_set()
    alarms.hear(Board(emergency=1, emergency_over=True))
    assert (first.is_set(), second.is_set()) == (True, False)
    assert alarms.ask(Board(emergency=1, emergency_over=True)) == 2  # it is on its way: nothing new to ask for
    alarms.hear(Board(emergency=3))  # another rank's signal has begun the next one already
    assert second.is_set()
    assert not alarms.waiting


def test_who_is_given_up_or_comes_after_the_end_waits_for_nothing():
    alarms = Alarms()
    asked = alarms.ring()
    alarms.ask(Board())
    unasked = alarms.ring()
    alarms.give_up()
    assert asked.is_set()
    assert unasked.is_set()
    later = alarms.ring()
    assert not later.is_set()
    alarms.end()
    assert later.is_set()
    assert alarms.ring().is_set()
