"""settle_ddp: on 4 ranks a resumed run equals a straight one to the bit, and without it does not."""

from __future__ import annotations

import json
import os
import random
import traceback

import numpy
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from easyckpt.errors import UsageError
from easyckpt.state.ddp import settle_ddp
from tests.support.zygote import fork_program

RANKS = 4
STEPS, STOP = 6, 3


class Model(nn.Module):
    """Layers are used in another order than they are registered in, so the rebuilt buckets have another order."""

    def __init__(self, unused=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(37, 37) for _ in range(7))
        self.norm = nn.BatchNorm1d(37)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x):
        self.calls += 1
        for number in (3, 0, 5, 1, 6, 2, 4):
            x = self.drop(torch.tanh(self.layers[number](x)))
        return self.norm(x)


def build(**options):
    torch.manual_seed(1)
    model = DistributedDataParallel(Model(options.pop("unused", False)), bucket_cap_mb=0.01, **options)
    torch.manual_seed(100 + dist.get_rank())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model, step):
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return model(torch.randn(8, 37, generator=source)).square().sum()


def train(settle, snapshot=None, steps=STEPS, **options):
    """What a process does: build, settle, load, train on. Returns all that must be equal."""
    model, optimizer = build(**options)
    if settle:
        settle_ddp(model, lambda: loss_of(model, 0).backward())
    if snapshot is not None:
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        torch.set_rng_state(snapshot["rng"])
    for step in range(0 if snapshot is None else snapshot["step"], steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    model_state = {key: value.clone() for key, value in model.state_dict().items()}
    return {"model": model_state, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": steps}


def equal(first, second):
    return all(torch.equal(first["model"][key], second["model"][key]) for key in first["model"])


def resumed_equals_straight(settle, **options):
    straight = train(settle, **options)
    return equal(straight, train(settle, train(settle, steps=STOP, **options), **options))


def host():
    return (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())


def leaves_all_as_it_was(gradient_as_bucket_view):
    model, _ = build(gradient_as_bucket_view=gradient_as_bucket_view)
    parameters = list(model.parameters())
    parameters[0].grad = torch.full_like(parameters[0], 7.0)
    given = parameters[0].grad
    before = ({key: value.clone() for key, value in model.state_dict().items()}, host())

    def run_once():
        random.random(), numpy.random.rand()
        loss_of(model, 0).backward()

    runs = settle_ddp(model, run_once)
    return {
        "runs": runs,
        "again": settle_ddp(model, run_once),
        "state": all(torch.equal(value, before[0][key]) for key, value in model.state_dict().items()),
        "counter": model.module.calls.item(),
        "generators": host() == before[1],
        "gradient": parameters[0].grad is given and bool((given == 7).all()),
        "others": all(parameter.grad is None for parameter in parameters[1:]),
    }


def refused(run_once_of):
    model, optimizer = build()
    try:
        settle_ddp(model, run_once_of(model, optimizer))
    except UsageError as error:
        return str(error)
    return None


def stepping(model, optimizer):
    def run_once():
        loss_of(model, 0).backward()
        optimizer.step()

    return run_once


def not_reducing(model, optimizer):
    def run_once():
        with model.no_sync():
            loss_of(model, 0).backward()

    return run_once


def failing(model, optimizer):
    def run_once():
        loss_of(model, 0)
        raise UsageError("of the user")

    return run_once


def rank_main(rank, path):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=RANKS)
    results = {}
    try:
        results["without"] = resumed_equals_straight(settle=False)
        results["with"] = resumed_equals_straight(settle=True)
        results["with views"] = resumed_equals_straight(settle=True, gradient_as_bucket_view=True)
        results["static without"] = resumed_equals_straight(settle=False, static_graph=True)
        results["static with"] = resumed_equals_straight(settle=True, static_graph=True, unused=True)
        results["unused without"] = resumed_equals_straight(settle=False, find_unused_parameters=True, unused=True)
        results["unused runs"] = settle_ddp(build(find_unused_parameters=True, unused=True)[0], lambda: 1 / 0)
        results["left"] = [leaves_all_as_it_was(views) for views in (False, True)]
        results["stepping"] = refused(stepping)
        results["not reducing"] = refused(not_reducing)
        results["failing"] = refused(failing)
    except BaseException:
        results["error"] = traceback.format_exc()
        raise
    finally:
        with open(f"{path}/{rank}.json", "w") as file:
            json.dump(results, file)
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    program = "import sys\nfrom tests.test_ddp_settle import rank_main\nrank_main(int(sys.argv[1]), sys.argv[2])"
    ranks = [fork_program(program, rank, path, directory=path) for rank in range(RANKS)]
    for child in ranks:
        _, said = child.communicate()
        assert child.returncode == 0, said[-3000:]
    return [json.loads((path / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_without_it_a_resumed_run_differs(results):
    """The trap is real: else the test below could not fail."""
    assert [result["without"] for result in results] == [False] * RANKS
    assert [result["static without"] for result in results] == [False] * RANKS


@pytest.mark.parametrize("case", ["with", "with views", "static with"])
def test_with_it_a_resumed_run_equals_a_straight_one(results, case):
    assert [result[case] for result in results] == [True] * RANKS


def test_nothing_to_settle_with_unused_parameters(results):
    """Their buckets are never rebuilt: exact without settling, and settling runs nothing."""
    assert [result["unused without"] for result in results] == [True] * RANKS
    assert [result["unused runs"] for result in results] == [0] * RANKS


def test_everything_is_as_it_was(results):
    expected = {
        "runs": 2, "again": 0, "state": True, "counter": 0, "generators": True, "gradient": True, "others": True
    }  # fmt: skip
    assert [result["left"] for result in results] == [[expected, expected]] * RANKS


def test_an_optimizer_step_is_found_out(results):
    assert all("no optimizer step" in result["stepping"] for result in results)


def test_runs_that_do_not_reduce_are_found_out(results):
    assert all("no_sync" in result["not reducing"] for result in results)


def test_errors_of_the_run_come_through(results):
    assert [result["failing"] for result in results] == ["of the user"] * RANKS


def test_one_process_has_nothing_to_settle():
    assert settle_ddp(nn.Linear(2, 2), lambda: 1 / 0) == 0
