"""Two checkpoints are equal to the bit or they are not, and what differs is named with how far it is apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make_view, write_checkpoint
from torch import nn

import easyckpt
from easyckpt import catalog, tensor_comparison
from easyckpt.comparison import Comparison, compare
from easyckpt.contents import Opened
from easyckpt.errors import DamagedCheckpoint
from easyckpt.format import layout
from easyckpt.format.difference import further, is_number, largest_difference
from easyckpt.format.dtypes import DTYPES
from easyckpt.format.layout import NativeNaming
from easyckpt.storage.local import LocalStorage


def written(path, *ranks, share=True, replicated=()):
    """A checkpoint of one dict of tensors a rank."""
    storage = LocalStorage(path)
    views = [
        make_view(tensors, rank=rank, world_size=len(ranks), replicated=replicated)
        for rank, tensors in enumerate(ranks)
    ]
    write_checkpoint(storage, *views, share=share)
    return pair(path, 10)


def pair(path, step):
    storage = LocalStorage(path)
    return storage, catalog.inspect(storage, layout.step_dir(step), NativeNaming())


def saved(path, state):
    """A checkpoint that the engine itself made of `state`."""
    with easyckpt.Checkpointer(path, state, signals=()) as ckpt:
        ckpt.save(1, wait=True)
    return pair(path, 1)


def differences(tmp_path, one: torch.Tensor, other: torch.Tensor) -> Comparison:
    return compare(written(tmp_path / "a", {"t": one}), written(tmp_path / "b", {"t": other}))


def only(result):
    assert len(result.differences) == 1, result.differences
    return result.differences[0]


class Celsius(float):
    """A float to one codec."""


class Kelvin(float):
    """A float to another."""


def test_values_of_different_codecs_differ_though_what_they_are_written_as_does_not(tmp_path):
    for kind in (Celsius, Kelvin):
        easyckpt.register_codec(kind, float, kind, kind.__name__)
    states = {"c": Celsius(20.0), "k": Kelvin(20.0), "f": 20.0}
    made = {name: saved(tmp_path / name, {"box": {"t": value}}) for name, value in states.items()}
    for one, other in (("c", "k"), ("c", "f"), ("f", "k")):
        assert "box.t" in only(compare(made[one], made[other])).path
    assert compare(made["c"], saved(tmp_path / "again", {"box": {"t": Celsius(20.0)}})).equal
    assert "box.t" in only(compare(made["c"], saved(tmp_path / "warm", {"box": {"t": Celsius(21.0)}}))).path


# -- elements


def flat(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_compared_bit_by_bit(dtype):
    kind = DTYPES[dtype]
    one = torch.arange(64, dtype=torch.uint8)
    assert largest_difference(one, one.clone(), kind) == (0, None)
    for position in range(64):
        other = one.clone()
        other[position] ^= 0x80
        count, largest = largest_difference(one, other, kind)
        assert count == 1
        assert (largest is None) is not is_number(kind)


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1))
def test_differences_of_int64_are_exact(pairs):
    one, other = (torch.tensor(side, dtype=torch.int64) for side in zip(*pairs, strict=True))
    count, largest = largest_difference(flat(one), flat(other), torch.int64)
    assert count == sum(a != b for a, b in pairs)
    assert (largest or 0) == max(abs(a - b) for a, b in pairs)


@given(st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 2), min_size=1))
def test_differences_of_uint64_are_exact(pairs):
    one, other = (torch.tensor(side, dtype=torch.uint64) for side in zip(*pairs, strict=True))
    assert (largest_difference(flat(one), flat(other), torch.uint64)[1] or 0) == max(abs(a - b) for a, b in pairs)


@given(st.lists(st.tuples(*[st.floats(width=32)] * 2), min_size=1))
def test_differences_of_floats_are_those_of_python(pairs):
    one, other = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
    _, largest = largest_difference(flat(one), flat(other), torch.float32)
    expected = None
    for a, b in zip(one.tolist(), other.tolist(), strict=True):
        if torch.tensor(a).view(torch.int32) != torch.tensor(b).view(torch.int32):
            expected = further(expected, abs(a - b))
    assert largest == expected or (math.isnan(largest) and math.isnan(expected))


def test_a_difference_beyond_the_first_block_is_found():
    one = torch.zeros(3 << 20, dtype=torch.float16)
    other = one.clone()
    other[-1] = 2.5
    assert largest_difference(flat(one), flat(other), torch.float16) == (1, 2.5)


# -- tensors


def test_a_checkpoint_equals_itself(tmp_path):
    one = written(tmp_path / "a", {"t": torch.tensor([math.nan, -0.0, math.inf]), "empty": torch.empty(0, 3)})
    result = compare(one, one)
    assert result.equal
    assert result.components["model"].equal
    assert result.components["model"].tensors == 2


@pytest.mark.parametrize(
    ("one", "other", "largest", "note"),
    [
        (torch.tensor([0.5, 1.0]), torch.tensor([0.5, 1.25]), 0.25, "[1]: 1 against 1.25"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0, "[0]: 0 against -0"),
        (torch.tensor(math.nan), torch.tensor(1.0), math.nan, "NaN against 1"),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf, "[0]: inf against 1"),
        (torch.tensor([True]), torch.tensor([False]), 1, "[0]: True against False"),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5.0, "[0]: (3, 4j) against (0, 0j)"),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), 2**64 - 1, None),
        (torch.zeros(2, 3), torch.zeros(2, 4), None, "shape (2, 3) against (2, 4)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), None, "float32 against float64"),
    ],
)
def test_what_differs_is_said_with_the_first_element(tmp_path, one, other, largest, note):
    result = differences(tmp_path, one, other)
    found = only(result)
    assert not result.equal
    assert (found.component, found.path, found.rank) == ("model", "model.t", 0)
    assert found.largest == largest or (math.isnan(found.largest) and math.isnan(largest))
    assert found.differing == (0 if largest is None else 1)
    assert note is None or found.note == note


def test_two_nans_of_other_bits_differ(tmp_path):
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = only(differences(tmp_path, torch.tensor([math.nan]), other))
    assert math.isnan(found.largest)
    assert found.note == "[0]: NaN of other bits"


def test_tensors_of_one_side_only_are_named(tmp_path):
    one = written(tmp_path / "a", {"x": torch.ones(2), "t": torch.ones(1)})
    other = written(tmp_path / "b", {"t": torch.ones(1), "y": torch.ones(2)})
    assert {(d.path, d.note) for d in compare(one, other).differences if d.path != "model"} == {
        ("model.x", "only in A"),
        ("model.y", "only in B"),
    }


def test_a_tensor_larger_than_a_chunk_is_compared_to_its_end(tmp_path):
    tensor = torch.arange(5 << 20, dtype=torch.int32)
    other = tensor.clone()
    other[-1] = 0
    found = only(differences(tmp_path, tensor, other))
    assert (found.differing, found.largest) == (1, (5 << 20) - 1)
    assert found.note.startswith(f"[{(5 << 20) - 1}]")


def test_bytes_that_lie_at_other_places_are_compared_all_the_same(tmp_path):
    big, small = torch.arange(3 << 20, dtype=torch.int32), torch.arange(1001, dtype=torch.int32)
    one = written(tmp_path / "a", {"big": big, "small": small})
    other = written(tmp_path / "b", {"small": small, "big": big})
    assert compare(one, other).differences == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_memory_formats_do_not_count_and_elements_do(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    values = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    copy = values.clone()
    back = [order.index(d) for d in range(len(shape))]
    other = copy.permute(*order).contiguous().permute(*back)
    changed = data.draw(st.sampled_from([None, *range(values.numel())]))
    if changed is not None:
        where = [int(i) for i in torch.unravel_index(torch.tensor(changed), shape)]
        other[tuple(where)] += 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_comparison, "_BLOCK_BYTES", data.draw(st.sampled_from([4, 16, 1 << 20])))
        result = differences(tmp_path_factory.mktemp("formats"), values, other)
    if changed is None:
        assert result.equal
    else:
        assert only(result).note.startswith(f"{where}: ")
        assert (only(result).differing, only(result).largest) == (1, 1000)


# -- ranks


def test_what_all_ranks_share_is_compared_once(tmp_path):
    ranks = [{"w": torch.ones(4), "b": torch.full((2,), float(rank))} for rank in range(2)]
    one = written(tmp_path / "a", *ranks, replicated=["w"])
    changed = [{**tensors, "w": torch.zeros(4)} for tensors in ranks]
    other = written(tmp_path / "b", *changed, replicated=["w"])
    result = compare(one, other)
    assert [(d.path, d.rank) for d in result.differences] == [("model.w", 0)]
    assert result.components["model"].tensors == 3


def test_a_rank_that_wrote_what_others_share_is_compared_with_it(tmp_path):
    ranks = [{"w": torch.ones(4)}, {"w": torch.ones(4)}]
    one = written(tmp_path / "a", *ranks, replicated=["w"])
    apart = written(tmp_path / "b", ranks[0], {"w": torch.zeros(4)}, replicated=["w"], share=False)
    assert [(d.path, d.rank) for d in compare(one, apart).differences] == [("model.w", 1)]
    assert [(d.path, d.rank) for d in compare(apart, one).differences] == [("model.w", 1)]
    assert compare(one, written(tmp_path / "c", *ranks, replicated=["w"], share=False)).equal


def test_ranks_of_one_side_only_differ(tmp_path):
    tensors = {"t": torch.ones(1)}
    result = compare(written(tmp_path / "a", tensors), written(tmp_path / "b", tensors, tensors))
    assert [(d.component, d.rank, d.note) for d in result.differences] == [("model", 1, "only in B")]


# -- the other state


def test_values_are_compared_one_by_one_with_their_paths(tmp_path):
    one = {"box": {"lr": 0.1, "list": [1, 2, (3, None)], "same": {"a": b"x", 1: {4, 5}}, "zero": 0.0, "only": [1, [2]]}}
    other = {"box": {"lr": 0.2, "list": [1, 2, [3, None]], "same": {"a": b"x", 1: {5, 4}}, "zero": -0.0, "one": 1}}
    result = compare(saved(tmp_path / "a", one), saved(tmp_path / "b", other))
    found = {d.path: (d.note, d.largest) for d in result.differences if d.component == "box"}
    assert found == {
        "box.lr": ("0.1 against 0.2", 0.1),
        "box.list.2": ("a tuple against a list", None),
        "box.zero": ("0.0 against -0.0", 0.0),
        "box.only": ("only in A", None),
        "box.one": ("only in B", None),
    }


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (2**70, 2**70 + 1), ("1", 1), (None, "None")])
def test_values_of_other_types_differ(tmp_path, one, other):
    result = compare(saved(tmp_path / "a", {"box": {"v": one}}), saved(tmp_path / "b", {"box": {"v": other}}))
    assert [d.path for d in result.differences if d.component == "box"] == ["box.v"]


def test_a_tensor_and_another_value_at_one_place_differ_once(tmp_path):
    result = compare(saved(tmp_path / "a", {"box": {"v": torch.ones(1)}}), saved(tmp_path / "b", {"box": {"v": 1.0}}))
    assert [(d.path, d.note) for d in result.differences if d.component == "box"] == [("box.v", "a tensor against 1.0")]


def trained(rate=0.1, steps=2, tied=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if tied:
        model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_an_optimizer_is_compared_by_the_places_that_people_know(tmp_path):
    result = compare(saved(tmp_path / "a", trained()), saved(tmp_path / "b", trained(steps=3)))
    paths = [d.path for d in result.differences]
    assert "optimizer.state.0.exp_avg" in paths
    assert "model.0.weight" in paths
    assert result.components["optimizer"].first == "optimizer.state.0.step"
    other = compare(saved(tmp_path / "c", trained(0.1, 0)), saved(tmp_path / "d", trained(0.2, 0)))
    assert [(d.path, d.note) for d in other.differences if d.component == "optimizer"] == [
        ("optimizer.param_groups.0.lr", "0.1 against 0.2")
    ]


def test_equal_training_gives_equal_states(tmp_path):
    result = compare(saved(tmp_path / "a", trained()), saved(tmp_path / "b", trained()))
    assert result.components["model"].equal
    assert result.components["optimizer"].equal


def test_a_tie_that_only_one_side_has_is_named_and_its_values_are_compared(tmp_path):
    one, other = trained(steps=0, tied=True), trained(steps=0)
    with torch.no_grad():
        other["model"][1].weight.copy_(other["model"][0].weight)
    result = compare(saved(tmp_path / "a", {"model": one["model"]}), saved(tmp_path / "b", {"model": other["model"]}))
    assert [(d.path, d.note) for d in result.differences if d.component == "model"] == [
        ("model.1.weight", "tied to model.0.weight against a tensor of its own")
    ]


# -- damage


@pytest.mark.parametrize("swapped", [False, True])
def test_a_tied_name_that_only_one_side_has_is_told(tmp_path, swapped):
    weight = torch.arange(6.0)
    with_ties = {"box": {"weight": weight, "tied": weight}}
    sides = [saved(tmp_path / "a", with_ties), saved(tmp_path / "b", {"box": {"weight": weight.clone()}})]
    result = compare(*(reversed(sides) if swapped else sides))
    found = [difference for difference in result.differences if difference.component == "box"]
    assert [(difference.path, difference.note) for difference in found if "tied" in difference.path] == [
        ("box.tied", "only in B" if swapped else "only in A")
    ]


def test_damage_is_an_error_and_no_difference(tmp_path):
    tensor = torch.arange(4 << 20, dtype=torch.int32)
    one, other = written(tmp_path / "a", {"t": tensor}), written(tmp_path / "b", {"t": tensor})
    shard = tmp_path / "b" / layout.step_dir(10) / layout.shard_file(0)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="chunk 2"):
        compare(one, other)


def test_each_byte_is_read_once_where_both_sides_lie_alike(tmp_path):
    tensors = {f"t{i}": torch.full((700_001,), float(i)) for i in range(20)}
    one, other = written(tmp_path / "a", tensors), written(tmp_path / "b", tensors)
    read = []
    assert compare(one, other, read.append).equal
    sizes = [(tmp_path / d / layout.step_dir(10) / layout.shard_file(0)).stat().st_size for d in "ab"]
    assert sum(read) == sum(sizes)


def test_files_are_closed(tmp_path):
    import os

    one = written(tmp_path / "a", {"t": torch.ones(4)}, {"t": torch.ones(4)})
    before = len(os.listdir("/proc/self/fd"))
    compare(one, one)
    with Opened(*one) as opened:
        list(opened.components(0))
    assert len(os.listdir("/proc/self/fd")) == before
