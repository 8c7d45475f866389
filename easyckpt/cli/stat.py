"""``easyckpt stat``: how large weights and optimizer state are, by component and by dtype. It reads indexes only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from easyckpt.cli import output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import TARGET_HELP, resolve
from easyckpt.contents import Opened
from easyckpt.format.codec import path_text
from easyckpt.format.leaf import LeafSpec

_LARGEST = 10


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("stat")(output.command(stat))


@dataclass(slots=True)
class _Sum:
    tensors: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, spec: LeafSpec, nbytes: int) -> None:
        self.tensors += 1
        self.elements += math.prod(spec.shape)
        self.bytes += nbytes


@dataclass(slots=True)
class _Statistics:
    """All ranks together; tied tensors, and what all ranks share, count once."""

    weights: _Sum = field(default_factory=_Sum)
    optimizer: _Sum = field(default_factory=_Sum)
    components: dict[str, tuple[str, _Sum]] = field(default_factory=dict)
    dtypes: dict[str, _Sum] = field(default_factory=dict)
    largest: list[tuple[int, int, LeafSpec]] = field(default_factory=list)

    def add(self, name: str, kind: str, rank: int, spec: LeafSpec, nbytes: int) -> None:
        self.components.setdefault(name, (kind, _Sum()))[1].add(spec, nbytes)
        self.dtypes.setdefault(spec.dtype, _Sum()).add(spec, nbytes)
        if kind == "module":
            self.weights.add(spec, nbytes)
        elif kind == "optimizer" and spec.shape:  # step counters are no state worth a comparison
            self.optimizer.add(spec, nbytes)
        self.largest.append((nbytes, rank, spec))
        if len(self.largest) > 20 * _LARGEST:
            self.shorten()

    def shorten(self) -> None:
        self.largest = sorted(self.largest, key=lambda item: -item[0])[:_LARGEST]

    @property
    def ratio(self) -> float | None:
        """Elements of optimizer state for each element of the weights."""
        return self.optimizer.elements / self.weights.elements if self.weights.elements else None


def stat(
    checkpoint: Annotated[str, typer.Argument(metavar="ROOT[@STEP]", help=TARGET_HELP, show_default=False)],
    as_json: AsJson = False,
) -> Answer:
    """Show how large weights and optimizer state are (of the newest valid checkpoint, unless a step is given).

    Weights: all tensors of modules, buffers too. Optimizer state: its tensors with at least one dimension. Tied
    tensors, and those that all ranks share, count once.

    Exit codes: 0 shown; 1 the checkpoint is damaged; 2 bad input.

    Example: easyckpt stat runs/exp1@1000
    """
    target = resolve(checkpoint)
    target.record()  # a foreign or newer root is refused
    entry = target.pick()
    found = _Statistics()
    with Opened(target.storage, entry) as opened:
        for rank in range(opened.world_size):
            for name, component in opened.components(rank).items():
                found.components.setdefault(name, (component.kind, _Sum()))
                for key in component.primary:
                    stretch = component.tensors[key]
                    found.add(name, component.kind, rank, stretch.spec, stretch.nbytes)
    found.shorten()
    document = {
        "root": target.root,
        "name": entry.name,
        "step": opened.manifest.step,
        "bytes": entry.nbytes,
        "files": len(opened.manifest.files),
        "weights": asdict(found.weights),
        "optimizer": asdict(found.optimizer),
        "ratio": found.ratio,
        "components": {name: {"kind": kind, **asdict(total)} for name, (kind, total) in found.components.items()},
        "dtypes": {name: asdict(total) for name, total in found.dtypes.items()},
        "largest": [
            {
                "path": path_text(spec.path),
                "rank": rank,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "elements": math.prod(spec.shape),
                "bytes": nbytes,
            }
            for nbytes, rank, spec in found.largest
        ],
    }
    return Answer(document, _views(document, found))


def _views(document: dict[str, Any], found: _Statistics) -> list[Any]:
    ratio = "-" if found.ratio is None else f"{found.ratio:.4g}"
    dtypes = sorted(found.dtypes.items(), key=lambda item: -item[1].bytes)
    largest = [
        (tensor["path"], tensor["rank"], tensor["dtype"], "x".join(map(str, tensor["shape"])) or "scalar",
         tensor["elements"], output.size(tensor["bytes"]))
        for tensor in document["largest"]
    ]  # fmt: skip
    return [
        f"{document['root']}: step {document['step']} ({document['name']}), {output.size(document['bytes'])} in "
        f"{document['files']} files",
        "",
        _table("", [("weights", found.weights), ("optimizer state", found.optimizer)]),
        f"optimizer state / weights: {ratio} (elements)",
        "",
        _table("component", ((f"{name} ({kind})", total) for name, (kind, total) in found.components.items())),
        "",
        _table("dtype", dtypes),
        "",
        output.table(["largest tensors", "rank#", "dtype", "shape", "elements#", "size#"], largest),
    ]


def _table(first: str, sums: Iterable[tuple[str, _Sum]]) -> Any:
    rows = [(name, total.tensors, total.elements, output.size(total.bytes)) for name, total in sums]
    return output.table([first, "tensors#", "elements#", "tensor size#"], rows)
