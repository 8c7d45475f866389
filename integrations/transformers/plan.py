"""The files of a checkpoint, made of a snapshot: what the Trainer would have written at that step.

Nothing here looks at a live object, so it runs beside the training, and for a snapshot of any age. Tensors are not
copied: files are described by ranges of the snapshot.
"""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from easyckpt import exporting_torch
from easyckpt.errors import SaveFailed
from easyckpt.format.canonical import loads
from easyckpt.format.difference import ASIDE
from easyckpt.format.dtypes import DTYPES, ITEM_BYTES
from easyckpt.format.image import Layout
from easyckpt.format.layout import SAFETENSORS
from easyckpt.format.safetensors import make_header
from easyckpt.integrations.transformers.names import (
    ARGUMENTS_FILE,
    FILES,
    OPTIMIZER,
    OPTIMIZER_FILE,
    PROGRESS,
    SCALER,
    SCALER_FILE,
    SCHEDULER,
    SCHEDULER_FILE,
    STATE_FILE,
    WEIGHTS,
    rng_file,
)  # fmt: skip
from easyckpt.integrations.transformers.progress import state_json
from easyckpt.saving.parts_writer import PlannedFile, PlannedFiles
from easyckpt.saving.writer import SnapshotBytes
from easyckpt.state.components import Saved, read_saved
from easyckpt.state.optimizer_dict import optimizer_state_dict
from easyckpt.state.rng import RNG

_log = logging.getLogger("easyckpt")


class Planner:
    """Of one rank. `model_only`: as ``save_only_model`` has it; `device`: the rank's GPU."""

    def __init__(self, *, world_size: int, model_only: bool, device: int = 0) -> None:
        self._world_size, self._model_only, self._device = world_size, model_only, device

    def __call__(self, view: SnapshotBytes, layout: Layout) -> PlannedFiles:
        """The files of this snapshot: see `easyckpt.saving.parts_writer.Plan`."""
        values, rank = _Values(view, layout), view.meta.rank
        added = _added(values)
        files: list[PlannedFile] = []
        if rank == 0:
            files += _model_files(values, model_only=self._model_only)
        if not self._model_only:
            if rank == 0:
                files += _training_files(values)
            files.append(
                _small(rng_file(rank, self._world_size), _archived(_rng(values, self._world_size, self._device)))
            )
        if rank == 0:
            files.append(_small(STATE_FILE, state_json(values.value(PROGRESS))))
        own = {file.name for file in added}  # what the program writes itself counts, under whatever name
        return PlannedFiles([file for file in files if file.name not in own] + added, whole=not self._model_only)


class _Values:
    """What is in a snapshot, by component."""

    def __init__(self, view: SnapshotBytes, layout: Layout) -> None:
        self.view, self.layout = view, layout
        objects, trees = loads(bytes(view.objects)), layout.trees
        assert isinstance(objects, dict)
        assert isinstance(trees, dict)
        self._objects, self._trees = objects["trees"], trees

    def __contains__(self, name: str) -> bool:
        return name in self._trees

    def saved(self, name: str) -> Saved:
        """The component as it is stored."""
        assert isinstance(self._objects, dict)
        return read_saved(name, self.layout, self._trees, self._objects)

    def value(self, name: str) -> Any:
        """The component's value; its tensors are copied."""
        saved = self.saved(name)
        return saved.decode(saved.dynamic, lambda number: self.tensor(saved.numbers[number]))

    def tensor(self, number: int) -> torch.Tensor:
        """A copy of leaf `number`."""
        leaf = self.layout.leaves[number]
        stored = torch.frombuffer(bytearray(self.bytes(number)), dtype=torch.uint8) if leaf.nbytes else torch.empty(0)
        typed = stored.view(DTYPES[leaf.dtype]) if leaf.nbytes else torch.empty(0, dtype=DTYPES[leaf.dtype])
        return _in_logical_order(typed.view(leaf.stored_shape), leaf.order)

    def bytes(self, number: int) -> Any:
        """The bytes of leaf `number`, in the snapshot's memory."""
        leaf = self.layout.leaves[number]
        return self.view.at(leaf.offset, leaf.nbytes) if leaf.nbytes else b""

    def numbers(self) -> dict[tuple[Any, ...], int]:
        """Leaf numbers by path."""
        return {leaf.path: number for number, leaf in enumerate(self.layout.leaves)}


