"""What a capture refers to, when its layout is made anew, and which leaves may be copied late."""

from __future__ import annotations

import gc
import json
import time
import weakref

import pytest
import torch
from support.images import image_of, snapshot
from torch import nn

from easyckpt.errors import UnsupportedValue
from easyckpt.state.capture import StateCapture
from easyckpt.state.tensors import dense_order, stored


def trained(steps=1, **options):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def leaves(capture, *numbers):
    return {capture.layout.leaves[number].path for number in (numbers or range(len(capture.layout.leaves)))}


def source(capture, *path):
    (number,) = [n for n, leaf in enumerate(capture.layout.leaves) if leaf.path == path]
    return capture.sources[number]


def test_the_layout_is_the_same_object_while_the_state_keeps_its_form():
    model, optimizer = trained()
    ema = {name: value.clone() for name, value in model.state_dict().items()}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    capture = StateCapture({"m": model, "o": optimizer, "s": scheduler, "ema": ema, "g": torch.Generator()})
    first = capture.capture()
    for _ in range(3):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        ema["0.weight"] = ema["0.weight"].clone()  # a fresh tensor of the same form is no change of form
        again = capture.capture()
        assert again.layout is first.layout
        assert again.late is first.late
        assert again.sources[0] is first.sources[0]
    assert source(again, "ema", "0.weight") is ema["0.weight"]


def test_sources_are_the_live_tensors_and_hold_the_values_at_the_copy():
    model, optimizer = trained()
    capture = StateCapture({"m": model, "o": optimizer}).capture()
    assert source(capture, "m", "0.weight") is model[0].weight
    assert source(capture, "o", "state", 0, "exp_avg") is optimizer.state[model[0].weight]["exp_avg"]


@pytest.mark.parametrize("others", [{}, {"empty": torch.ones(0, 3)}], ids=["alone", "with an empty one"])
def test_a_tensor_whose_storage_was_freed_is_refused_by_name(others):
    """Reading it would end the process. An empty one has no memory either."""
    plain = torch.ones(8)
    state = StateCapture({"s": {"plain": plain, **others}})
    state.capture()
    plain.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValue, match=r"s\.plain: has lost its storage"):
        state.capture()
    plain.untyped_storage().resize_(32)
    state.capture()


def test_the_step_of_the_optimizer_is_not_the_next_ones():
    """The copy of iteration N holds N, although the CPU tensor goes on to N + 1."""
    model, optimizer = trained(steps=3)
    image = snapshot(m=model, o=optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 4
    number = [leaf.path for leaf in image.layout.leaves].index(("o", "state", 0, "step"))
    assert image.leaf(number).item() == 3


def replace_parameter(model, optimizer):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def move_data(model, optimizer):
    model[0].weight.data = model[0].weight.detach().clone()


def change_dtype(model, optimizer):
    model[2].bias.data = model[2].bias.data.double()


def reinterpret(model, optimizer):
    model[2].bias.data = model[2].bias.data.view(torch.int32).view(torch.float16)[::2].view(torch.float16)


def resize(model, optimizer):
    model[1].running_mean.resize_(2)


def transpose(model, optimizer):  # of the same shape, at the same place
    model[0].weight.data = model[0].weight.data.t()


def reshape_in_place(model, optimizer):
    model[1].running_mean.data = model[1].running_mean.data.view(2, 2)


def new_buffer(model, optimizer):
    model[0].register_buffer("more", torch.ones(2))


def gone_buffer(model, optimizer):
    del model[1].num_batches_tracked


def renamed(model, optimizer):
    model[0]._parameters["other"] = model[0]._parameters.pop("bias")


def new_module(model, optimizer):
    model.append(nn.Linear(2, 2))


def swapped_module(model, optimizer):
    model[0] = nn.Linear(4, 4)


def swapped_module_that_lives_on(model, optimizer):
    model.old = [model[0]]
    model[0] = nn.Linear(4, 4)


def parameter_where_none_was(model, optimizer):
    model[1].bias = None
    StateCapture({"m": model}).capture()
    model[1].bias = nn.Parameter(torch.ones(4))


def state_that_becomes_a_number(model, optimizer):
    optimizer.state[model[0].weight]["step"] = 3.0


def reordered_state(model, optimizer):
    optimizer.state[model[0].weight] = optimizer.state.pop(model[0].weight)


def new_state(model, optimizer):
    optimizer.state[model[0].weight]["extra"] = torch.ones(2)


def new_key_of_no_tensor(model, optimizer):
    optimizer.state[model[0].weight]["extra"] = 3


def lost_state(model, optimizer):
    del optimizer.state[model[0].bias]


def replaced_state(model, optimizer):
    entry = optimizer.state[model[0].weight]
    entry["exp_avg"] = entry["exp_avg"].double()


def new_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    "change",
    [
        replace_parameter, move_data, change_dtype, reinterpret, resize, transpose, reshape_in_place, new_buffer,
        gone_buffer, renamed, new_module, swapped_module, swapped_module_that_lives_on, parameter_where_none_was,
        state_that_becomes_a_number, reordered_state, new_state, new_key_of_no_tensor, lost_state, replaced_state,
        new_group,
    ],
)  # fmt: skip
def test_every_change_is_seen_at_the_next_capture(change):
    """What a plan remembers gives the same as a plan made from nothing."""
    torch.manual_seed(0)
    model, optimizer = trained()
    capture = StateCapture({"m": model, "o": optimizer})
    capture.capture()
    change(model, optimizer)
    seen, fresh = capture.capture(), StateCapture({"m": model, "o": optimizer}).capture()
    assert seen.layout.encoded == fresh.layout.encoded
    assert seen.objects == fresh.objects
    assert (seen.late, seen.early, seen.strided) == (fresh.late, fresh.early, fresh.strided)
    assert list(map(id, seen.sources[:-3])) == list(map(id, fresh.sources[:-3]))  # all but the generators'
    assert image_of(seen).data == image_of(fresh).data


