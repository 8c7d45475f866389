"""A saved state goes into fresh objects to the bit, in place, and is checked before anything changes."""

from __future__ import annotations

import argparse
import collections
import copy
import json
import struct
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.images import Image, assert_same, problems, restore, round_trip, snapshot
from torch import nn

from easyckpt.errors import DamagedCheckpoint
from easyckpt.format.image import Layout
from easyckpt.state.apply import saved_value
from easyckpt.state.capture import StateCapture

schedulers = torch.optim.lr_scheduler


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 2 * 2, 2))


def train(model, optimizer, steps=3, scheduler=None):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 3, 4, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
    return losses


# Bits.


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_nan_payloads_negative_zero_and_memory_formats_survive():
    patterns = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000]
    special = torch.frombuffer(bytearray(struct.pack("<6I", *patterns)), dtype=torch.float32)
    saved = {
        "special": special,
        "half": special.view(torch.bfloat16),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).t(),
        "strided": special.repeat(4).view(4, 6)[:, ::2],
        "expanded": special[:1].expand(3),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "signaling": special.double(),
    }
    fresh = {key: torch.empty_like(value) for key, value in saved.items()}
    live = dict(fresh)
    round_trip({"c": saved}, {"c": fresh})
    assert all(fresh[key] is live[key] for key in saved)
    assert fresh["channels"].is_contiguous(memory_format=torch.channels_last)
    replaced = {}
    restore(snapshot(c=saved), c=replaced)
    for key, value in saved.items():
        assert replaced[key].shape == value.shape
        assert bits(replaced[key]) == bits(value), key
    assert replaced["channels"].stride() == saved["channels"].stride()
    assert replaced["transposed"].stride() == saved["transposed"].stride()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_filled_in_place_whatever_the_strides():
    from easyckpt.format.dtypes import DTYPES

    for name, dtype in DTYPES.items():
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
        value = (raw % 2 == 1 if dtype == torch.bool else raw.view(dtype)).view(2, 3)
        fresh = {"a": torch.empty(3, 2, dtype=dtype).t()}
        live = fresh["a"]
        restore(snapshot(c={"a": value}), c=fresh)
        assert fresh["a"] is live
        for i in range(2):
            for j in range(3):
                one, other = live[i, j].reshape(1), value[i, j].reshape(1)
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


def test_into_expanded_and_inference_tensors():
    model, fresh = nn.Module(), nn.Module()
    model.register_buffer("e", torch.tensor([3.0]).expand(4))
    fresh.register_buffer("e", torch.tensor([0.0]).expand(4))
    with torch.inference_mode():
        model.register_buffer("i", torch.ones(2))
        fresh.register_buffer("i", torch.zeros(2))
    round_trip({"m": model}, {"m": fresh})
    assert fresh.e.tolist() == [3.0] * 4


# Modules.


def test_modules_are_filled_in_place():
    model, fresh = network(1).to(memory_format=torch.channels_last), network(2)
    model(torch.randn(3, 3, 4, 4))
    fresh = fresh.to(memory_format=torch.channels_last)
    before = [(id(p), p.data_ptr()) for p in (*fresh.parameters(), *fresh.buffers())]
    round_trip({"m": model}, {"m": fresh})
    assert [(id(p), p.data_ptr()) for p in (*fresh.parameters(), *fresh.buffers())] == before
    assert all(parameter.requires_grad for parameter in fresh.parameters())


