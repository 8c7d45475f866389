"""nn.Module components. Plain module trees are read through their own tables, others through state_dict()."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from easyckpt.errors import UnsupportedValue
from easyckpt.state.components import Component, Fetch, Part, Ref, Saved, call, compare, encode, owned
from easyckpt.state.tensors import TieKey, copy_all_exact, require_supported, tie_key

if TYPE_CHECKING:
    from easyckpt.format.codec import Json, Path

_OVERRIDABLE = (
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)
_HOOKS = itemgetter(
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
)
#: Of the insides of a module (`vars`).
TABLES = itemgetter("_parameters", "_buffers", "_modules")
_VALUES = methodcaller("values")
_NON_PERSISTENT = itemgetter("_non_persistent_buffers_set")

Pick = Callable[[list[Any]], tuple[Any, ...]]


def picker(positions: list[int]) -> Pick:
    """Return an itemgetter that always gives a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple(values[position] for position in positions)


def inner(module: nn.Module) -> nn.Module | None:
    """The module that `module` only wraps (DDP, DataParallel, torch.compile); None when it is no wrapper."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        wrapped = module.module
        assert isinstance(wrapped, nn.Module)
        return wrapped
    if type(module).__name__ == "OptimizedModule":  # by name: importing torch._dynamo takes seconds
        return vars(module)["_modules"].get("_orig_mod")  # type: ignore[no-any-return]
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module under any nesting of wrappers."""
    while (wrapped := inner(module)) is not None:
        module = wrapped
    return module


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(state_dict prefix, module) in state_dict's order; wrappers are seen too, and add nothing to the names."""
    yield prefix, module
    wrapped = inner(module)
    if wrapped is not None:
        yield from walk(wrapped, prefix)
        return
    for name, child in vars(module)["_modules"].items():
        if child is not None:
            yield from walk(child, f"{prefix}{name}.")


def replicated_parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters that DDP keeps equal on all ranks.

    Buffers are left out, with broadcast_buffers=True too: rank 0's are the truth only after the next forward has
    broadcast them, so between two steps every rank has its own, and a resume must give each its own back.
    """
    for _, node in walk(module):
        if not isinstance(node, nn.parallel.DistributedDataParallel):
            continue
        if dist.is_initialized() and node.process_group.size() != dist.get_world_size():
            continue  # equal within a part of the ranks only
        ignored = set(getattr(node, "parameters_to_ignore", ()))
        for name, parameter in node.module.named_parameters(remove_duplicate=False):
            if name not in ignored:
                yield parameter


def _is_plain_class(kind: type[nn.Module]) -> bool:
    """Whether torch's own code alone decides what the state of a module of this class is."""
    for name in _OVERRIDABLE:
        method = getattr(kind, name)
        if method is getattr(nn.Module, name):
            continue
        # Batch and instance norm override loading, for checkpoints of old torch versions only.
        if name == "_load_from_state_dict" and method.__module__ in _NORMS:
            continue
        return False
    return True


_NORMS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")


