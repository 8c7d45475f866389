"""Tests of the CUDA path. They need one GPU and are skipped with that reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def cuda() -> None:
    torch.cuda.init()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
