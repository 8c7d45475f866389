"""``easyckpt ls`` and ``easyckpt show``: what is there. They read manifests and indexes, never tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from easyckpt import catalog
from easyckpt.catalog import Entry
from easyckpt.cli import output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import LISTED, TARGET_HELP, Target, resolve
from easyckpt.errors import DamagedCheckpoint, FormatError, UsageError
from easyckpt.format import codec, layout
from easyckpt.format.image import Layout
from easyckpt.format.manifest import Index, Manifest
from easyckpt.format.parts import read_part

_VERIFY = "see `easyckpt verify`"


def register(app: typer.Typer) -> None:
    """Add this family's commands to `app`."""
    app.command("ls")(output.command(ls))
    app.command("show")(output.command(show))


def ls(
    root: Annotated[str, typer.Argument(help="A checkpoint root.", show_default=False)],
    all_: Annotated[bool, typer.Option("--all", help="Also stale, unfinished and removed ones.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """List the checkpoints of a run, oldest first.

    It looks at manifests and at the sizes of files only; `easyckpt verify` reads them. The size of a checkpoint, here
    and wherever it is told, is that of all ranks' files (shards and indexes); that of its tensors is a little less.

    Exit codes: 0 listed; 1 the root's record is damaged; 2 bad input.

    Example: easyckpt ls runs/exp1 --all
    """
    target = resolve(root)
    record = target.record()
    named = target.named()
    entries = [named] if named is not None else [e for e in target.scan().entries if all_ or e.kind in LISTED]
    pinned = catalog.pinned_steps(target.storage)
    rows = [{**entry_document(entry), "pinned": entry.step in pinned} for entry in entries]
    document = {
        "root": target.root,
        "run": record.run if record else None,
        "timelines": [line.id for line in record.timelines] if record else [],
        "checkpoints": rows,
    }
    return Answer(document, _ls_views(rows) if rows else [f"{target.root}: no checkpoint in it yet"])


def _ls_views(rows: list[dict[str, Any]]) -> list[Any]:
    """A table that fits a terminal of 80 columns; names and problems, which do not, come below it."""
    cells = [
        (
            row["step"],
            output.moment(row["created"]),
            output.size(row["bytes"]),
            row["world_size"] if row["world_size"] is not None else "-",
            row["timeline"] or "-",
            _state(row),
        )
        for row in rows
    ]
    below = [
        f"{row['name']}: {row['problem'] or row['kind']}"
        for row in rows
        if row["problem"] is not None or row["kind"] != "committed"
    ]
    table = output.table(["step#", "saved", "size#", "ranks#", "timeline", "state"], cells)
    return [table, *([""] if below else []), *below]


def _state(row: dict[str, Any]) -> str:
    """What others wrote is not judged."""
    not_valid = row["problem"] is not None and row["valid"] is not None
    return str(row["kind"]) + (", not valid" if not_valid else ", pinned" if row["pinned"] else "")


def entry_document(entry: Entry) -> dict[str, Any]:
    """What is known of one directory of the root, for programs."""
    manifest = entry.manifest
    return {
        "step": entry.step,
        "name": entry.name,
        "kind": entry.kind,
        "valid": None if entry.kind == "foreign" else manifest is not None and entry.problem is None,
        "problem": entry.problem,
        "timeline": manifest.timeline if manifest else entry.timeline,
        "created": manifest.created if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "bytes": entry.nbytes if manifest else None,
        "metrics": dict(manifest.metrics) if manifest else {},
    }


@dataclass(slots=True)
class _Part:
    """What the ranks hold together of one component."""

    tensors: int = 0
    nbytes: int = 0
    dtypes: set[str] = field(default_factory=set)

    def add(self, nbytes: int, dtype: str) -> None:
        self.tensors += 1
        self.nbytes += nbytes
        self.dtypes.add(dtype)


def show(
    checkpoint: Annotated[str, typer.Argument(metavar="ROOT[@STEP]", help=TARGET_HELP, show_default=False)],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """Show what one checkpoint holds (the newest valid one, unless a step is given).

    It reads the manifest and the indexes, and looks at the sizes of files; `easyckpt verify` reads all bytes.

    Exit codes: 0 shown; 1 what it reads is damaged; 2 bad input.

    Example: easyckpt show runs/exp1@5000 --tensors
    """
    target = resolve(checkpoint)
    target.record()  # a foreign or newer root is refused, whatever lies in it
    entry = target.pick()
    manifest = entry.manifest
    if manifest is None:
        raise UsageError(f"{target.root}: {entry.name} cannot be shown: {entry.problem}")
    parts, leaves = _contents(_written_by_ranks(target, entry, manifest))
    document = {
        "root": target.root,
        **entry_document(entry),
        "run": manifest.run,
        "attempt": manifest.attempt,
        "parent": manifest.parent,
        "format": manifest.format,
        "features": list(manifest.features),
        "files": {name: {"size": file.size, "digest": file.digest} for name, file in sorted(manifest.files.items())},
        "components": {
            name: {"tensors": part.tensors, "bytes": part.nbytes, "dtypes": sorted(part.dtypes)}
            for name, part in parts.items()
        },
    }
    views = [*_facts(target, entry, manifest), _parts_table(parts), "", _files_table(manifest)]
    if tensors:
        document["tensors"] = leaves
        views += ["", _tensors_table(leaves)]
    return Answer(document, views, output.GOOD if entry.problem is None else output.DAMAGED)


def _written_by_ranks(target: Target, entry: Entry, manifest: Manifest) -> Iterator[tuple[Layout, list[bool]]]:
    """Of each rank what it holds, and which of the leaves it wrote itself."""
    for rank in range(len(manifest.parts)):
        try:
            part = read_part(manifest.parts, rank, manifest.files)
        except FormatError as error:
            raise type(error)(f"{target.root}: {entry.name} cannot be shown: {error}; {_VERIFY}") from error
        yield part.layout, part.written
    for name in sorted(name for name in manifest.files if layout.parse_index_file(name) is not None):
        index = _read_index(target, entry, name)
        yield index.layout, [index.shard.write_replicated or not leaf.replicated for leaf in index.layout.leaves]


def _read_index(target: Target, entry: Entry, name: str) -> Index:
    try:
        return Index.from_bytes(target.storage.read(f"{entry.name}/{name}"))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{target.root}: step {entry.step} is damaged: {name} is missing; {_VERIFY}") from None
    except FormatError as error:
        raise type(error)(f"{target.root}: {entry.name}/{name} cannot be shown: {error}; {_VERIFY}") from error


def _contents(ranks: Iterable[tuple[Layout, list[bool]]]) -> tuple[dict[str, _Part], list[dict[str, Any]]]:
    parts: dict[str, _Part] = {}
    leaves: list[dict[str, Any]] = []
    for held, written in ranks:
        for component in held.trees if isinstance(held.trees, dict) else ():
            parts.setdefault(str(component), _Part())
        for leaf in itertools.compress(held.leaves, written):  # the rest is in another rank's files
            parts.setdefault(str(leaf.path[0]), _Part()).add(leaf.nbytes, leaf.dtype)
            leaves.append(
                {
                    "rank": held.rank,
                    "path": codec.path_text(leaf.path),
                    "dtype": leaf.dtype,
                    "shape": list(leaf.shape),
                    "bytes": leaf.nbytes,
                    "replicated": leaf.replicated,
                }
            )
    return parts, leaves


def _facts(target: Target, entry: Entry, manifest: Manifest) -> list[str]:
    total = output.size(entry.nbytes)
    lines = [
        f"{target.root}: step {manifest.step} ({entry.name}), {total} in {len(manifest.files)} files",
        f"saved {output.moment(manifest.created)} by {manifest.world_size} rank(s), run {manifest.run}, "
        f"timeline {manifest.timeline}",
    ]
    if entry.problem is not None:
        lines.append(f"not valid: {entry.problem}; {_VERIFY}")
    if manifest.parent is not None:
        lines.append(f"its run began from a copy of {manifest.parent}")
    if manifest.metrics:
        lines.append("metrics: " + ", ".join(f"{name}={value}" for name, value in manifest.metrics.items()))
    return [*lines, ""]


def _parts_table(parts: dict[str, _Part]) -> Any:
    rows = [
        (name, part.tensors, output.size(part.nbytes), " ".join(sorted(part.dtypes))) for name, part in parts.items()
    ]
    return output.table(["component", "tensors#", "tensor size#", "dtypes"], rows)


def _files_table(manifest: Manifest) -> Any:
    rows = [(name, output.size(file.size), file.digest) for name, file in sorted(manifest.files.items())]
    return output.table(["file", "size#", "digest"], rows)


def _tensors_table(leaves: list[dict[str, Any]]) -> Any:
    rows = [
        (
            leaf["rank"],
            leaf["path"],
            leaf["dtype"],
            "x".join(map(str, leaf["shape"])) or "scalar",
            output.size(leaf["bytes"]),
        )
        for leaf in leaves
    ]
    return output.table(["rank#", "tensor", "dtype", "shape", "size#"], rows)