def _in_logical_order(stored: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return stored.permute([order.index(dimension) for dimension in range(len(order))])


def _added(values: _Values) -> list[PlannedFile]:
    """What the program has added to this step's checkpoint, as far as this rank carries it."""
    kept = values.value(FILES)[ASIDE]
    found = kept["added"] if kept["learnt_at"] == values.view.meta.step else {}
    return [_small(name, bytes(content.numpy().tobytes())) for name, content in found.items()]


def _model_files(values: _Values, *, model_only: bool) -> list[PlannedFile]:
    """Weights by the recipe, and what lies beside them."""
    kept = values.value(FILES)[ASIDE]
    small = kept["small"]
    numbers = values.numbers()
    recipes = json.loads(bytes(kept["recipe"].tolist()).decode() or "[]")
    step = values.view.meta.step
    if kept["learnt_at"] != step:  # for a signal, or the end of the job: the Trainer has not asked for this one
        dated = {recipe["name"] for recipe in recipes if any(tensor[3] == FILES for tensor in recipe["tensors"])}
        dated |= {name for name in small if name.endswith(WEIGHTS) and name != ARGUMENTS_FILE}
        if dated:  # no file at all rather than one with weights of another step
            why = f"step {step}: there are no copies of the weights that {', '.join(sorted(dated))} would hold"
            if model_only:
                raise SaveFailed(why)
            _log.warning("%s: left out; only easyckpt can go on from this checkpoint", why)
        recipes = [recipe for recipe in recipes if recipe["name"] not in dated]
        small = {name: data for name, data in small.items() if name not in dated}
    files = [_weights_file(values, numbers, recipe) for recipe in recipes]
    return files + [_small(name, bytes(content.numpy().tobytes())) for name, content in small.items()]


def _weights_file(values: _Values, numbers: dict[tuple[Any, ...], int], recipe: dict[str, Any]) -> PlannedFile:
    file = PlannedFile(recipe["name"])
    if not recipe["name"].endswith(SAFETENSORS):
        return _archive_of_weights(values, numbers, recipe)
    tensors = sorted(recipe["tensors"], key=lambda tensor: -ITEM_BYTES[tensor[1]])  # so that all are aligned
    file.add(make_header(((key, dtype, tuple(shape)) for key, dtype, shape, *_ in tensors), recipe["metadata"]))
    for _, dtype, shape, component, name, offset in tensors:
        path = (component, name) if component != FILES else (component, ASIDE, "tensors", name)
        number = numbers[path]
        leaf = values.layout.leaves[number]
        size = math.prod(shape) * ITEM_BYTES[dtype]
        if size == leaf.nbytes:
            file.add(values.bytes(number), number if number not in file.places else None)
        else:
            file.add(memoryview(values.bytes(number)).cast("B")[offset : offset + size])
    return file


def _archive_of_weights(values: _Values, numbers: dict[tuple[Any, ...], int], recipe: dict[str, Any]) -> PlannedFile:
    """A state dict as torch.save writes it."""
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    state = {}
    for key, dtype, shape, component, name, offset in recipe["tensors"]:
        place = (component, name, offset, dtype, tuple(shape))
        state[key] = made.setdefault(place, torch.empty(shape, dtype=DTYPES[dtype]))
    file, storages = PlannedFile(recipe["name"]), list(made)
    sizes = [math.prod(shape) * ITEM_BYTES[dtype] for *_, dtype, shape in storages]

    def pieces(number: int) -> Iterator[memoryview]:
        component, name, offset, _, _ = storages[number]
        leaf, size = (
            numbers[(component, name) if component != FILES else (component, ASIDE, "tensors", name)],
            sizes[number],
        )
        if size == values.layout.leaves[leaf].nbytes and leaf not in file.places:
            file.places[leaf] = file.nbytes
        yield memoryview(values.bytes(leaf)).cast("B")[offset : offset + size]

    exporting_torch.save(state, sizes, pieces, file.add)
    return file


def _training_files(values: _Values) -> list[PlannedFile]:
    files = []
    saved = values.saved(OPTIMIZER)
    files.append(_optimizer_file(values, saved))
    if SCHEDULER in values:
        files.append(_small(SCHEDULER_FILE, _archived(values.value(SCHEDULER))))
    if SCALER in values:
        files.append(_small(SCALER_FILE, _archived(_scaler(values.value(SCALER)))))
    return files


def _optimizer_file(values: _Values, saved: Saved) -> PlannedFile:
    """An archive as torch.save writes it, whose storages are those of the snapshot."""
    made: dict[int, torch.Tensor] = {}

    def stand_in(reference: int) -> torch.Tensor:
        number = saved.numbers[reference]
        if number not in made:
            leaf = values.layout.leaves[number]
            made[number] = _in_logical_order(torch.empty(leaf.stored_shape, dtype=DTYPES[leaf.dtype]), leaf.order)
        return made[number]

    if saved.kind == "optimizer":
        value: Any = optimizer_state_dict(saved, stand_in)
    else:
        value = saved.decode(saved.dynamic, stand_in)
    numbers = {id(tensor): number for number, tensor in made.items()}
    met = list(dict.fromkeys(numbers[id(tensor)] for tensor in _tensors(value)))
    file = PlannedFile(OPTIMIZER_FILE)

    def pieces(place: int) -> Iterator[memoryview]:
        number = met[place]
        file.places[number] = file.nbytes
        yield memoryview(values.bytes(number)).cast("B")

    exporting_torch.save(value, [values.layout.leaves[number].nbytes for number in met], pieces, file.add)
    return file


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in the order in which they are pickled."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _small(name: str, data: bytes) -> PlannedFile:
    file = PlannedFile(name)
    file.add(data)
    return file


def _archived(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _scaler(value: dict[str, Any]) -> dict[str, Any]:
    """As ``GradScaler.state_dict()`` has it."""
    if not value["enabled"]:
        return {}
    return {
        "scale": float(value["scale"]),
        "growth_factor": value["growth_factor"],
        "backoff_factor": value["backoff_factor"],
        "growth_interval": value["growth_interval"],
        "_growth_tracker": int(value["growth_tracker"]),
    }


def _rng(values: _Values, world_size: int, device: int) -> dict[str, Any]:
    """As the Trainer keeps the generators of one process."""
    states = values.value(RNG)
    python, numpy = states["python"], states.get("numpy")
    kept: dict[str, Any] = {"python": (python["version"], tuple(python["words"].tolist()), python["gauss"])}
    if numpy is not None:
        key = np.array(torch.as_tensor(numpy["state"]["key"]).tolist(), dtype=np.uint32)
        kept["numpy"] = (
            numpy["bit_generator"], key, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"],
        )  # fmt: skip
    kept["cpu"] = states["torch"]
    if "cuda" in states:
        kept["cuda"] = states["cuda"] if world_size > 1 else states["cuda"][device]
    return kept
