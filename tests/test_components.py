"""What can be a component of the state, what is refused, and what the user reads then."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from support.images import problems, restore, round_trip, snapshot
from torch import nn

from easyckpt.errors import ConfigError, PartlyApplied, StateError, UnsupportedValue
from easyckpt.state.build import make_component
from easyckpt.state.capture import StateCapture
from easyckpt.state.modules import ModuleComponent, unwrap


class Foreign:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize("name", ["", 3, None, "easyckpt.mine", "easyckpt.rng"])
def test_bad_names_are_refused(name):
    with pytest.raises(ConfigError, match="state"):
        StateCapture({name: Foreign()})


def test_the_same_object_under_two_names_is_refused():
    foreign, model = Foreign(), nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"'one' and 'two' are the same object"):
        StateCapture({"one": foreign, "two": foreign})
    with pytest.raises(ConfigError, match="same object"):
        StateCapture({"one": model, "two": nn.DataParallel(model)})


def test_objects_without_a_state_are_refused_with_the_way_out():
    for value in (3, "text", torch.zeros(2), object()):
        with pytest.raises(ConfigError, match=r"state\['x'\].*load_state_dict"):
            StateCapture({"x": value})
    with pytest.raises(ConfigError, match="dict of named components"):
        StateCapture([Foreign()])


def test_a_component_that_is_none_is_to_be_left_out():
    with pytest.raises(ConfigError, match=r"state\['scaler'\] is None: leave it out"):
        StateCapture({"scaler": None})


def test_kinds_are_told_apart():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())

    class Own(torch.optim.SGD):
        def state_dict(self):
            return super().state_dict()

    hooked = torch.optim.SGD(model.parameters())
    hooked.register_state_dict_post_hook(lambda *_: None)
    kinds = {
        "module": model,
        "optimizer": optimizer,
        "scaler": torch.amp.GradScaler("cpu"),
        "generator": torch.Generator(),
        "own generator": np.random.default_rng(0),
        "container": {},
    }
    assert {kind: make_component("x", target).kind for kind, target in kinds.items()} == {k: k for k in kinds}
    for target in (Own(model.parameters()), hooked, torch.optim.lr_scheduler.StepLR(optimizer, 1), Foreign()):
        assert make_component("x", target).kind == "object"


def test_errors_of_the_users_code_name_the_component():
    class Broken(Foreign):
        def state_dict(self):
            raise KeyError("lost")

    with pytest.raises(StateError, match=r"component 'b': state_dict\(\) raised KeyError") as caught:
        StateCapture({"b": Broken()}).capture()
    assert isinstance(caught.value.__cause__, KeyError)

    class BrokenLoad(Foreign):
        def load_state_dict(self, state):
            raise ValueError("no")

    image = snapshot(b=Foreign())
    with pytest.raises(PartlyApplied, match=r"'b'.*ValueError: no"):
        restore(image, b=BrokenLoad())


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError


def _refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        freed = torch.ones(4)
        freed.untyped_storage().resize_(0)
        return {
            "sparse": torch.ones(2, 2).to_sparse(),
            "quantized": quantized,
            "meta": torch.ones(2, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "Subclass": torch.ones(2).as_subclass(Subclass),
            "lost its storage": freed,
        }


@pytest.mark.parametrize("what", ["sparse", "quantized", "meta", "nested", "Subclass", "lost its storage"])
@pytest.mark.parametrize("place", ["container", "module", "optimizer"])
def test_tensors_that_cannot_be_exact_are_refused_with_their_path(what, place):
    tensor = _refused()[what]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    if place == "container":
        state, path = {"c": {"a": [tensor]}}, r"c\.a\.0"
    elif place == "module":
        model.register_buffer("odd", tensor)
        state, path = {"m": model}, r"m\.odd"
    else:
        optimizer.state[model.weight]["odd"] = tensor
        state, path = {"o": optimizer}, r"o\.state\.0\.odd"
    with pytest.raises(UnsupportedValue, match=f"{path}.*{what}"):
        StateCapture(state).capture()


def test_dtensor_is_refused_by_name(monkeypatch):
    class DTensor(torch.Tensor):
        pass

    with pytest.raises(UnsupportedValue, match=r"c\.w.*DTensor: sharded state is not supported yet"):
        StateCapture({"c": {"w": torch.ones(2).as_subclass(DTensor)}}).capture()


def test_lazy_modules_are_refused_until_they_have_shapes():
    model = nn.Sequential(nn.LazyLinear(3))
    capture = StateCapture({"m": model})
    with pytest.raises(UnsupportedValue, match="forward pass"):
        capture.capture()
    model(torch.ones(1, 2))
    fresh = nn.Sequential(nn.Linear(2, 3))
    round_trip({"m": model}, {"m": fresh})


def test_unsupported_values_name_their_path():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.bias]["odd"] = {"deep": [object()]}
    with pytest.raises(UnsupportedValue, match=r"o\.state\.1\.odd\.deep\.0"):
        StateCapture({"o": optimizer}).capture()
    del optimizer.state[model.bias]
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(UnsupportedValue, match=r"o\.param_groups\.0\.odd"):
        StateCapture({"o": optimizer}).capture()


def test_plain_subclasses_and_lazy_conjugates_are_kept():
    class Named(torch.Tensor):
        pass

    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    fresh = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.complex64), "c": torch.zeros(3)}
    image = snapshot(c={"a": torch.ones(2).as_subclass(Named), "b": conjugate, "c": negative})
    restore(image, c=fresh)
    assert torch.equal(fresh["a"], torch.ones(2))
    assert torch.equal(fresh["b"], conjugate.resolve_conj())
    assert torch.equal(fresh["c"], negative.resolve_neg())
    model = nn.Linear(3, 3)
    model.register_buffer("b", torch.randn(3, dtype=torch.complex64).conj())
    other = nn.Linear(3, 3)
    other.register_buffer("b", torch.zeros(3, dtype=torch.complex64))
    restore(snapshot(m=model), m=other)
    assert torch.equal(other.b, model.b.resolve_conj())


# Modules.


class Extra(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen, "tensor": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state):
        self.seen = state["seen"]
        assert torch.equal(state["tensor"], torch.full((2,), float(self.seen)))


def test_extra_state_is_honoured():
    model = nn.Sequential(Extra(), nn.Linear(2, 2))
    model[0].seen = 5
    fresh = nn.Sequential(Extra(), nn.Linear(2, 2))
    round_trip({"m": model}, {"m": fresh})
    assert fresh[0].seen == 5


def test_hooks_are_honoured_even_when_they_come_later():
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    capture = StateCapture({"m": model})
    plain = capture.capture().layout

    def add(module, state, prefix, metadata):
        state[prefix + "more"] = torch.arange(3)

    loaded = []
    model.register_state_dict_post_hook(add)
    hooked = capture.capture().layout
    assert [leaf.path for leaf in plain.leaves][:2] == [("m", "weight"), ("m", "bias")]
    assert ("m", "more") in [leaf.path for leaf in hooked.leaves]
    fresh.register_state_dict_post_hook(add)
    fresh.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: loaded.append(state.pop(prefix + "more").tolist())
    )
    restore(snapshot(m=model), m=fresh)
    assert loaded == [[0, 1, 2]]
    assert torch.equal(fresh.weight, model.weight)


def test_overridden_state_dict_is_honoured_on_class_and_instance():
    class Own(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return OrderedDict(w=self.weight)

        def load_state_dict(self, state, strict=True):
            with torch.no_grad():
                self.weight.copy_(state["w"])

    model, fresh = Own(2, 2), Own(2, 2)
    assert next(leaf.path for leaf in snapshot(m=model).layout.leaves) == ("m", "w")
    round_trip({"m": model}, {"m": fresh})

    patched = nn.Linear(2, 2)
    capture = StateCapture({"m": patched})
    capture.capture()
    patched.state_dict = lambda **_: {"only": patched.bias}
    assert ("m", "only") in [leaf.path for leaf in capture.capture().layout.leaves]


def test_a_checkpoint_of_a_plain_module_loads_into_one_with_hooks_and_back():
    plain, hooked = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    hooked.register_load_state_dict_post_hook(lambda *_: None)
    plain.running_mean.add_(1)
    restore(snapshot(m=plain), m=hooked)
    assert torch.equal(hooked.running_mean, plain.running_mean)
    hooked.running_mean.add_(1)
    restore(snapshot(m=hooked), m=plain)
    assert torch.equal(hooked.running_mean, plain.running_mean)


def test_non_persistent_buffers_are_not_state():
    model = nn.Linear(2, 2)
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    capture = StateCapture({"m": model})
    assert {leaf.path[1] for leaf in capture.capture().layout.leaves if leaf.path[0] == "m"} == {
        "weight",
        "bias",
        "kept",
    }
    model._non_persistent_buffers_set.discard("scratch")
    assert ("m", "scratch") in [leaf.path for leaf in capture.capture().layout.leaves]


def test_names_are_those_of_state_dict():
    model = nn.Sequential(
        OrderedDict(a=nn.TransformerEncoderLayer(4, 2, 8), b=nn.BatchNorm1d(3), c=nn.LSTM(2, 2), d=nn.ModuleDict())
    )
    model.add_module("again", model.b)
    model.add_module("none", None)
    component = ModuleComponent("m", model)
    part = component.collect()
    assert part.firm
    paths, _ = component.describe(part)
    reference = model.state_dict(keep_vars=True)
    assert [path[1] for path in paths] == list(reference)
    assert all(one is other for one, other in zip(part.tensors, reference.values(), strict=True))


def test_wrappers_are_looked_through_in_any_nesting():
    def build(wrapped):
        torch.manual_seed(1 if wrapped else 2)
        core = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        if not wrapped:
            return core
        core[0] = torch.compile(core[0], backend="eager")
        return torch.compile(nn.DataParallel(torch.compile(core, backend="eager")), backend="eager")

    model, fresh = build(True), build(False)
    assert isinstance(unwrap(model), nn.Sequential)
    assert [leaf.path[1] for leaf in snapshot(m=model).layout.leaves][:2] == ["0.weight", "0.bias"]
    round_trip({"m": model}, {"m": fresh})
    round_trip({"m": fresh}, {"m": build(True)})


def test_ddp_parameters_are_replicated_and_buffers_are_not(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        core = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model = nn.parallel.DistributedDataParallel(core)
        other = nn.Linear(2, 2)
        params = [*core.parameters(), *other.parameters()]
        optimizer = torch.optim.AdamW(params)
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = {"m": model, "other": other, "o": optimizer}
        capture = StateCapture(state, rank=0, world_size=2)
        replicated = {leaf.path for leaf in capture.capture().layout.leaves if leaf.replicated}
        names = {("m", name) for name, _ in core.named_parameters()}
        moments = {("o", "state", n, key) for n in range(4) for key in ("step", "exp_avg", "exp_avg_sq")}
        assert replicated == names | moments
        assert not any(leaf.replicated for leaf in capture.capture(replicated_allowed=False).layout.leaves)
        assert len(list(capture.components["m"].replicated())) == 4
        model.parameters_to_ignore = {"0.weight"}
        assert {path for path in replicated if path[1] == "0.weight"}
        assert len(list(capture.components["m"].replicated())) == 3
        alone = StateCapture(state, rank=0, world_size=1)
        assert not any(leaf.replicated for leaf in alone.capture().layout.leaves)
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp_is_refused_by_name():
    class FullyShardedDataParallel(nn.Linear):
        pass

    with pytest.raises(UnsupportedValue, match="'m' holds an FSDP module"):
        StateCapture({"m": nn.Sequential(FullyShardedDataParallel(2, 2))}).capture()


def test_kinds_that_do_not_fit_each_other_are_a_problem():
    image = snapshot(x={"a": 1})
    assert problems(image, x=nn.Linear(2, 2)) == ["component 'x' is of kind container in the checkpoint, module here"]
    assert problems(image, x=[1]) == ["x is a dict in the checkpoint and a list here"]
