"""The global generators come back to the bit, and are nobody's but this rank's."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from support.images import image_of, problems, restore, snapshot

from easyckpt.errors import DamagedCheckpoint
from easyckpt.state.capture import StateCapture
from easyckpt.state.rng import RNG, RngComponent


@pytest.fixture(autouse=True)
def _generators():
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.normal()),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(5).tolist(),
    )


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_all_global_generators_go_on_as_they_would_have(before):
    for _ in range(before):
        draw()  # leaves a second normal value behind in Python's and NumPy's
    image = snapshot()
    expected = [draw() for _ in range(3)]
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    restore(image)
    assert [draw() for _ in range(3)] == expected


def test_a_capture_draws_from_no_generator():
    capture = StateCapture({})
    first = image_of(capture.capture())
    second = image_of(capture.capture())
    assert first.data == second.data
    assert capture.capture().layout is capture.capture().layout


def test_it_is_this_ranks_own_and_large_states_are_tensors():
    capture = StateCapture({}, rank=1, world_size=2).capture()
    assert not any(leaf.replicated for leaf in capture.layout.leaves)
    assert capture.late == []
    assert len(capture.objects) < 1000


def test_another_bit_generator_behind_numpy_comes_back_too():
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        image = snapshot()
        expected = np.random.random(3).tolist()
        np.random.random(5)
        restore(image)
        assert np.random.random(3).tolist() == expected
    finally:
        np.random.set_bit_generator(original)


def test_generators_come_last_because_loading_may_draw():
    class Drawing:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            draw()

    image = snapshot(z=Drawing())
    expected = draw()
    restore(image, z=Drawing())
    assert draw() == expected


def test_without_the_component_they_are_left_alone():
    image = snapshot(c={"a": 1})
    draw()
    before = torch.get_rng_state()
    restore(image, components=["c"], c={})
    assert torch.equal(torch.get_rng_state(), before)


def test_numpy_is_left_out_where_it_is_not_in_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    value = RngComponent().value()
    assert "numpy" not in value
    assert "numpy" not in sys.modules


def test_states_that_are_none_are_found_before_anything_changes():
    image = snapshot()
    for broken in (b'{"trees":{}}', b'{"trees":{"easyckpt.rng":{"python":3}}}', b"{}", b"[]", b"\xff"):
        image.objects = broken
        with pytest.raises(DamagedCheckpoint):
            problems(image)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["state"].update(pos=10**6),  # NumPy would read there
        lambda state: state["state"].update(key=torch.zeros(3, dtype=torch.int64)),
        lambda state: state.pop("gauss"),
        lambda state: state.update(bit_generator="PCG64"),
        lambda state: state.update(gauss="x"),
    ],
)
def test_a_state_of_numpy_that_is_none_is_found_before_anything_changes(change):
    component = RngComponent()
    value = component.value()
    change(value["numpy"])
    component.value = lambda: value
    image = image_of(StateCapture({"c": {}}, extra={RNG: component}).capture())
    with pytest.raises(DamagedCheckpoint, match="NumPy's generator is malformed"):
        problems(image, c={})


def test_generators_of_the_users_own_are_components():
    generator, fresh = torch.Generator(), torch.Generator()
    generator.manual_seed(5)
    torch.rand(3, generator=generator)
    image = snapshot(g=generator)
    expected = torch.rand(4, generator=generator)
    restore(image, g=fresh)
    assert torch.equal(torch.rand(4, generator=fresh), expected)
    assert RNG == "easyckpt.rng"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_generators_go_on_as_they_would_have():
    torch.rand(3, device="cuda")
    image = snapshot()
    expected = torch.rand(5, device="cuda")
    torch.rand(5, device="cuda")
    restore(image)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
