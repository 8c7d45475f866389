"""What is in a committed checkpoint, for those who look into it: every tensor and every other value by its place.

Bytes are streamed: in pieces of at most one chunk, past the cache, each chunk compared with its checksum before anybody
sees it. So any checkpoint can be read in little memory, however large one of its tensors is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from easyckpt import catalog
from easyckpt.catalog import Entry
from easyckpt.contents.held import Held, OnBytes, Source, Stretch, ignore, place
from easyckpt.contents.parts import Parts
from easyckpt.contents.shards import Shards
from easyckpt.errors import DamagedCheckpoint, UsageError
from easyckpt.format import layout
from easyckpt.format.codec import Path
from easyckpt.format.flat import Container, Plain, TensorRef, flatten, path_key_of
from easyckpt.format.manifest import Manifest
from easyckpt.state.components import Saved, read_saved
from easyckpt.storage.base import Storage

__all__ = ["Component", "Held", "OnBytes", "Opened", "Stretch", "ignore", "place"]


@dataclass(slots=True)
class Component:
    """One component of the state on one rank."""

    name: str
    kind: str = ""
    """``module``, ``optimizer`` and so on: what wrote it."""
    tensors: dict[bytes, Stretch] = field(default_factory=dict)
    """By :func:`place` of each reference to a tensor: tied ones have several."""
    primary: list[bytes] = field(default_factory=list)
    """The places of the tensors that this rank wrote, in the order of the checkpoint, each tensor once."""
    ties: dict[bytes, Path] = field(default_factory=dict)
    """Of references to a tensor that is stored elsewhere: where."""
    values: dict[bytes, Plain | Container] = field(default_factory=dict)
    """All that is not a tensor, by place."""
    paths: dict[bytes, Path] = field(default_factory=dict)

    def add(self, path: Path) -> bytes:
        """Note `path`; returns its place."""
        key = place(path)
        self.paths.setdefault(key, path)
        return key


class Opened:
    """A checkpoint to be looked into, rank by rank. Close it (or use ``with``) to close its files."""

    def __init__(self, storage: Storage, entry: Entry, on_bytes: OnBytes = ignore) -> None:
        """Raises FormatError for a manifest that cannot be read, DamagedCheckpoint for what is no valid checkpoint."""
        where = f"{storage.root}/{entry.name}"
        try:
            self.manifest: Manifest = catalog.read_manifest(storage, entry.name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{where}: {entry.problem or 'it is gone'}") from None
        if entry.problem is not None:
            raise DamagedCheckpoint(f"{where}: {entry.problem}")
        self._source: Source = _source(storage, entry.name, self.manifest, on_bytes)

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return self.manifest.world_size

    def held(self, rank: int) -> Held:
        """What `rank` holds, checked. Raises FormatError naming the file."""
        return self._source.held(rank)

    def components(self, rank: int) -> dict[str, Component]:
        """What `rank` holds, in the order of the checkpoint; what another rank wrote for it too."""
        held = self.held(rank)
        trees = held.layout.trees if isinstance(held.layout.trees, dict) else {}
        objects = held.objects.get("trees") if isinstance(held.objects, dict) else None
        objects = objects if isinstance(objects, dict) else {}
        found: dict[str, Component] = {}
        for name in trees:
            found[name] = _component(read_saved(name, held.layout, trees, objects), held.stretches)
        for stretch, written in zip(held.stretches, held.written, strict=True):
            if not written:
                continue
            component = found.setdefault(str(stretch.spec.path[0]), Component(str(stretch.spec.path[0]), "unknown"))
            key = component.add(stretch.spec.path)
            component.tensors.setdefault(key, stretch)
            component.primary.append(key)
        return found

    def close(self) -> None:
        """Close its files. A second call does nothing."""
        self._source.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _source(storage: Storage, directory: str, manifest: Manifest, on_bytes: OnBytes) -> Source:
    if manifest.parts:
        return Parts(storage, directory, manifest, on_bytes)
    if manifest.files and not any(layout.parse_shard_file(name) is not None for name in manifest.files):
        raise UsageError(
            f"{storage.root}/{directory} holds files of its framework alone (save_only_model, or a sharded training): "
            "they can be verified, and not looked into"
        )
    return Shards(storage, directory, manifest, on_bytes)


def _component(saved: Saved, stretches: Sequence[Stretch]) -> Component:
    component = Component(saved.name, saved.kind)
    for path, item in _places(saved):
        key = component.add(path)
        if not isinstance(item, TensorRef):
            component.values[key] = item
            continue
        saved.ref(item.number)  # raises where there is none
        stretch = stretches[saved.numbers[item.number]]
        component.tensors[key] = stretch
        if stretch.spec.path != path:
            component.ties[key] = stretch.spec.path
    return component


def _places(saved: Saved) -> Iterator[tuple[Path, TensorRef | Container | Plain]]:
    """All that a component holds, each under the path that people know it by."""
    root: Path = (saved.name,)
    if saved.kind == "module" and saved.static is not None:
        names = saved.fields(saved.static).items("names")
        yield from (((*root, name), TensorRef(number)) for number, name in enumerate(names))
    elif saved.kind == "optimizer":
        yield from _optimizer_places(saved, root)
    else:
        for part in (saved.static, saved.dynamic):
            if part is not None:
                yield from flatten(part, root)


def _optimizer_places(saved: Saved, root: Path) -> Iterator[tuple[Path, TensorRef | Container | Plain]]:
    static, dynamic = saved.fields(saved.static), saved.fields(saved.dynamic)
    values = iter(dynamic.items("values"))
    for entry in static.items("entries"):
        fields = saved.fields(entry)
        of = fields.raw("of")
        owner = path_key_of(saved.fields(of).raw("key")) if type(of) is dict else of
        where = (*root, "state", owner)
        for item in fields.items("items"):
            if type(item) is not list or len(item) != 2:
                raise saved.damaged("an entry of its state is no pair")
            path = where if fields.raw("whole") is True else (*where, path_key_of(item[0]))
            if type(item[1]) is int:
                yield path, TensorRef(item[1])
            else:
                yield from flatten(next(values, None), path)
    for number, group in enumerate(dynamic.items("groups")):
        yield from flatten(group, (*root, "param_groups", number))
    for name in ("groups", "names", "parameters"):  # counts, names and shapes of the parameters
        for number, value in enumerate(static.items(name)):
            if name == "parameters" and type(value) is list:
                value = value[1:]  # noqa: PLW2901 - where a parameter lived is no part of the state
            yield (*root, name, number), Plain(value)
