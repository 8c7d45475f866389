"""Checking a saved state against the live objects, and putting it into them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from easyckpt.errors import DamagedCheckpoint, PartlyApplied
from easyckpt.format import codec
from easyckpt.format.codec import Json
from easyckpt.format.image import Layout
from easyckpt.state.components import RESERVED, Component, Saved, read_saved

#: A leaf's bytes: a CPU tensor in the saved shape (the permutation undone). It may be lent for the call only.
Leaves = Callable[[int], torch.Tensor]


def check_all(
    live: Mapping[str, Component],
    layout: Layout,
    trees: Json,
    objects: Json | bytes,
    *,
    strict: bool = True,
    components: Collection[str] | None = None,
) -> list[str]:
    """Return what keeps the saved state from being applied to `live`, in words; changes nothing.

    `trees` is ``layout.trees``, `objects` the step's other state as the capture gave it. With `strict`, components
    and names that only one side has are problems; without, they are left alone. `components` limits both sides to
    some names. easyckpt's own components may be missing on either side. Raises DamagedCheckpoint for trees that
    no capture writes.
    """
    saved_trees, saved_objects = _trees(trees), _objects(objects)
    problems = []
    if components is not None:
        unknown = sorted(set(components) - saved_trees.keys() - live.keys())
        problems += [f"component {name!r} is neither in the checkpoint nor here" for name in unknown]
    if strict:
        for name in saved_trees:
            if name not in live and _wanted(name, components) and not name.startswith(RESERVED):
                problems.append(f"component {name!r} is in the checkpoint and not here")
        for name in live:
            if name not in saved_trees and _wanted(name, components) and not name.startswith(RESERVED):
                problems.append(f"component {name!r} is here and not in the checkpoint")
    for component, saved in _pairs(live, layout, saved_trees, saved_objects, components):
        if component.kind != saved.kind:
            problems.append(
                f"component {saved.name!r} is of kind {saved.kind} in the checkpoint, {component.kind} here"
            )
        else:
            problems += component.check(saved, strict=strict)
    return problems


def judge_all(
    live: Mapping[str, Component],
    layout: Layout,
    objects: Json | bytes,
    leaf: Leaves,
    step: int,
    *,
    components: Collection[str] | None = None,
) -> None:
    """Look into the bytes of what `check_all` found good. Raises DamagedCheckpoint where they cannot be of `step`."""
    for component, saved in _pairs(live, layout, _trees(layout.trees), _objects(objects), components):
        component.judge(saved, _fetcher(saved, leaf), step)


def apply_all(
    live: Mapping[str, Component],
    layout: Layout,
    trees: Json,
    objects: Json | bytes,
    leaf: Leaves,
    *,
    strict: bool = True,
    components: Collection[str] | None = None,
) -> None:
    """Put the saved state, which `check_all` found good, into `live`: modules, optimizers, others, generators last.

    Raises PartlyApplied if anything fails on the way.
    """
    pairs = list(_pairs(live, layout, _trees(trees), _objects(objects), components))
    for component, saved in sorted(pairs, key=lambda pair: pair[0].apply_order):
        try:
            with torch.no_grad():
                component.apply(saved, _fetcher(saved, leaf), strict=strict)
        except Exception as error:
            raise PartlyApplied(
                f"applying component {saved.name!r} failed, after others may have been applied: {error}. "
                "Build the objects anew before going on"
            ) from error


def saved_value(layout: Layout, trees: Json, objects: Json | bytes, name: str, leaf: Callable[[int], Any]) -> Any:
    """The saved state of component `name` as Python values, for tools: each kind's trees with tensors from `leaf`."""
    saved = read_saved(name, layout, _trees(trees), _objects(objects))
    fetch = _fetcher(saved, leaf)
    if saved.kind == "module" and saved.static is not None:
        return {key: fetch(number) for number, key in enumerate(saved.fields(saved.static).items("names"))}
    return saved.decode(saved.dynamic, fetch)


def _fetcher(saved: Saved, leaf: Callable[[int], Any]) -> Callable[[int], Any]:
    def fetch(number: int) -> Any:
        saved.ref(number)
        return leaf(saved.numbers[number])

    return fetch


def _wanted(name: str, components: Collection[str] | None) -> bool:
    return components is None or name in components


def _pairs(
    live: Mapping[str, Component],
    layout: Layout,
    trees: Mapping[str, Json],
    objects: Mapping[str, Json],
    components: Collection[str] | None,
) -> Iterator[tuple[Component, Saved]]:
    for name, component in live.items():
        if name in trees and _wanted(name, components):
            yield component, read_saved(name, layout, trees, objects)


def _trees(trees: Json) -> dict[str, Json]:
    if not isinstance(trees, dict):
        raise DamagedCheckpoint("the trees of the layout are no JSON object")
    return trees


def _objects(objects: Json | bytes) -> dict[str, Json]:
    if isinstance(objects, (bytes, bytearray, memoryview)):
        objects = codec.loads(bytes(objects))
    trees = objects.get("trees") if isinstance(objects, dict) else None
    if not isinstance(trees, dict):
        raise DamagedCheckpoint("the state's objects are not what a capture writes")
    return trees