class ModuleComponent(Component):
    """A module: parameters and persistent buffers by their state_dict names, always filled in place."""

    kind = "module"
    apply_order = 0

    def __init__(self, name: str, target: nn.Module) -> None:
        super().__init__(name, target)
        self._watched: list[weakref.ref[nn.Module]] = []
        self._token: Any = None
        self._names: list[str] = []
        self._pick: Pick = picker([])
        self._plain_classes: dict[type[nn.Module], bool] = {}

    @override
    def collect(self) -> Part:
        modules = [module for watched in self._watched if (module := watched()) is not None]
        if modules and len(modules) == len(self._watched):
            values, token = self._look(modules)
            if token == self._token and self._no_hooks(modules):
                return Part(self._token, list(self._pick(values)), None, firm=True)
        return self._plan()

    def _look(self, modules: list[nn.Module]) -> tuple[list[Any], Any]:
        """(everything in the modules' tables, what must be equal for the plan to be right); no Python loop inside."""
        insides = list(map(vars, modules))
        tables = list(chain.from_iterable(map(TABLES, insides)))
        filled = list(filter(None, tables))
        values = list(chain.from_iterable(map(_VALUES, filled)))
        token = (
            list(map(id, modules)),
            list(map(type, modules)),
            list(map(len, tables)),
            list(chain.from_iterable(filled)),
            list(map(id, values)),
            list(map(frozenset, map(_NON_PERSISTENT, insides))),
        )
        return values, token

    def _no_hooks(self, modules: list[nn.Module]) -> bool:
        if any(chain.from_iterable(map(_HOOKS, map(vars, modules)))):
            return False
        return vars(unwrap(self.target)).keys().isdisjoint(_OVERRIDABLE)

    def _plan(self) -> Part:
        found = list(walk(self.target))
        for _, module in found:
            if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
                raise UnsupportedValue(f"component {self.name!r} holds an FSDP module: it is not supported yet")
        own = [module for _, module in found if inner(module) is None]
        self._watched, self._token = [], None
        if not self._is_plain(own):
            return self._generic()
        values, token = self._look([module for _, module in found])
        names, positions = self._leaves(found)
        pick = picker(positions)
        tensors = list(pick(values))
        for name, tensor in zip(names, tensors, strict=True):
            if require_supported(tensor, (self.name, name)) is not tensor:
                return self._generic()  # a lazy conjugate: state_dict's value is not the memory
        self._names, self._pick, self._token = names, pick, token
        self._watched = [weakref.ref(module) for _, module in found]
        return Part(token, tensors, None, firm=True)

    def _is_plain(self, modules: list[nn.Module]) -> bool:
        for module in modules:
            kind = type(module)
            if kind not in self._plain_classes:
                self._plain_classes[kind] = _is_plain_class(kind)
            if not self._plain_classes[kind] or not vars(module).keys().isdisjoint(_OVERRIDABLE):
                return False
        return self._no_hooks(modules)

    @staticmethod
    def _leaves(found: list[tuple[str, nn.Module]]) -> tuple[list[str], list[int]]:
        """(state_dict name, position among the looked-up values) of each leaf."""
        names, positions, position = [], [], 0
        for prefix, module in found:
            parameters, buffers, children = TABLES(vars(module))
            hidden = _NON_PERSISTENT(vars(module))
            for name, value in chain(parameters.items(), buffers.items()):
                if value is not None and (name in parameters or name not in hidden):
                    names.append(prefix + name)
                    positions.append(position)
                position += 1
            position += len(children)
        return names, positions

    def _state_dict(self) -> Any:
        method = unwrap(self.target).state_dict
        with torch.no_grad():
            if _accepts(method, "keep_vars"):
                return call(self.name, "state_dict()", method, keep_vars=True)
            return call(self.name, "state_dict()", method)

    def _generic(self) -> Part:
        encoded = encode(self._state_dict(), (self.name,))
        return Part(encoded.paths, encoded.tensors, encoded.tree, firm=False)

    @override
    def describe(self, part: Part) -> tuple[list[Path], Json]:
        if part.firm:
            names: Json = list(self._names)
            return [(self.name, name) for name in self._names], {"names": names}
        return list(part.token), None

    def _saved_state(self, saved: Saved, fetch: Callable[[int], Any], like: Any = None) -> Any:
        """The state dict with every tensor from `fetch`, from whichever way it was saved."""
        if saved.static is None:
            return saved.decode(saved.dynamic, fetch, like)
        names = saved.fields(saved.static).items("names")
        if len(names) != len(saved.leaves) or not all(isinstance(name, str) for name in names):
            raise saved.damaged("its names do not fit its tensors")
        return OrderedDict((name, fetch(number)) for number, name in enumerate(names))

    def _live(self) -> tuple[bool, Any]:
        """(whether the tables alone are the state, the live state dict)."""
        part = self.collect()
        if not part.firm:
            return False, self._state_dict()
        return True, dict(zip(self._names, part.tensors, strict=True))

    @override
    def check(self, saved: Saved, *, strict: bool) -> list[str]:
        in_place, here = self._live()
        there = self._saved_state(saved, saved.ref, here)
        if not isinstance(there, Mapping) or not isinstance(here, Mapping):
            return []  # only the module's own load_state_dict can tell
        if in_place:
            return compare(self.name, there, here, strict=strict) + self._untied(saved, there, here)
        # What a module's own code loads, extra state and buffers, it may also resize; parameters have to fit.
        named = {key: value if isinstance(value, nn.Parameter) else None for key, value in here.items()}
        sure = {key: value if named.get(key) is not None else None for key, value in there.items()}
        return compare(self.name, sure, named, strict=strict)

    def _untied(self, saved: Saved, there: Mapping[str, Any], here: Mapping[str, torch.Tensor]) -> list[str]:
        """Names that are one tensor here and would get different values."""
        pointers = list(map(torch.Tensor.data_ptr, here.values()))
        if len(set(pointers)) == len(pointers):
            return []  # nothing is tied here
        first: dict[TieKey, tuple[str, int]] = {}
        problems = []
        for name, ref in there.items():
            if isinstance(ref, Ref) and name in here:
                leaf = saved.numbers[ref.number]
                other, other_leaf = first.setdefault(tie_key(here[name]), (name, leaf))
                if leaf != other_leaf:
                    problems.append(f"{self.name}: {other!r} and {name!r} are one tensor here, two in the checkpoint")
        return problems

    @override
    def apply(self, saved: Saved, fetch: Fetch, *, strict: bool) -> None:
        in_place, here = self._live()
        if in_place:
            there = self._saved_state(saved, saved.ref, here)
            both = [(here[name], ref) for name, ref in there.items() if isinstance(ref, Ref) and name in here]
            copy_all_exact([target for target, _ in both], [fetch(ref.number) for _, ref in both])
            return
        # The user's code may keep what it is given, and fetched tensors are only lent: it gets its own.
        value = self._saved_state(saved, owned(saved, fetch, "cpu"), here)
        if saved.static is not None and hasattr(here, "_metadata"):
            value._metadata = here._metadata
        method = unwrap(self.target).load_state_dict
        call(self.name, "load_state_dict()", method, value, **({} if strict else {"strict": False}))

    @override
    def replicated(self) -> Iterator[torch.Tensor]:
        return replicated_parameters(self.target)


def _accepts(method: Callable[..., Any], argument: str) -> bool:
    try:
        inspect.signature(method).bind(**{argument: True})
    except (TypeError, ValueError):
        return False
    return True