def test_changes_in_containers_are_seen():
    state = {"a": torch.ones(2), "list": [1]}
    capture = StateCapture({"c": state})
    first = capture.capture()
    state["b"] = torch.ones(3)
    state["list"].append({"deep": torch.zeros(1)})
    second = capture.capture()
    assert leaves(second) - leaves(first) == {("c", "b"), ("c", "list", 1, "deep")}
    state["a"] = torch.ones(2, dtype=torch.float64)
    assert {leaf.dtype for leaf in capture.capture().layout.leaves if leaf.path == ("c", "a")} == {"float64"}


def test_moved_memory_of_one_form_keeps_the_layout_and_changes_the_sources():
    model, _ = trained()
    capture = StateCapture({"m": model})
    first = capture.capture()
    model[0].weight.data = torch.full((4, 4), 7.0)
    second = capture.capture()
    assert second.layout is first.layout
    assert torch.equal(source(second, "m", "0.weight"), torch.full((4, 4), 7.0))


def test_no_tensor_is_kept_alive_between_captures():
    model, optimizer = trained()
    ema = {"w": torch.ones(3)}
    capture = StateCapture({"m": model, "o": optimizer, "ema": ema})
    for _ in range(2):
        capture.capture()
    parameter = model[0].weight
    held = [
        weakref.ref(parameter),
        weakref.ref(optimizer.state[parameter]["exp_avg"]),
        weakref.ref(ema["w"]),
        weakref.ref(model[1].running_mean),
        weakref.ref(model[2]),
    ]
    del optimizer.state[parameter], ema["w"], model[1].running_mean, model[2]
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    optimizer.param_groups[0]["params"][0] = model[0].weight
    del parameter
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)
    capture.capture()


# Late and early.


