"""``easyckpt export``: the weights of a checkpoint, for inference, as a file of their own."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Annotated, Any

import torch
import typer

from easyckpt.catalog import Entry
from easyckpt.cli import damage, output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import TARGET_HELP, Target, resolve
from easyckpt.contents import Component, Opened
from easyckpt.errors import DamagedCheckpoint, UsageError
from easyckpt.exporting import Exported, Weight, plan
from easyckpt.exporting import export as write
from easyckpt.format.layout import WEIGHTS_FILE, safe_name, weights_format


class Precision(str, Enum):
    """What floating tensors are cast to."""

    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"


_DTYPES = {Precision.fp16: torch.float16, Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32}


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("export")(output.command(export))


def export(
    checkpoint: Annotated[str, typer.Argument(metavar="ROOT[@STEP]", help=TARGET_HELP, show_default=False)],
    out: Annotated[str, typer.Argument(metavar="OUT", help=f"Where to: {WEIGHTS_FILE}.", show_default=False)],
    *,
    dtype: Annotated[Precision, typer.Option(help="What floating tensors become.", show_default=False)],
    component: Annotated[
        str | None, typer.Option(help="Which component; the only module, if not given.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """Write a checkpoint's weights, for inference, to a file of their own. The checkpoint stays as it is.

    Floating tensors are cast, all others kept; keys are those of the module's state_dict, so that load_state_dict
    takes what torch.load(OUT, weights_only=True) or safetensors' load_file(OUT) gives. Tied weights stay tied in a
    .pth; in safetensors, which knows no ties, they are written under each of their names, and a large transposed tensor
    takes as much disk space again beside OUT while it is written. Of several ranks: rank 0's.

    Exit codes: 0 written; 1 the checkpoint is damaged; 2 bad input. Nothing is written then.

    Example: easyckpt export runs/exp1@1000 model.safetensors --dtype bf16
    """
    target = resolve(checkpoint)
    target.record()  # a foreign or newer root is refused
    _check_out(out, target, force=force)
    entry, result = target.pick(), Exported()
    with _damage_says_what_next(target, entry), Opened(target.storage, entry) as opened:
        chosen = _choose(opened.components(0), component)
        weights = plan(chosen, _DTYPES[dtype], result)
        before = sum(chosen.tensors[key].nbytes for key in _once(chosen))
        with output.progress("export", sum(weight.nbytes for weight in weights)) as count:
            write(weights, out, result, count)
    _warn(result, dtype)
    document = {
        "root": target.root,
        "step": opened.manifest.step,
        "component": chosen.name,
        "file": out,
        "dtype": dtype.value,
        "tensors": len(weights),
        "cast": result.cast,
        "tied": result.tied,
        "overflows": result.overflows,
        "left_out": result.left_out,
        "checkpoint_bytes": before,
        "file_bytes": result.file_bytes,
    }
    return Answer(document, _views(document, weights))


@contextlib.contextmanager
def _damage_says_what_next(target: Target, entry: Entry) -> Iterator[None]:
    try:
        yield
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}. Nothing was written; {damage.instead_of(target, entry)}") from error


def _check_out(out: str, target: Target, *, force: bool) -> None:
    if weights_format(out) is None:
        raise UsageError(f"{out}: the name says in which format to write: it must be {WEIGHTS_FILE}")
    directory = os.path.dirname(out) or "."
    if not os.path.isdir(directory):
        what = "is not a directory" if os.path.lexists(directory) else "does not exist: make it first (mkdir -p)"
        raise UsageError(f"{out}: {directory} {what}")
    root, place = os.path.realpath(target.root), os.path.realpath(directory)
    if place == root or place.startswith(root.rstrip("/") + "/"):
        raise UsageError(f"{out}: lies in the checkpoint root {target.root}, where nothing but checkpoints belongs")
    if not safe_name(os.path.basename(out)):
        raise UsageError(f"{out}: is no name for a file")
    if os.path.isdir(out):
        raise UsageError(f"{out}: is a directory")
    if os.path.lexists(out) and not force:
        raise UsageError(f"{out}: exists already; --force replaces it")


def _choose(components: dict[str, Component], name: str | None) -> Component:
    if name is not None:
        if name not in components:
            raise UsageError(f"no component {name!r} in it; it holds {', '.join(_closest_first(name, components))}")
        return components[name]
    modules = [component for component in components.values() if component.kind == "module"]
    if len(modules) != 1:
        there = ", ".join(component.name for component in modules or components.values())
        raise UsageError(f"it holds {len(modules)} modules: choose with --component NAME one of {there}")
    return modules[0]


def _closest_first(name: str, there: Iterable[str]) -> list[str]:
    return sorted(there, key=lambda other: -difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())


def _once(component: Component) -> list[bytes]:
    """Places of the component's tensors, one for each that are tied."""
    return list({component.tensors[key].spec.path: key for key in component.tensors}.values())


def _warn(result: Exported, dtype: Precision) -> None:
    if result.overflows:
        worst = max(result.overflows, key=lambda key: result.overflows[key])
        output.say(
            f"{sum(result.overflows.values())} values are too large for {dtype.value} and became infinite, in "
            f"{len(result.overflows)} tensors, most of them in {worst}; bf16 has the range of fp32"
        )
    if result.left_out:
        output.say(f"left out, since they are no tensors: {', '.join(result.left_out[:5])}")


def _views(document: dict[str, Any], weights: list[Weight]) -> list[Any]:
    tied = document["tied"]
    rows = [
        (f"tensors of {document['component']} in step {document['step']}", output.size(document["checkpoint_bytes"]),
         document["checkpoint_bytes"]),
        (document["file"], output.size(document["file_bytes"]), document["file_bytes"]),
    ]  # fmt: skip
    facts = f"{len(weights)} tensors, {document['cast']} cast to {document['dtype']}"
    if tied:
        kept = weights_format(document["file"]) == "torch"
        facts += f"; tied: {', '.join(tied)}" + (" (still so)" if kept else " (written once for each name)")
    return [output.table(["", "size#", "bytes#"], rows), "", facts]
