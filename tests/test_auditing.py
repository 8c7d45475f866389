"""What an audited run notes, what a load leaves as it is there, and how it stops. Through the engine."""

from __future__ import annotations

import gc
import json
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import easyckpt
from easyckpt.memory.place import user_name
from easyckpt.strangers import Strangers, state_digest
from tests.support.jobs import committed

HELD: dict[str, torch.Generator] = {}


class Job:
    """A training with all kinds of generators."""

    def __init__(self, root, **audit):
        torch.manual_seed(0)
        random.seed(0)
        self.model, self.noise = nn.Linear(2, 2), torch.Generator().manual_seed(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.loader = DataLoader(TensorDataset(torch.arange(8.0)), 2, shuffle=True)
        state = {"model": self.model, "optimizer": self.optimizer, "noise": self.noise}
        self.checkpointer = easyckpt.Checkpointer(root, state, save_storage_interval=2)

    def step(self, number):
        self.optimizer.zero_grad()
        self.model(torch.randn(1, 2)).sum().backward()
        self.optimizer.step()
        self.checkpointer.save_if_needed(number)


@pytest.fixture
def job(tmp_path, monkeypatch):
    def make(**audit):
        settings = {"root": str(tmp_path / "audited"), **audit}
        monkeypatch.setenv("EASYCKPT_AUDIT", json.dumps(settings))
        return Job(tmp_path / "own")

    return make


def notes(tmp_path):
    path = tmp_path / "audited" / "audit" / "rank-00000.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_noted_with_its_generators_rates_and_batches(job, tmp_path):
    audited = job()
    with audited.checkpointer as checkpointer:
        checkpointer.load()
        for number, _ in enumerate(checkpointer.batches(audited.loader, 0), start=1):
            torch.rand(1, generator=audited.noise)
            audited.step(number)
    loading, loaded, *steps = notes(tmp_path)
    assert loading == {"loading": True}
    assert loaded == {"loaded": 0, "tier": None}
    assert [note["step"] for note in steps] == [1, 2, 3, 4]
    for note in steps:
        assert {"python", "torch", "component:noise"} <= note["generators"].keys()
        assert note["rates"] == {"optimizer": [0.5]}
        assert note["batches"]["train"][0] == 1
    for name in ("torch", "component:noise"):
        assert len({note["generators"][name] for note in steps}) == 4
    assert len({note["generators"]["python"] for note in steps}) == 1
    assert len({note["batches"]["train"][1] for note in steps}) == 4
    assert not (tmp_path / "own").exists()


def test_a_run_stops_after_its_step_durably_and_keeps_what_is_in_memory(job, tmp_path, memory_dir):
    audited = job(stop_step=3, save_storage_interval=1000)
    with pytest.raises(SystemExit) as ended:
        with audited.checkpointer as checkpointer:
            checkpointer.load()
            for number in range(1, 9):
                audited.step(number)
    assert ended.value.code == 0
    assert committed(tmp_path / "audited") == [3]
    assert [path for path in memory_dir.iterdir() if path.name.startswith(f"easyckpt-{user_name()}-")]
    with job(stop_step=3).checkpointer as checkpointer:
        assert checkpointer.load().tier == "memory"


def test_a_program_that_only_calls_save_stops_as_well(job, tmp_path):
    audited = job(stop_step=3)
    with pytest.raises(SystemExit):
        with audited.checkpointer as checkpointer:
            checkpointer.load()
            for number in range(2, 9, 2):
                checkpointer.save(number)
    assert committed(tmp_path / "audited") == [2, 4]


def test_parts_that_are_left_out_stay_as_they_are(job):
    audited = job(stop_step=2)
    with pytest.raises(SystemExit):
        with audited.checkpointer as checkpointer:
            checkpointer.load()
            audited.noise.manual_seed(99)
            audited.step(1)
            audited.step(2)
    trained = audited.model.weight.detach().clone()
    again = job(left_out=["noise", "model"])
    fresh, noise = again.model.weight.detach().clone(), again.noise.get_state()
    with again.checkpointer as checkpointer:
        assert checkpointer.load().step == 2
        assert torch.equal(again.model.weight, fresh)
        assert torch.equal(again.noise.get_state(), noise)
        assert not torch.equal(fresh, trained)


class Holder:
    pass


def test_strangers_are_found_wherever_they_are_kept():
    gc.collect()
    others = Strangers()
    others.search([])  # of tests before
    local = torch.Generator().manual_seed(1)
    HELD["generator"] = torch.Generator().manual_seed(2)
    holder, loose = Holder(), SimpleNamespace(inner=torch.Generator().manual_seed(3))
    holder.dropout = torch.Generator().manual_seed(4)
    known = torch.Generator().manual_seed(5)

    def drawing():
        mine = torch.Generator().manual_seed(6)
        while True:
            yield mine.initial_seed()

    running = drawing()
    next(running)
    strangers = Strangers()
    strangers.search([known, *others.generators()])
    found = strangers.digests()
    places = " | ".join(found)
    for place in (
        "the variable local in test_strangers_are_found_wherever_they_are_kept() of test_auditing.py",
        "the attribute dropout of a Holder",
        "the attribute inner of a SimpleNamespace",
        "'generator' of a dict",
        "a variable of the iterator test_strangers_are_found_wherever_they_are_kept.<locals>.drawing()",
    ):
        assert place in places
    assert len(found) == 5
    assert not any("known" in place for place in found)
    before = dict(found)
    local.manual_seed(7)
    after = strangers.digests()
    assert [place for place in before if before[place] != after[place]] == [
        next(place for place in before if "the variable local" in place)
    ]
    del loose, running
    HELD.clear()
    assert len(strangers.digests()) < len(found)


def test_strangers_in_containers_of_a_function_and_schedulers_are_found():
    others = Strangers()
    others.search([])
    pair = (torch.Generator().manual_seed(1), (torch.Generator().manual_seed(2),))
    table = {"noise": {"inner": torch.Generator().manual_seed(3)}}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 4)]
    known = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [2])
    forgotten = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    strangers = Strangers()
    strangers.search([known, *others.generators()])
    before = strangers.digests()
    where = "in test_strangers_in_containers_of_a_function_and_schedulers_are_found() of test_auditing.py"
    assert sorted(before) == [
        f"torch.Generator, the variable pair {where}",
        f"torch.Generator, the variable pair {where} (2)",
        f"torch.Generator, the variable table {where}",
        f"torch.ReduceLROnPlateau, the variable forgotten {where}",
    ]
    forgotten.step(1.0)
    assert [place for place, digest in strangers.digests().items() if digest != before[place]] == [sorted(before)[-1]]
    assert pair
    assert table


