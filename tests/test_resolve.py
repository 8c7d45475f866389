"""Which states a load may try, and in which order."""

from __future__ import annotations

import json

import pytest
import torch
from support.checkpoints import ARENA, RUN, line, make_view, root_record, write_checkpoint

from easyckpt import catalog
from easyckpt.errors import ForeignFormat, PeerError
from easyckpt.format import layout as names
from easyckpt.loading.resolve import Candidate, candidates
from easyckpt.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "root")


def commit(storage, *steps, **settings):
    directory = settings.pop("directory", None)
    attempt = settings.pop("attempt", "try-1")
    for step in steps:
        view = make_view({"w": torch.tensor([step])}, step=step, **settings)
        write_checkpoint(storage, view, directory=directory, attempt=attempt)


def slot(step, **settings):
    return make_view({"w": torch.tensor([step])}, step=step, **settings).meta


def resolve(storage, memory=(), record=None, **settings):
    record = root_record() if record is None else record
    return candidates(catalog.scan(storage, names.NativeNaming()), record, memory, run=RUN, arena_id=ARENA, **settings)


def shown(found):
    return [(candidate.tier, candidate.step) for candidate in found]


def test_newest_first_and_memory_before_storage_at_the_same_step(storage):
    commit(storage, 10, 30, 20)
    found = resolve(storage, [slot(20), slot(30), slot(31)])
    assert shown(found) == [
        ("memory", 31), ("memory", 30), ("storage", 30), ("memory", 20), ("storage", 20), ("storage", 10),
    ]  # fmt: skip
    assert found[2].source == "step-00000030"
    assert found[2].attempt == "try-1"


def test_an_empty_root_has_none(storage):
    assert resolve(storage) == []


def test_a_step_that_is_asked_for_excludes_all_others(storage):
    commit(storage, 10, 20)
    assert shown(resolve(storage, [slot(10), slot(21)], step=10)) == [("memory", 10), ("storage", 10)]
    assert resolve(storage, step=15) == []


def test_an_abandoned_line_is_never_resumed_from(storage):
    commit(storage, 40, 50, 60)
    record = root_record(line(), line("next", "main", 40))
    commit(storage, 45, timeline="next")
    memory = [slot(61), slot(40), slot(46, timeline="next"), slot(44, timeline="lost")]
    assert shown(resolve(storage, memory, record)) == [
        ("memory", 46), ("storage", 45), ("memory", 40), ("storage", 40),
    ]  # fmt: skip


def test_slots_of_another_run_or_root_are_left_alone(storage):
    other = ARENA[:-1] + "0"
    view = make_view({"w": torch.tensor([1])}, step=5, run="c" * 32)
    assert resolve(storage, [view.meta]) == []
    found = candidates(catalog.scan(storage, names.NativeNaming()), root_record(), [slot(5)], run=RUN, arena_id=other)
    assert found == []


def test_checkpoints_of_another_run_are_an_error_that_names_them(storage):
    commit(storage, 10)
    commit(storage, 20, run="c" * 32)
    with pytest.raises(ForeignFormat, match=r"step-00000020 belongs to run cccc.* this root to aaaa"):
        resolve(storage)


def test_a_copied_root_may_hold_those_of_the_run_that_it_was_copied_from(storage):
    commit(storage, 10, run="c" * 32)
    record = root_record(parent="c" * 32 + "/main/10")
    assert shown(resolve(storage, record=record)) == [("storage", 10)]


def test_a_damaged_one_is_listed_with_its_problem(storage):
    commit(storage, 10, 20, 30)
    storage.remove("step-00000030/manifest.json")
    storage.truncate("step-00000020/rank-00000.json", 10)
    found = resolve(storage)
    assert shown(found) == [("storage", 30), ("storage", 20), ("storage", 10)]
    assert "never committed" in found[0].problem
    assert "10 bytes" in found[1].problem
    assert found[2].problem is None


def test_only_the_newest_whole_leftover_is_one(storage):
    commit(storage, 10)
    for step, attempt in ((20, "a-1"), (20, "a-2"), (15, "a-3")):
        commit(storage, step, directory=names.tmp_dir(step, attempt), attempt=attempt)
    storage.makedirs(names.tmp_dir(40, "a-4"))
    found = resolve(storage)
    assert [candidate.source for candidate in found] == [".step-00000020.a-2.tmp", "step-00000010"]


def test_a_leftover_of_a_committed_step_or_another_line_is_none(storage):
    commit(storage, 10)
    commit(storage, 10, directory=names.tmp_dir(10, "a-1"), attempt="a-1")
    commit(storage, 20, directory=names.tmp_dir(20, "a-2"), attempt="a-2", timeline="lost")
    assert [candidate.source for candidate in resolve(storage)] == ["step-00000010"]


def test_a_whole_leftover_comes_before_a_damaged_directory_of_its_step(storage):
    commit(storage, 10)
    storage.truncate("step-00000010/rank-00000.json", 10)
    commit(storage, 10, directory=names.tmp_dir(10, "a-2"), attempt="a-2")
    assert [candidate.source for candidate in resolve(storage)] == [".step-00000010.a-2.tmp", "step-00000010"]


def test_stale_and_trash_are_none(storage):
    commit(storage, 10, 20, 30)
    storage.rename("step-00000020", names.stale_dir(20, "next"))
    storage.rename("step-00000030", names.trash_dir("step-00000030", "n"))
    assert shown(resolve(storage)) == [("storage", 10)]


def test_candidates_travel_as_json(storage):
    commit(storage, 10)
    storage.truncate("step-00000010/rank-00000.json", 10)
    for candidate in resolve(storage, [slot(11)]):
        assert Candidate.from_json(json.loads(json.dumps(candidate.to_json()))) == candidate
    with pytest.raises(PeerError, match="understand"):
        Candidate.from_json({"step": 1, "colour": "red"})