def test_tied_weights_are_written_once_and_tied_again():
    def build(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
        model["head"].weight = model["embed"].weight
        return model

    model, fresh = build(1), build(2)
    image = snapshot(m=model)
    assert sum(leaf.nbytes for leaf in image.layout.leaves if leaf.path[0] == "m") == (15 + 5) * 4
    round_trip({"m": model}, {"m": fresh})
    assert fresh["head"].weight is fresh["embed"].weight
    container = {"a": torch.ones(2)}
    container["b"] = container["a"]
    untied = {}
    restore(snapshot(c=container), c=untied)
    assert untied["a"] is untied["b"]


def test_tensors_that_are_one_here_and_two_in_the_checkpoint_are_a_problem():
    saved, live = (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(2))
    live["b"].weight = live["a"].weight
    (found,) = problems(snapshot(m=saved), m=live)
    assert found == "m: 'a.weight' and 'b.weight' are one tensor here, two in the checkpoint"
    restore(snapshot(m=live), m=saved)
    assert torch.equal(saved["a"].weight, saved["b"].weight)


def test_extra_state_and_own_buffers_may_change_their_shape():
    class Sized(nn.Linear):
        def get_extra_state(self):
            return torch.zeros(self.extra)

        def set_extra_state(self, state):
            self.extra = len(state)

    saved, live = Sized(2, 2), Sized(2, 2)
    saved.extra, live.extra = 3, 1
    restore(snapshot(m=saved), m=live)
    assert live.extra == 3
    narrow = Sized(1, 2)
    narrow.extra = 3
    assert "m: 'weight' has shape (2, 2) in the checkpoint and (2, 1) here" in problems(snapshot(m=saved), m=narrow)


# Optimizers.

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "capturable": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adadelta": torch.optim.Adadelta,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_never_stopped(name):
    model, fresh = network(1), network(2)
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](fresh.parameters())
    train(model, optimizer)
    image = snapshot(m=model, o=optimizer)
    expected = train(model, optimizer)
    restore(image, m=fresh, o=other)
    assert train(fresh, other) == expected
    assert_same(snapshot(m=model, o=optimizer), snapshot(m=fresh, o=other))


def test_lbfgs_with_its_lists_goes_on():
    def run(model, optimizer, steps):
        def closure():
            optimizer.zero_grad()
            loss = model(data).square().sum()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(steps)]

    data = torch.randn(4, 3)
    model, fresh = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    other = torch.optim.LBFGS(fresh.parameters(), max_iter=2)
    run(model, optimizer, 3)
    round_trip({"m": model, "o": optimizer}, {"m": fresh, "o": other})
    assert run(fresh, other, 3) == run(model, optimizer, 3)


def test_state_keeps_its_dtype_beside_bf16_parameters():
    def build():
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return parameter, torch.optim.SGD([parameter])

    (saved, optimizer), (live, other) = build(), build()
    optimizer.state[saved] = {"master": torch.tensor([1.00001, 2.00001, 3.00001])}
    restore(snapshot(o=optimizer), o=other)
    assert other.state[live]["master"].dtype == torch.float32
    assert torch.equal(other.state[live]["master"], optimizer.state[saved]["master"])


def test_partial_state_of_frozen_and_unused_parameters():
    def build(seed):
        torch.manual_seed(seed)
        model = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
        model[1].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), (fresh, other) = build(1), build(2)
    for part in (0, 3):  # 1 is frozen, 2 is never used
        model[part](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 4
    for parameter in fresh.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()  # has state where the saved one has none
    other.state[fresh[0].weight]["stale"] = torch.ones(1)
    round_trip({"m": model, "o": optimizer}, {"m": fresh, "o": other})
    assert len(other.state) == 4
    assert [list(map(id, fresh.parameters())).index(id(p)) for p in other.state] == [0, 1, 6, 7]
    nothing = torch.optim.AdamW(network(1).parameters())
    target = network(2)
    trained = torch.optim.AdamW(target.parameters())
    train(target, trained)
    round_trip({"o": nothing}, {"o": trained})
    assert len(trained.state) == 0


def test_param_groups_keep_identity_and_exact_values():
    def build(lr):
        model = network()
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2], "lr": lr}, {"params": parameters[2:], "betas": (0.5, 0.75)}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        optimizer.param_groups[0].update(tags=[], more={1: "int key", "t": (1, [2])}, ratio=float("nan"))
        return optimizer

    optimizer, other = build(0.1 + 0.2), build(0.5)
    optimizer.param_groups[0]["tags"].append(3)
    groups, first = other.param_groups, other.param_groups[0]
    tags, parameters = first["tags"], first["params"]
    round_trip({"o": optimizer}, {"o": other})
    assert other.param_groups is groups
    assert groups[0] is first
    assert first["tags"] is tags
    assert first["params"] is parameters
    assert (tags, first["more"], first["lr"]) == ([3], {1: "int key", "t": (1, [2])}, 0.1 + 0.2)
    assert groups[1]["betas"] == (0.5, 0.75)
    assert isinstance(groups[1]["betas"], tuple)


