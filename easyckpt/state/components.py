"""What is common to every component of the state: the adapter protocol, what was saved of it, and names.

A component refers to its tensors by *reference numbers*, 0, 1, 2, ... in the order in which it collects them.
The layout's tree of a component is ``{"kind": ..., "leaves": [leaf number by reference], "tree": static}``, so that
tied tensors are several references to one leaf, and what a component encodes anew at each step never depends on
where other components' leaves lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from easyckpt.errors import ConfigError, DamagedCheckpoint, StateError
from easyckpt.format import codec
from easyckpt.format.dtypes import DTYPES
from easyckpt.format.fields import Fields
from easyckpt.format.image import Layout, Leaf
from easyckpt.state.tensors import TieKey, device_for, new_like, require_supported, same_kind, tie_key

if TYPE_CHECKING:
    from easyckpt.format.codec import Json, Path

#: Component names that start with this are easyckpt's own.
RESERVED = "easyckpt."
#: The bytes of a reference: a CPU tensor in the saved shape. It may be a view of memory that is reused later.
Fetch = Callable[[int], torch.Tensor]


@dataclass(slots=True)
class Part:
    """One component at one moment. Holds strong references: drop it as soon as the copies are done."""

    #: Equal tokens: the same references with the same paths and static tree.
    token: Any
    #: By reference number.
    tensors: list[torch.Tensor]
    #: Changes at each step; None when there is nothing such.
    dynamic: Json | None
    #: True: the tensors are the live ones, so that a moved data pointer is news. False: they may be fresh each time.
    firm: bool
    #: References below this number are an optimizer's state tensors.
    optimizer_state: int = 0


class Ref(NamedTuple):
    """A place in a decoded tree where a tensor belongs."""

    number: int
    leaf: Leaf


@dataclass(frozen=True, slots=True)
class Saved:
    """One component as a checkpoint holds it."""

    name: str
    kind: str
    static: Json
    dynamic: Json
    leaves: tuple[Leaf, ...]
    numbers: tuple[int, ...]

    def ref(self, number: int) -> Ref:
        """Reference `number`. Raises DamagedCheckpoint where there is none."""
        if not 0 <= number < len(self.leaves):
            raise self.damaged(f"it refers to tensor {number!r} of {len(self.leaves)}")
        return Ref(number, self.leaves[number])

    def stand_in(self, number: int) -> torch.Tensor:
        """A tensor like reference `number` that takes no memory, for decoding a tree only to see that it can be."""
        leaf = self.ref(number).leaf
        return torch.empty((), dtype=DTYPES[leaf.dtype], device="cpu").expand(leaf.shape)

    def decode(self, tree: Json, leaf: Callable[[int], Any] | None = None, like: Any = None) -> Any:
        """Decode `tree`; without `leaf`, tensors are `Ref`s."""
        return codec.decode(tree, leaf or self.ref, like)

    def damaged(self, why: str) -> DamagedCheckpoint:
        """The error for a tree that is not what this component writes."""
        return DamagedCheckpoint(f"the state of component {self.name!r} is damaged: {why}")

    def fields(self, tree: Json) -> Fields:
        """Checked access to the JSON object `tree`."""
        return Fields(tree, f"the state of component {self.name!r}")


class Component(ABC):
    """Adapter around one of the user's objects. Holds the object, and no tensor of it, between calls."""

    kind: ClassVar[str]
    #: Components are applied in ascending order of this.
    apply_order: int = 2

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target

    @abstractmethod
    def collect(self) -> Part:
        """The component at this moment, without copying tensors that are not made for the call."""

    @abstractmethod
    def describe(self, part: Part) -> tuple[list[Path], Json]:
        """(path of each reference, static tree) of the part that was collected last."""

    @abstractmethod
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        """What keeps `saved` from being applied to the live object. Changes nothing."""

    def judge(self, saved: Saved, fetch: Fetch, step: int) -> None:  # noqa: B027 - most have nothing to look for
        """Raise DamagedCheckpoint where `saved`, which `check` found good, cannot be the state at `step`.

        For those whose bytes say more than their form does. Changes nothing.
        """

    @abstractmethod
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        """Put `saved`, which `check` found good, into the live object."""

    def optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """The torch optimizers whose step alone writes their parameters and state."""
        return ()

    def constant(self) -> Iterable[torch.Tensor]:
        """Tensors of the component's own that it writes in its captures alone.

        Frozen parameters are none: programs write a few of their rows through ``.data``, and nothing would see that.
        """
        return ()

    def replicated(self) -> Iterable[torch.Tensor]:
        """The parameters that every rank holds equal."""
        return ()

    def replicated_refs(self, part: Part, replicated: Container[TieKey]) -> set[int]:
        """References of `part` that are equal on all ranks, given the keys of the parameters that are."""
        return {number for number, tensor in enumerate(part.tensors) if tie_key(tensor) in replicated}