def test_only_what_an_optimizer_alone_writes_is_late():
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ema = torch.optim.swa_utils.AveragedModel(model)
    other = nn.Linear(2, 2)
    capture = StateCapture(
        {"m": model, "o": optimizer, "s": scheduler, "ema": ema, "other": other, "scaler": torch.amp.GradScaler("cpu")}
    ).capture()
    late = leaves(capture, *capture.late)
    assert {path for path in late if path[0] == "m"} == {("m", name) for name, _ in model.named_parameters()}
    assert {path for path in late if path[0] == "o"} == {
        ("o", "state", n, key) for n in range(6) for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert {path[0] for path in late} == {"m", "o"}
    assert len(capture.late) + len(capture.early) == len(capture.layout.leaves)


def test_without_the_optimizer_in_the_state_nothing_is_late():
    model, _ = trained()
    assert StateCapture({"m": model}).capture().late == []


def test_the_learning_rate_as_a_tensor_is_early():
    model, optimizer = trained(lr=torch.tensor(0.1))
    capture = StateCapture({"m": model, "o": optimizer}).capture()
    assert ("o", "param_groups", 0, "lr") in leaves(capture, *capture.early)


def test_memory_shared_with_what_is_not_the_optimizers_is_early():
    flat = torch.randn(8)
    model = nn.Module()
    model.w = nn.Parameter(flat[:4])
    model.v = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD(model.parameters())
    capture = StateCapture({"m": model, "o": optimizer})
    assert leaves(capture.capture(), *capture.capture().late) == {("m", "w"), ("m", "v")}
    model.register_buffer("b", flat[4:])
    assert leaves(capture.capture(), *capture.capture().late) == {("m", "v")}


def test_strided_and_inference_tensors_are_early():
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(4, 6)[:, ::2])
    with torch.inference_mode():
        model.i = nn.Parameter(torch.ones(2), requires_grad=False)
    model.v = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(list(model.parameters()))
    capture = StateCapture({"m": model, "o": optimizer}).capture()
    assert leaves(capture, *capture.late) == {("m", "v")}
    assert leaves(capture, *capture.strided) == {("m", "w")}


def test_state_in_nested_containers_of_an_optimizer_is_late():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(3, 2)) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    capture = StateCapture({"m": model, "o": optimizer}).capture()
    assert ("o", "state", 0, "old_dirs", 0) in leaves(capture, *capture.late)