def test_state_tensors_that_fit_are_filled_in_place():
    model, fresh = network(1), network(2)
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(fresh.parameters())
    train(model, optimizer)
    train(fresh, other, 1)
    before = [id(value) for entry in other.state.values() for value in entry.values()]
    entries = [id(entry) for entry in other.state.values()]
    restore(snapshot(o=optimizer), o=other)
    assert [id(value) for entry in other.state.values() for value in entry.values()] == before
    assert [id(entry) for entry in other.state.values()] == entries


def test_states_of_any_form_survive():
    def build():
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
        return parameters, torch.optim.SGD(parameters)

    (saved, optimizer), (live, other) = build(), build()
    optimizer.state[saved[0]] = {"step": 2**70, 3: torch.ones(2), ("a", 1): {"deep": [torch.zeros(3), float("inf")]}}
    optimizer.state[saved[1]] = torch.full((2,), 4.0)
    optimizer.state["global"] = {"count": 7, "tensor": torch.arange(3)}
    optimizer.state[saved[3]] = {}
    round_trip({"o": optimizer}, {"o": other})
    assert other.state[live[0]]["step"] == 2**70
    assert list(other.state[live[0]]) == ["step", 3, ("a", 1)]
    assert torch.equal(other.state[live[1]], torch.full((2,), 4.0))
    assert other.state["global"]["count"] == 7
    assert live[2] not in other.state
    assert other.state[live[3]] == {}


