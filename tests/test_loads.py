"""What a load takes and what it leaves alone: live objects, the root, checkpoints that are rotated away meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt import Checkpointer, failpoints
from easyckpt.format import layout
from easyckpt.loading import read_only
from tests.support.staged import until
from tests.support.training import Training, committed, start


def test_memory_that_cannot_be_prepared_does_not_make_a_load_pass_over_a_good_checkpoint(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(13)
    failpoints.arm("supply.prepared=error:EIO")
    again = Training(root)
    with again.checkpointer as checkpointer:
        assert checkpointer._parts.arena._supply.wait(60)  # the failure is there to be raised
        assert checkpointer.load().step == 13
        assert torch.equal(again.weights(), training.weights())


@pytest.mark.parametrize("explicit", [False, True])
def test_steps_set_aside_are_said_to_go_where_they_go(root, caplog, explicit):
    training, _ = start(root, back_pressure="wait")
    with training.checkpointer:
        training.to(20)
    if not explicit:
        (root / layout.step_dir(20) / layout.shard_file(0)).unlink()
    again = Training(root)
    with again.checkpointer as checkpointer:
        assert checkpointer.load(step=10 if explicit else None).step == 10
        again.to(11, 10)
    (said,) = (record.getMessage() for record in caplog.records if "set aside as" in record.getMessage())
    assert said.endswith(", and deleted with the next commit") == (not explicit)
    assert bool(list(root.glob("*.stale-*"))) == explicit


def test_a_load_finds_no_checkpoint_that_rotation_is_about_to_remove(root):
    training, _ = start(root, max_ckpt_num=1, slots=1)
    with training.checkpointer as checkpointer:
        training.step()
        checkpointer.save(1, wait=True)
        training.step()
        failpoints.arm("retention.rename.before=pause:0.5")
        checkpointer.save(2, wait=True)
        with pytest.raises(easyckpt.NoCheckpoint, match="committed there: 2 "):
            checkpointer.load(step=1)


def test_a_step_that_is_not_there_cannot_be_loaded(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        with pytest.raises(easyckpt.NoCheckpoint, match="step 4"):
            checkpointer.load(step=4)


def test_restore_is_read_only_and_works_beside_a_running_job(root):
    training, _ = start(root)
    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        at_ten = training.weights()
        before = sorted(str(path) for path in root.rglob("*") if path.suffix != ".jsonl")
        other = nn.Linear(16, 16)
        generator = torch.get_rng_state()
        restored = easyckpt.restore(root, {"model": other})
        assert (restored.step, restored.tier) == (10, "storage")
        assert torch.equal(other.weight, at_ten)
        assert torch.equal(torch.get_rng_state(), generator)
        assert sorted(str(path) for path in root.rglob("*") if path.suffix != ".jsonl") == before


@pytest.mark.parametrize("times", [1, 1000])
def test_restore_looks_again_when_what_it_reads_is_rotated_away(root, monkeypatch, times):
    training, _ = start(root, max_ckpt_num=1)
    open_storage, went_on = read_only.open_storage, []

    def rotated_away(*arguments, **options):
        if len(went_on) < times:
            went_on.append(10 * len(went_on) + 20)
            training.to(went_on[-1], went_on[-1] - 10)
            checkpointer.wait(60)
            until(lambda: committed(root) == [went_on[-1]])
        return open_storage(*arguments, **options)

    with training.checkpointer as checkpointer:
        training.to(10)
        checkpointer.wait(60)
        monkeypatch.setattr(read_only, "open_storage", rotated_away)
        other = nn.Linear(16, 16)
        if times == 1:
            assert easyckpt.restore(root, {"model": other}).step == 20
            assert torch.equal(other.weight, training.weights())
        else:
            with pytest.raises(easyckpt.StorageError, match="rotated away"):
                easyckpt.restore(root, {"model": other})


def test_nothing_is_applied_when_the_objects_do_not_fit(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(10)
    model = nn.Linear(16, 17)
    weights = model.weight.detach().clone()
    with Checkpointer(root, {"model": model}) as checkpointer:
        with pytest.raises(easyckpt.StateMismatch) as caught:
            checkpointer.load()
        assert "weight" in str(caught.value)
        assert torch.equal(model.weight, weights)
    assert committed(root) == [10]


def test_loading_a_component_may_take_an_optimizer_step(root):
    """Some make their optimizer's state that way before they fill it."""

    class Filled(dict):
        def state_dict(self):
            return {"steps": 1}

        def load_state_dict(self, state):
            parameter = nn.Parameter(torch.zeros(1))
            parameter.grad = torch.zeros(1)
            torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()
            self.update(state)

    for restored in (0, 1):
        component = Filled()
        with Checkpointer(root, {"component": component}) as checkpointer:
            assert checkpointer.load().step == restored
            checkpointer.save(1, wait=True)
    assert component == {"steps": 1}


def test_saving_after_a_half_applied_load_is_refused(root):
    training, _ = start(root)
    with training.checkpointer:
        training.to(10)

    class Bad:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise RuntimeError("no")

    state = {"model": training.model, "bad": Bad()}
    with Checkpointer(root.with_name("other"), state) as checkpointer:
        checkpointer.load()
        checkpointer.save_if_needed(100)
    with Checkpointer(root.with_name("other"), state) as checkpointer:
        with pytest.raises(easyckpt.PartlyApplied, match="bad"):
            checkpointer.load()
        with pytest.raises(easyckpt.UsageError, match="partly"):
            checkpointer.save_if_needed(101)
