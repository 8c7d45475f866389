"""Which files a model is saved as: learnt from the Trainer's own saving, without writing a weight.

The Trainer saves a model through ``save_pretrained``, which knows about tied weights, adapters, shards, and renamed
keys. So that is what is asked: it runs with the functions that write tensors replaced, and what they are handed is
looked up in the live state. The recipe that comes of it says, for each key of each file, which bytes of a snapshot it
is. Files without tensors (configuration, tokenizer, arguments) are taken as they are.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from easyckpt.format.dtypes import dtype_name
from easyckpt.integrations.transformers import scratch, versions

#: Tensors in host memory that a file holds and the state does not, by a name of ours: part of the files' own state.
Copies = dict[str, torch.Tensor]


@dataclass(slots=True)
class Recipe:
    """The files of one save of the model."""

    weights: list[dict[str, Any]] = field(default_factory=list)
    """Of each file its name, metadata, and ``[key, dtype, shape, component, name, byte offset]`` of each tensor."""
    small: dict[str, bytes] = field(default_factory=dict)
    """Files without weights, by their path in the checkpoint."""
    copies: Copies = field(default_factory=dict)

    def text(self) -> bytes:
        """What `weights` is kept as."""
        return json.dumps(self.weights).encode()


def learn(trainer: Any, live: Mapping[str, torch.Tensor], component: str, files: str) -> Recipe:
    """Have `trainer` save its model, and note what goes where.

    `live` are the tensors of the state's component `component` by name; what is in none of them is copied, and belongs
    to the component `files`.
    """
    directory = scratch.make("files")
    try:
        with versions.writes_captured() as captured:
            trainer.save_model(directory, _internal_call=True)
        recipe, known = Recipe(), _Known(live)
        for path, tensors, metadata in captured:
            entries = [
                [key, dtype_name(tensor.dtype), list(tensor.shape), *_place(known, tensor, recipe, component, files)]
                for key, tensor in tensors.items()
            ]
            name = os.path.relpath(path, directory)
            recipe.weights.append({"name": name, "metadata": dict(metadata or {}), "tensors": entries})
        recipe.small = scratch.read_all(directory)
        return recipe
    finally:
        scratch.remove(directory)


class _Known:
    """Finds memory among the live tensors."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self._found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in live.items():  # of tied ones the first name is the leaf's
            if tensor.numel() and tensor.is_contiguous():
                self._found.setdefault(tensor.data_ptr(), (name, tensor))
        self._begins = sorted(self._found)

    def find(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """(name, offset in bytes) of the live tensor whose memory `tensor` is, or is a piece of."""
        number = bisect.bisect_right(self._begins, tensor.data_ptr()) - 1
        if number < 0 or not tensor.is_contiguous():
            return None
        begin = self._begins[number]
        name, owner = self._found[begin]
        offset = tensor.data_ptr() - begin
        fits = offset + tensor.nbytes <= owner.nbytes and tensor.dtype == owner.dtype and tensor.device == owner.device
        return (name, offset) if fits else None


def _place(known: _Known, tensor: torch.Tensor, recipe: Recipe, component: str, files: str) -> list[Any]:
    found = known.find(tensor) if tensor.numel() else None
    if found is not None:
        return [component, *found]
    name = str(len(recipe.copies))
    recipe.copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return [files, name, 0]