def test_names_of_parameters_come_back():
    model, fresh = network(1), network(2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    other = torch.optim.AdamW((f"x.{name}", p) for name, p in fresh.named_parameters())
    image = snapshot(o=optimizer)
    assert b"0.weight" not in image.objects
    restore(image, o=other)
    assert other.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_memory_format_of_new_state_follows_the_saved_one():
    model, fresh = (network(seed).to(memory_format=torch.channels_last) for seed in (1, 2))
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(fresh.parameters())
    train(model, optimizer)
    restore(snapshot(o=optimizer), o=other)
    for one, another in zip(optimizer.state.values(), other.state.values(), strict=True):
        for key in one:
            assert another[key].stride() == one[key].stride()


def test_optimizers_that_do_not_fit_are_problems_and_stay_as_they_are():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    image = snapshot(o=optimizer)
    parameters = list(network().parameters())
    two = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    assert "param groups of [6] parameters in the checkpoint, [2, 4] here" in problems(image, o=two)[0]
    (found,) = problems(image, o=torch.optim.AdamW([*parameters[:5], nn.Parameter(torch.ones(7))]))
    assert found == "o: parameter 5 has shape (2,) in the checkpoint and (7,) here"
    assert len(two.state) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("there", "here"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_state_follows_its_parameter_to_another_device(there, here, fused):
    model, fresh = network(1).to(there), network(2).to(here)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    other = torch.optim.AdamW(fresh.parameters(), fused=fused)
    model(torch.randn(2, 3, 4, 4, device=there)).sum().backward()
    optimizer.step()
    restore(snapshot(m=model, o=optimizer), m=fresh, o=other)
    for entry in other.state.values():
        assert entry["exp_avg"].device.type == here
    fresh(torch.randn(2, 3, 4, 4, device=here)).sum().backward()
    other.step()
    assert all(entry["step"] == 2 for entry in other.state.values())


# Schedulers and other objects.

SCHEDULERS = {
    "step": lambda o: schedulers.StepLR(o, 2),
    "multi": lambda o: schedulers.MultiStepLR(o, [1, 3, 3]),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "onecycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "warm": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, 2)]),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rate_goes_on_from_the_absolute_step(name):
    def build(seed):
        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"m": model, "o": optimizer, "s": SCHEDULERS[name](optimizer)}

    def rates(state, steps):
        found = []
        for _ in range(steps):
            train(state["m"], state["o"], 1, state["s"])
            found.append(state["o"].param_groups[0]["lr"])
        return found

    straight, resumed = build(1), build(2)
    rates(straight, 4)
    round_trip(straight, resumed)
    assert rates(resumed, 5) == rates(straight, 5)


def test_plateau_and_its_best_value():
    def build():
        optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
        return {"o": optimizer, "s": schedulers.ReduceLROnPlateau(optimizer, patience=1)}

    straight, resumed = build(), build()
    for metric in (3.0, 2.0, 2.5):
        straight["s"].step(metric)
    round_trip(straight, resumed)
    assert resumed["s"].best == 2.0
    assert resumed["s"].num_bad_epochs == 1


class EarlyStopping:
    def __init__(self):
        self.best, self.waited, self.history = float("inf"), 0, []

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


def test_counters_of_early_stopping_and_the_best_metric_come_back():
    stopping = EarlyStopping()
    stopping.best, stopping.waited, stopping.history = 0.25, 3, [1.0, 0.25]
    meters = {"best": 0.1 + 0.2, "epoch": 3, "curve": [0.5, float("nan")]}
    fresh, live = EarlyStopping(), {"best": None, "epoch": 0, "curve": []}
    restore(snapshot(stop=stopping, meters=meters), stop=fresh, meters=live)
    assert vars(fresh) == vars(stopping)
    assert (live["best"], live["epoch"], len(live["curve"])) == (0.1 + 0.2, 3, 2)


def test_objects_that_keep_what_they_are_given_get_their_own():
    class Keeper:
        def __init__(self, tensor):
            self.shadow = {"w": tensor, "tied": tensor}

        def state_dict(self):
            return self.shadow

        def load_state_dict(self, state):
            self.shadow = state

    fresh = Keeper(torch.zeros(3))
    round_trip({"k": Keeper(torch.arange(3.0))}, {"k": fresh})
    assert fresh.shadow["w"].tolist() == [0, 1, 2]
    assert fresh.shadow["w"] is fresh.shadow["tied"]


# GradScaler.


def scaled(seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", growth_interval=3)


def run_scaled(model, optimizer, scaler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.state_dict()


@pytest.mark.parametrize(("saved_steps", "live_steps"), [(4, 0), (4, 2), (0, 2), (0, 0)])
def test_the_scaler_goes_on_wherever_it_has_begun(saved_steps, live_steps):
    straight, resumed = scaled(1), scaled(2)
    run_scaled(*straight, saved_steps)
    run_scaled(*resumed, live_steps)
    straight[2].set_growth_factor(3.0)
    image = snapshot(**dict(zip("mos", straight, strict=True)))
    restore(image, **dict(zip("mos", resumed, strict=True)))
    assert resumed[2].state_dict() == straight[2].state_dict()
    generator = torch.get_rng_state()
    expected = run_scaled(*straight, 4)
    torch.set_rng_state(generator)
    assert run_scaled(*resumed, 4) == expected


def test_the_scaler_is_read_without_waiting_for_its_device(monkeypatch):
    model, optimizer, scaler = scaled(1)
    run_scaled(model, optimizer, scaler, 2)

    def wait(*_):
        raise AssertionError("a host sync")

    monkeypatch.setattr(torch.Tensor, "item", wait)
    monkeypatch.setattr(type(scaler), "get_scale", wait)
    capture = StateCapture({"s": scaler}).capture()
    assert next(n for n, source in enumerate(capture.sources) if source is scaler._scale) in capture.early


def test_an_enabled_scaler_does_not_become_a_disabled_one_silently():
    image = snapshot(s=torch.amp.GradScaler("cpu", enabled=False))
    assert problems(image, s=torch.amp.GradScaler("cpu", enabled=False)) == []
    (found,) = problems(image, s=torch.amp.GradScaler("cpu"))
    assert found == "s: the scaler is disabled in the checkpoint and enabled here"


# Containers.


class Point(NamedTuple):
    x: object
    y: object


def everything():
    return {
        "dict": {1: "a", 2.5: None, None: True, (1, "b"): [], "": {}, "a.b/c": "ü"},
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, a=[1]),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], maxlen=3),
        "set": {1, 2},
        "frozen": frozenset({3}),
        "tuple": (1, [2, torch.ones(2)], Point(3, [4])),
        "bytes": b"\x00\xff",
        "array": bytearray(b"12"),
        "numpy": np.array([1.5, np.nan]),
        "namespace": argparse.Namespace(a=[1]),
        "simple": types.SimpleNamespace(b={"c": 1}),
        "float": -0.0,
        "int": 3**200,
        "dtype": torch.bfloat16,
        "list": [[], [None], {"deep": {"er": torch.arange(3)}}],
    }


def test_containers_of_all_kinds_survive_into_an_empty_and_into_a_full_one():
    for fresh in ({}, everything()):
        round_trip({"c": everything()}, {"c": fresh})
        assert list(fresh) == list(everything())
        assert type(fresh["tuple"]) is tuple


def test_containers_and_fitting_tensors_keep_their_identity():
    saved, fresh = everything(), everything()
    for key in ("dict", "ordered", "default"):
        fresh[key]["old"] = 1
    fresh["list"].append("more")
    fresh["set"].add(9)
    fresh["deque"].append(9)
    fresh["counter"]["z"] += 2
    fresh["counter"]["a"] += 5
    fresh["array"] += b"more"
    fresh["numpy"][:] = 0
    fresh["tuple"][1][1].zero_()
    fresh["namespace"].other = 3
    live = {
        key: fresh[key]
        for key in (
            "dict", "ordered", "default", "counter", "deque", "set", "array", "numpy", "namespace", "simple", "list",
            "tuple",
        )
    }  # fmt: skip
    inner = (fresh["tuple"][1], fresh["tuple"][1][1], fresh["list"][2], fresh["list"][2]["deep"]["er"])
    round_trip({"c": saved}, {"c": fresh})
    assert {key: id(value) for key, value in live.items() if key != "tuple"} == {
        key: id(fresh[key]) for key in live if key != "tuple"
    }
    assert fresh["tuple"][1] is inner[0]
    assert fresh["tuple"][1][1] is inner[1]
    assert isinstance(fresh["tuple"][2], Point)
    assert fresh["list"][2] is inner[2]
    assert inner[3] is fresh["list"][2]["deep"]["er"]


def test_tensors_that_do_not_fit_are_replaced():
    fresh = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64), "c": "text"}
    old = dict(fresh)
    restore(snapshot(c={"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(1)}), c=fresh)
    assert all(fresh[key] is not old[key] for key in fresh)
    assert old["a"].tolist() == [0, 0, 0]
    assert {key: value.dtype for key, value in fresh.items()} == dict.fromkeys("abc", torch.float32)


def test_lists_and_other_containers_are_components_too():
    for saved, fresh in (([1, torch.ones(2)], []), ({3}, {4, 5}), (collections.deque([1]), collections.deque())):
        round_trip({"c": saved}, {"c": fresh})


# Checking.


def test_what_does_not_fit_is_named_and_nothing_is_changed():
    image = snapshot(m=nn.Linear(3, 2), gone=[1])
    live = nn.Linear(4, 2).double()
    before = copy.deepcopy(live.state_dict())
    assert problems(image, m=live, new=[2]) == [
        "component 'gone' is in the checkpoint and not here",
        "component 'new' is here and not in the checkpoint",
        "m: 'weight' has shape (2, 3) in the checkpoint and (2, 4) here",
        "m: 'bias' is float32 in the checkpoint and float64 here",
    ]
    assert all(torch.equal(before[key], value) for key, value in live.state_dict().items())


@pytest.mark.parametrize("hooked", [False, True])
def test_strictness_about_names(hooked):
    torch.manual_seed(0)
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    saved.register_buffer("there", torch.ones(1))
    live.register_buffer("here", torch.ones(1))
    if hooked:
        live.register_load_state_dict_post_hook(lambda module, keys: None)
    image = snapshot(m=saved)
    assert problems(image, m=live) == [
        "m: 'there' is in the checkpoint and not here",
        "m: 'here' is here and not in the checkpoint",
    ]
    restore(image, strict=False, m=live, new=[1])
    assert torch.equal(live.weight, saved.weight)


def test_components_limit_both_sides():
    image = snapshot(a=[1], b=[2])
    a, b = [0], [0]
    restore(image, components=["b"], b=b, a=a, c=[])
    assert (a, b) == ([0], [2])
    assert problems(image, components=["zz"], a=a) == ["component 'zz' is neither in the checkpoint nor here"]
    assert "component 'b' is in the checkpoint and not here" in problems(image, components=["b"], a=a)


def mutations(tree):
    """Trees that differ from `tree` in one place."""
    yield from (None, -1, 10**6, "x", [], {}, [None], {"$": "tensor", "v": 10**6})
    if isinstance(tree, dict):
        for key in tree:
            yield {k: v for k, v in tree.items() if k != key}
            for changed in mutations(tree[key]):
                yield {**tree, key: changed}
    elif isinstance(tree, list):
        for place, item in enumerate(tree[:2]):
            yield tree[:place] + tree[place + 1 :]
            for changed in mutations(item):
                yield [*tree[:place], changed, *tree[place + 1 :]]


def test_malformed_trees_are_damage_or_problems_and_change_nothing():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["n"] = 3
    state = {"m": model, "o": optimizer, "s": torch.amp.GradScaler("cpu"), "g": torch.Generator()}
    image = snapshot(**state)
    layout, objects = json.loads(image.layout.encoded), json.loads(image.objects)
    before = snapshot(**state)
    tried = 0
    for trees in mutations(layout["trees"]):
        changed = Layout(**{**_fields(image.layout), "trees": trees})
        tried += _is_found_or_harmless(Image(changed, image.data, image.objects), state)
    for trees in mutations(objects["trees"]):
        text = json.dumps({"trees": trees}).encode()
        tried += _is_found_or_harmless(Image(image.layout, image.data, text), state)
    assert tried > 300
    assert_same(before, snapshot(**state))


def _fields(layout):
    names = ("leaves", "own_bytes", "image_bytes", "trees", "rank", "world_size")
    return {name: getattr(layout, name) for name in names}


def _is_found_or_harmless(image, state):
    try:
        return bool(problems(image, **state))
    except DamagedCheckpoint:
        return True


def test_tools_can_read_a_component_without_the_live_object():
    model = nn.Linear(2, 2)
    image = snapshot(m=model, c={"a": [torch.ones(2), 3]})
    value = saved_value(image.layout, image.layout.trees, image.objects, "m", image.leaf)
    assert list(value) == ["weight", "bias"]
    assert torch.equal(value["weight"], model.weight)
    value = saved_value(image.layout, image.layout.trees, image.objects, "c", image.leaf)
    assert torch.equal(value["a"][0], torch.ones(2))
