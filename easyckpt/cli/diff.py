"""``easyckpt diff``: are two checkpoints, or two files of weights, equal to the bit; where not, and by how much."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from easyckpt.cli import output
from easyckpt.cli.output import Answer, AsJson
from easyckpt.cli.target import resolve
from easyckpt.comparison import Comparison, compare, compare_components
from easyckpt.errors import UsageError
from easyckpt.format.layout import WEIGHTS_FILE, weights_format
from easyckpt.tensorfiles import TensorFile

_DIFFERENT = 1
_SIDE = f"A checkpoint (ROOT: its newest valid one; ROOT@STEP; a step directory), or {WEIGHTS_FILE}."


def register(app: typer.Typer) -> None:
    """Add this family's command to `app`."""
    app.command("diff")(output.command(diff))


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE, show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one, of the same sort.", show_default=False)],
    tensors: Annotated[bool, typer.Option("--tensors", help="List everything that differs.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """Compare two checkpoints, or two files of weights, to the bit.

    Two runs in which nobody seeds the generators of Python and NumPy differ in easyckpt.rng at least.

    Exit codes: 0 all is equal; 1 something differs, or is damaged; 2 bad input.

    Example: easyckpt diff runs/exp1@1000 runs/exp2@1000 --tensors
    """
    files = [_is_file(side) for side in (a, b)]
    if files[0] != files[1]:
        raise UsageError(
            f"{a} and {b}: a checkpoint and a file of weights are not compared; `easyckpt export` the checkpoint first"
        )
    found = _files(a, b) if files[0] else _checkpoints(a, b)
    document = {
        "a": a,
        "b": b,
        "equal": found.equal,
        "components": {
            name: {key: value for key, value in asdict(part).items() if key != "component"} | {"equal": part.equal}
            for name, part in found.components.items()
        },
    }
    views = [_table(found), "", _verdict(found)]
    if tensors:
        document["differences"] = [asdict(difference) for difference in found.differences]
        views += ["", _list(found)] if found.differences else []
    return Answer(document, views, output.GOOD if found.equal else _DIFFERENT)


def _is_file(given: str) -> bool:
    return weights_format(given) is not None and not os.path.isdir(given)


def _checkpoints(a: str, b: str) -> Comparison:
    sides = []
    for given in (a, b):
        target = resolve(given)
        target.record()  # a foreign or newer root is refused
        sides.append((target.storage, target.pick()))
    total = sum(entry.nbytes for _, entry in sides)
    with output.progress("diff", total) as count:
        return compare(sides[0], sides[1], count)


def _files(a: str, b: str) -> Comparison:
    result = Comparison()
    total = sum(os.stat(path).st_size for path in (a, b))
    with output.progress("diff", total) as count, TensorFile(a, count) as one, TensorFile(b, count) as other:
        compare_components(one.components, other.components, 0, result)
    return result


def _table(found: Comparison) -> Any:
    rows = [
        (
            part.component,
            "yes" if part.equal else "NO",
            part.tensors,
            part.values,
            output.size(part.nbytes),
            part.differing,
            _number(part.largest, equal=part.equal),
            part.first or "-",
        )
        for part in found.components.values()
    ]
    columns = ["component", "equal to the bit", "tensors#", "values#", "tensor size#", "differ#", "largest difference#"]
    return output.table([*columns, "first that differs"], rows)


def _verdict(found: Comparison) -> str:
    if found.equal:
        return "equal to the bit"
    return f"{len(found.differences)} differ; the first: {_line(found)}"


def _line(found: Comparison) -> str:
    first = found.differences[0]
    return f"{first.path}: {first.note}" + (f" (rank {first.rank})" if first.rank else "")


def _list(found: Comparison) -> Any:
    rows = [(d.rank, d.path, d.differing or "-", _number(d.largest, equal=False), d.note) for d in found.differences]
    return output.table(["rank#", "what", "elements#", "largest difference#", "note"], rows)


def _number(value: float | None, *, equal: bool) -> str:
    """A difference for people; ``-`` where it is not one of numbers."""
    if value is None:
        return "0" if equal else "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"