class Odd(random.Random):
    """Says nothing that is a state."""

    def getstate(self):
        return {}


def test_a_generator_of_the_programs_own_kind_ends_no_training():
    assert state_digest(Odd(1)) == "not readable: ValueError"


def test_looking_for_strangers_leaves_the_variables_of_the_program_as_they_are():
    width, rate = 3, torch.Generator()
    mine = locals()
    graph = torch.ones(1, requires_grad=True).sum()
    Strangers().search([])
    assert mine["width"] == width
    assert mine["rate"] is rate
    assert graph.requires_grad


def test_looking_for_strangers_keeps_nothing_alive():
    held = Holder()
    seen = weakref.ref(held)
    Strangers().search([])
    del held
    assert seen() is None


class Strange:
    """A batch that cannot be looked at."""

    @property
    def __class__(self):
        raise RuntimeError("no")


def test_a_batch_that_cannot_be_digested_holds_no_training_up(job, tmp_path):
    audited = job()
    with audited.checkpointer as checkpointer:
        checkpointer.load()
        for number, _ in enumerate(checkpointer.batches([Strange(), Strange()], 0), start=1):
            audited.step(number)
    assert [note["step"] for note in notes(tmp_path)[2:]] == [1, 2]


def test_a_job_that_is_not_audited_notes_nothing(tmp_path):
    job = Job(tmp_path / "own")
    with job.checkpointer as checkpointer:
        checkpointer.load()
        job.step(1)
    assert not (tmp_path / "own" / "audit").exists()
