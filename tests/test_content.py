"""Digests of live values tell apart what differs and nothing else, in other processes too."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from easyckpt.state.content import content_digest


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    names: list[str]


DIFFERENT = [
    None,
    True,
    1,
    1.0,
    float("nan"),
    "1",
    b"1",
    [],
    [1],
    [[1]],
    {},
    {"a": 1},
    {"a": 2},
    {1: "a"},
    torch.tensor([1.0, 2.0]),
    torch.tensor([2.0, 1.0]),
    torch.tensor([[1.0, 2.0]]),
    torch.tensor([1.0, 2.0], dtype=torch.float64),
    torch.tensor([-0.0]),
    torch.tensor([0.0]),
    torch.tensor([1.0, 2.0]).bfloat16(),
    torch.empty(0),
    torch.empty(0, 3),
    np.array([1.0, 2.0]),
    np.array([1.0, 2.0], dtype=np.float32),
    Batch(torch.ones(2), ["x"]),
    Batch(torch.ones(2), ["y"]),
    collections,
]


def test_what_differs_has_different_digests():
    digests = [content_digest(value) for value in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
        (torch.arange(9)[3:], torch.arange(3, 9)),
        ((1, 2), [1, 2]),
        (np.arange(6)[::2], np.array([0, 2, 4])),
        (object(), object()),
        (np.array([1, "a", None], dtype=object), np.array([1, "a", None], dtype=object)),
    ],
)
def test_equal_content_has_equal_digests(one, other):
    assert content_digest(one) == content_digest(other)


def test_another_process_finds_the_same():
    program = (
        "import torch; from easyckpt.state.content import content_digest\n"
        "print(content_digest([torch.arange(4.0), {'a': 'b'}, object()]), end='')"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == content_digest([torch.arange(4.0), {"a": "b"}, object()])
