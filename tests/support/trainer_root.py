"""Roots that look like those of Hugging Face's Trainer, made without it: a small plan writes files of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from easyckpt import exporting_torch
from easyckpt.dialects import of_trainer
from easyckpt.engine import Checkpointer
from easyckpt.format.dtypes import DTYPES
from easyckpt.format.image import Layout
from easyckpt.format.safetensors import make_header
from easyckpt.prospect import Prospect
from easyckpt.saving.parts_writer import PlannedFile, PlannedFiles
from easyckpt.saving.writer import SnapshotBytes

WEIGHTS, OPTIMIZER, ODD = "model.safetensors", "optimizer.pt", "more/odd.bin"
FILES = (WEIGHTS, OPTIMIZER, ODD)
#: What stands before the tensors of the odd file, so that none of them is aligned.
BEFORE = b"odd"


class SmallPlan:
    """Weights and optimizer state in files of the framework's kinds, the component `odd` in one where nothing is
    aligned, and all else nowhere: it is carried. `whole` as in PlannedFiles."""

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole

    def __call__(self, view: SnapshotBytes, layout: Layout) -> PlannedFiles:
        if view.meta.rank:
            return PlannedFiles([], whole=self._whole)
        leaves: dict[str, list[int]] = {}
        for number, leaf in enumerate(layout.leaves):
            leaves.setdefault(str(leaf.path[0]), []).append(number)
        files = [_weights(view, layout, leaves["model"])]
        if self._whole:
            files.append(_optimizer(view, layout, leaves["optimizer"]))
            odd = PlannedFile(ODD)
            odd.add(BEFORE)
            for number in leaves.get("odd", []):
                odd.add(_bytes(view, layout, number), number)
            files.append(odd)
        return PlannedFiles(files, whole=self._whole)


def _bytes(view: SnapshotBytes, layout: Layout, number: int) -> Any:
    return view.at(layout.leaves[number].offset, layout.leaves[number].nbytes)


def _weights(view: SnapshotBytes, layout: Layout, numbers: list[int]) -> PlannedFile:
    file, leaves = PlannedFile(WEIGHTS), [layout.leaves[number] for number in numbers]
    file.add(make_header(((str(leaf.path[1]), leaf.dtype, leaf.shape) for leaf in leaves), {"format": "pt"}))
    for number in numbers:
        file.add(_bytes(view, layout, number), number)
    return file


def _optimizer(view: SnapshotBytes, layout: Layout, numbers: list[int]) -> PlannedFile:
    file, leaves = PlannedFile(OPTIMIZER), [layout.leaves[number] for number in numbers]
    state = {str(leaf.path): torch.empty(leaf.stored_shape, dtype=DTYPES[leaf.dtype]) for leaf in leaves}

    def pieces(place: int) -> Iterator[memoryview]:
        file.places[numbers[place]] = file.nbytes
        yield memoryview(_bytes(view, layout, numbers[place])).cast("B")

    exporting_torch.save(state, [leaf.nbytes for leaf in leaves], pieces, file.add)
    return file


def state_of(seed: int = 0, odd: int = 1000) -> dict[str, Any]:
    """A small state; `odd` elements lie in the odd file."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.01),
        "odd": {"tensor": torch.randn(odd, dtype=torch.float64), "flag": torch.ones(3, dtype=torch.uint8)},
        "progress": {"epoch": 0, "kept": torch.arange(7)},
    }


def train(checkpointer: Checkpointer, state: dict[str, Any], until: int, every: int) -> None:
    """Go on to step `until` from wherever it loads, saving every so many steps."""
    for step in range(checkpointer.load().step + 1, until + 1):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(3, 4)).pow(2).mean().backward()
        state["optimizer"].step()
        state["odd"]["tensor"] += 1
        state["progress"]["epoch"] = step
        checkpointer.log(loss=1.0 / step)
        if step % every == 0:
            checkpointer.save(step, wait=True)


def make(root: Path, state: dict[str, Any], *, until: int = 6, every: int = 2, whole: bool = True) -> dict[str, Any]:
    """A Trainer-like root with a checkpoint every so many steps; returns `state`."""
    prospect = Prospect(
        root, of_trainer(SmallPlan(whole=whole)), max_ckpt_num=None, save_storage_interval=10**9, signals=()
    )
    with prospect.checkpointer(state) as checkpointer:
        train(checkpointer, state, until, every)
    return state


def make_native(root: Path, state: dict[str, Any], *, until: int = 6, every: int = 2) -> dict[str, Any]:
    """The same training in a root of ours."""
    with Checkpointer(root, state, max_ckpt_num=None, save_storage_interval=10**9, signals=()) as checkpointer:
        train(checkpointer, state, until, every)
    return state


def make_foreign(root: Path, step: int) -> Path:
    """What the Trainer itself has written, as far as anybody looks at it here."""
    directory = root / f"checkpoint-{step}"
    directory.mkdir()
    (directory / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    return directory
