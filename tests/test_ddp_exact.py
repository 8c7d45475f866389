"""Four gloo ranks whose reducer rebuilds its buckets: stopped, killed and resumed is equal to the bit to straight on.

`test_ddp_settle.py` tests `settle_ddp` by itself; here it is part of real jobs that go through a Checkpointer.
"""

from __future__ import annotations

from tests.support import jobs

RANKS, STEPS = 4, 8
SETTINGS = {"save_storage_interval": 3}
#: Layers in another order of use than of registration, and buckets that hold few of them.
MODEL = ("--layers=7", "--width=37", "--bucket-cap-mb=0.01")


def test_stopped_killed_and_resumed_equals_straight_on(tmp_path):
    straight = jobs.run(tmp_path / "a", tmp_path / "na", *MODEL, steps=STEPS, ranks=RANKS, settings=SETTINGS)
    expected = straight.values("loss")[:STEPS]

    root, notes = tmp_path / "run", tmp_path / "notes"
    stopped = jobs.run(root, notes, *MODEL, steps=3, ranks=RANKS, settings=SETTINGS)
    assert stopped.values("loss")[:3] == expected[:3]

    arguments = (*MODEL, "--hold-at=6", "--step-seconds=0.05")
    killed = jobs.start(root, notes, *arguments, steps=STEPS, ranks=RANKS, settings=SETTINGS)
    for rank in range(RANKS):
        killed.wait_for("finished", 6, rank)
    killed.kill()
    assert (killed.first("restored"), killed.first("tier")) == ([3] * RANKS, ["storage"] * RANKS)
    assert killed.values("loss") == expected[3:6]

    last = jobs.run(root, notes, *MODEL, steps=STEPS, ranks=RANKS, settings=SETTINGS)
    assert (last.first("restored"), last.first("tier")) == ([5] * RANKS, ["memory"] * RANKS)
    assert last.values("loss")[:-1] == expected[5:]
    assert last.digest == straight.digest


def test_without_settling_it_does_not(tmp_path):
    """The trap is real: else the test above could not fail."""
    arguments = (*MODEL, "--no-settle")
    straight = jobs.run(tmp_path / "a", tmp_path / "na", *arguments, steps=STEPS, ranks=RANKS, settings=SETTINGS)
    root, notes = tmp_path / "run", tmp_path / "notes"
    jobs.run(root, notes, *arguments, steps=4, ranks=RANKS, settings=SETTINGS)
    second = jobs.run(root, notes, *arguments, steps=STEPS, ranks=RANKS, settings=SETTINGS)
    assert second.digest != straight.digest