def call(name: str, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the user's `function`; an error names component `name` and the method `what`."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        message = f"component {name!r}: {what} raised {type(error).__name__}: {error}"
        raise StateError(message) from error


def owned(saved: Saved, fetch: Fetch, device: str | None = None) -> Callable[[int], torch.Tensor]:
    """Tensors by reference for code that may keep them: fresh ones, tied where the checkpoint's are.

    They live where the saved ones did, as far as that exists here, or on `device`.
    """
    made: dict[int, torch.Tensor] = {}

    def own(number: int) -> torch.Tensor:
        ref = saved.ref(number)
        leaf_number = saved.numbers[number]
        if leaf_number not in made:
            made[leaf_number] = new_like(fetch(number), device or device_for(ref.leaf.device))
        return made[leaf_number]

    return own


class Encoded(NamedTuple):
    """A value with its tensors taken out."""

    tree: Json
    paths: list[Path]
    tensors: list[torch.Tensor]


def encode(value: Any, path: Path, first: int = 0) -> Encoded:
    """Encode `value`; its tensors get reference numbers from `first` on. Raises UnsupportedValue with the path."""
    paths: list[Path] = []
    tensors: list[torch.Tensor] = []

    def on_tensor(where: Path, tensor: torch.Tensor) -> int:
        tensors.append(require_supported(tensor, where))
        paths.append(where)
        return first + len(tensors) - 1

    tree = codec.encode(value, path, on_tensor)
    return Encoded(tree, paths, tensors)


def read_saved(name: str, layout: Layout, trees: Mapping[str, Json], objects: Mapping[str, Json]) -> Saved:
    """What `layout` and the step's objects hold of component `name`. Raises DamagedCheckpoint."""
    fields = Fields(trees[name], f"the state of component {name!r}")
    numbers = fields.numbers("leaves")
    if any(number >= len(layout.leaves) for number in numbers):
        fields.damaged("leaves", "a list of leaf numbers")
    leaves = tuple(layout.leaves[number] for number in numbers)
    return Saved(name, fields.text("kind"), fields.raw("tree"), objects.get(name), leaves, numbers)


def check_name(name: object) -> str:
    """`name`, if the user may call a component so; ConfigError otherwise."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"state: a component's name must be a non-empty string, not {name!r}")
    if name.startswith(RESERVED):
        raise ConfigError(f"state: {name!r}: names that start with {RESERVED!r} are easyckpt's own; choose another")
    return name


def check_names(components: object) -> None:
    """Refuse what is no list of components' names: one name by itself would be taken letter by letter."""
    if components is not None and (isinstance(components, (str, bytes)) or not isinstance(components, Collection)):
        raise ConfigError(f"components must be a list of names, such as ['model'], not {components!r}")


def mismatch(place: str, leaf: Leaf, live: torch.Tensor) -> str | None:
    """In words, how `live` differs from `leaf` in shape or dtype; None where it does not."""
    if tuple(live.shape) != tuple(leaf.shape):
        return f"{place} has shape {tuple(leaf.shape)} in the checkpoint and {tuple(live.shape)} here"
    if live.dtype != DTYPES.get(leaf.dtype):
        return f"{place} is {leaf.dtype} in the checkpoint and {str(live.dtype).removeprefix('torch.')} here"
    return None


def compare(name: str, saved: Mapping[Any, Any], live: Mapping[Any, Any], *, strict: bool) -> list[str]:
    """Problems of filling the named tensors of `live` from `saved`, whose tensors are `Ref`s."""
    problems = []
    if strict:
        problems += [f"{name}: {key!r} is in the checkpoint and not here" for key in saved if key not in live]
        problems += [f"{name}: {key!r} is here and not in the checkpoint" for key in live if key not in saved]
    for key, there in saved.items():
        here = live.get(key)
        if isinstance(there, Ref) and isinstance(here, torch.Tensor):
            if not same_kind(here, there.leaf.shape, DTYPES.get(there.leaf.dtype)):
                problems += filter(None, [mismatch(f"{name}: {key!r}", there.leaf, here)])
        elif key in live and isinstance(there, Ref) != isinstance(here, torch.Tensor):
            what = ("a tensor", "another value") if isinstance(there, Ref) else ("another value", "a tensor")
            problems.append(f"{name}: {key!r} is {what[0]} in the checkpoint and {what[1]} here")
    return problems