class Wrapper:
    """A foreign optimizer around torch's, as training libraries have."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def test_the_torch_optimizer_inside_a_foreign_one_counts():
    model, optimizer = trained()
    capture = StateCapture({"m": model, "o": Wrapper(optimizer)})
    assert list(capture.optimizers()) == [optimizer]
    late = leaves(capture.capture(), *capture.capture().late)
    assert ("m", "0.weight") in late
    assert ("o", "state", 0, "exp_avg") in late
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert list(StateCapture({"s": scheduler}).optimizers()) == []  # it looks at one, and is none


def test_parameters_found_through_state_dict_are_late_too():
    model, optimizer = trained()
    model.register_state_dict_post_hook(lambda *_: None)
    capture = StateCapture({"m": model, "o": optimizer})
    first = capture.capture()
    assert ("m", "0.weight") in leaves(first, *first.late)
    assert capture.capture().layout is first.layout
    model[0].weight.data = model[0].weight.data.clone()
    again = capture.capture()
    assert again.late == first.late
    assert source(again, "m", "0.weight").data_ptr() == model[0].weight.data_ptr()


# One leaf or several.


def test_tied_tensors_are_one_leaf_and_untied_ones_are_two():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    capture = StateCapture({"m": model, "o": optimizer, "alias": {"w": model[0].weight.detach()}})
    first = capture.capture()
    assert leaves(first) & {("m", "0.weight"), ("m", "1.weight"), ("alias", "w")} == {("m", "0.weight")}
    assert ("m", "0.weight") in leaves(first, *first.late)
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    second = capture.capture()
    assert ("m", "1.weight") in leaves(second)


def test_ties_between_fresh_tensors_are_followed():
    one = torch.ones(3)
    state = {"a": one, "b": one}
    capture = StateCapture({"c": state})
    assert {("c", "a"), ("c", "b")} & leaves(capture.capture()) == {("c", "a")}
    state["b"] = torch.zeros(3)
    untied = capture.capture()
    assert {("c", "a"), ("c", "b")} <= leaves(untied)
    assert torch.equal(source(untied, "c", "b"), torch.zeros(3))
    state["b"] = state["a"]
    assert ("c", "b") not in leaves(capture.capture())


def test_a_container_that_turns_to_the_parameters_memory_is_seen():
    model, optimizer = trained()
    state = {"best": model[0].weight.detach().clone()}
    capture = StateCapture({"m": model, "o": optimizer, "c": state})
    assert ("c", "best") in leaves(capture.capture())
    state["best"] = model[0].weight.detach()
    fresh = StateCapture({"m": model, "o": optimizer, "c": state}).capture()
    assert capture.capture().layout.encoded == fresh.layout.encoded
    first, second = model[1].weight, model[1].bias
    state["best"] = first.detach()
    capture.capture()
    state["best"] = second.detach()  # from one parameter to another of the same form
    fresh = StateCapture({"m": model, "o": optimizer, "c": state}).capture()
    assert capture.capture().layout.encoded == fresh.layout.encoded


def test_only_what_a_view_sees_is_kept():
    big = torch.arange(1000.0)
    image = snapshot(c={"view": big[10:14], "other": big[:2]})
    assert sum(leaf.nbytes for leaf in image.layout.leaves if leaf.path[0] == "c") == 24
    number = [leaf.path for leaf in image.layout.leaves].index(("c", "view"))
    assert torch.equal(image.leaf(number), big[10:14])


def test_empty_tensors_are_leaves_of_their_own():
    capture = StateCapture({"c": {"a": torch.empty(0, 3), "b": torch.empty(0, 3), "s": torch.tensor(1.5)}}).capture()
    assert {("c", "a"), ("c", "b"), ("c", "s")} <= leaves(capture)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.randn(2, 3), (0, 1)),
        (torch.randn(2, 3).t(), (1, 0)),
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.randn(2, 3, 4).permute(2, 0, 1), (1, 2, 0)),
        (torch.tensor(1.0), ()),
        (torch.randn(4, 6)[:, ::2], None),
        (torch.randn(1, 3).expand(4, 3), None),
        (torch.empty(0, 3).t(), (0, 1)),
    ],
)
def test_the_order_makes_dense_tensors_contiguous(tensor, order):
    assert dense_order(tensor) == order
    if order is not None:
        view = stored(tensor, order)
        assert view.is_contiguous()
        assert view.data_ptr() == tensor.data_ptr()


def test_every_dtype_of_the_format_has_a_path_through():
    from easyckpt.format.dtypes import DTYPES

    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.arange(4 * dtype.itemsize, dtype=torch.uint8)
        tensors[name] = raw % 2 == 1 if dtype == torch.bool else raw.view(dtype)
    image = snapshot(c=tensors)
    for number, leaf in enumerate(image.layout.leaves):
        if leaf.path[0] == "c":
            expected = tensors[leaf.path[1]]
            assert torch.equal(image.leaf(number).view(torch.uint8), expected.view(torch.uint8))


# What changes at each step.


def test_objects_are_one_json_document_with_a_tree_for_what_changes():
    model, optimizer = trained()
    capture = StateCapture({"m": model, "o": optimizer, "c": {"step": 3}}).capture()
    trees = json.loads(capture.objects)["trees"]
    assert set(trees) == {"o", "c", "easyckpt.rng"}
    assert trees["c"] == {"step": 3}
    assert trees["o"]["groups"][0]["lr"] == 1e-3


def test_slow_and_large_components_are_named():
    class Slow:
        def state_dict(self):
            end = time.perf_counter() + 0.004
            while time.perf_counter() < end:
                pass
            return {}

        def load_state_dict(self, state):
            pass

    capture = StateCapture({"slow": Slow(), "large": {"text": "x" * 2_000_000}, "good": {"a": 1}})
    assert [name for name, _, _ in capture.capture().slow] == ["large"]  # the first may have done other things too
    for _ in range(4):
        slow = capture.capture().slow
    named = {name: (spent, size) for name, spent, size in slow}
    assert {"slow", "large"} <= set(named)
    assert named["slow"][0] >= 4
    assert named["large"][1] >= 2_000_000


def test_time_of_a_capture_of_20000_tensors(capsys):
    model = nn.ModuleList([nn.ParameterList([torch.ones(2) for _ in range(4)]) for _ in range(1250)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    capture = StateCapture({"m": model, "o": optimizer})
    begin = time.process_time()
    first = capture.capture()
    planned = time.process_time() - begin
    times = []
    for _ in range(5):
        begin = time.process_time()
        assert capture.capture().layout is first.layout
        times.append(time.process_time() - begin)
    with capsys.disabled():
        count = len(first.layout.leaves)
        print(f"\n{count} tensors: plan {planned * 1e3:.0f} ms, capture {min(times) * 1e3:.1f} ms of CPU time")
