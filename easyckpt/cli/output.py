"""What the commands print and how they end, for all of them alike.

A command returns an `Answer`: one JSON-able document, the tables that show the same to people, and the exit code.
Documents and tables go to stdout; messages and progress go to stderr, so that stdout can be piped as it is.
"""

from __future__ import annotations

import datetime
import functools
import io
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from easyckpt.errors import DamagedCheckpoint, EasyckptError
from easyckpt.format.sizes import size_text

GOOD, DAMAGED, BAD_INPUT, NONDETERMINISTIC, COMMAND_FAILED = 0, 1, 2, 3, 4
_INTERRUPTED = 130
_PIPE_WIDTH = 200  # a table that is piped into a file must not be cut to a terminal's width

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found out: for programs (`document`), for people (`views`: tables and lines)."""

    document: dict[str, Any]
    views: Sequence[Table | str]
    code: int = GOOD


def command(function: Callable[_P, Answer]) -> Callable[_P, None]:
    """Make a typer command of a function that returns an `Answer` and has the parameter `as_json`.

    Every error that easyckpt or the operating system raises on purpose becomes one line and an exit code: 1 where
    something is damaged, else 2. Ctrl-C, SIGTERM and SIGHUP end it with 130, cleaned up.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            with _ended_tidily():
                answer = function(*args, **kwargs)
        except (EasyckptError, OSError) as error:
            _fail(error, as_json=as_json)
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(_INTERRUPTED) from None
        _print(answer, as_json=as_json)
        raise typer.Exit(answer.code)

    # typer would print an annotation of the wrapped function's return value otherwise.
    run.__annotations__ = {**function.__annotations__, "return": None}
    run.__doc__ = _flowing(function.__doc__ or "")
    return run


def _flowing(help_text: str) -> str:
    """A help text with one line for each paragraph, which terminals wrap; typer would keep the lines of the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in help_text.split("\n\n"))


def _print(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        output = json.dumps(plain(answer.document), indent=2, allow_nan=False) + "\n"
    else:
        console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH)
        with console.capture() as capture:  # rich would end the process with code 1 on a closed pipe
            for view in answer.views:
                console.print(view if isinstance(view, Table) else text(view), soft_wrap=isinstance(view, str))
        output = capture.get()
    try:
        sys.stdout.write(output)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`head`, `less`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain(value: Any) -> Any:
    """`value` as JSON has it: metrics may hold NaN, bytes or numpy scalars, which become text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _fail(error: Exception, *, as_json: bool) -> NoReturn:
    message = _describe(error)
    if as_json:
        json.dump({"error": {"kind": type(error).__name__, "message": message}}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    say(message)
    raise typer.Exit(DAMAGED if isinstance(error, DamagedCheckpoint) else BAD_INPUT) from None


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        return f"{where}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def say(message: str) -> None:
    """One message line for people, on stderr."""
    sys.stderr.write(f"easyckpt: {clean(message)}\n")


def clean(value: object) -> str:
    """`value` as text that cannot steer a terminal: what is not printable is escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in str(value)
    )


def text(value: object) -> Text:
    """`value` for a table cell or line: cleaned, and never read as markup."""
    return Text(clean(value), overflow="fold")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> Table:
    """A plain table; columns whose name ends with ``#`` are numbers and stand to the right."""
    result = Table(title=text(title) if title else None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        number = column.endswith("#")
        result.add_column(column.removesuffix("#"), justify="right" if number else "left", overflow="fold")
    for row in rows:
        result.add_row(*(text(cell) for cell in row))
    return result


def size(nbytes: int | None) -> str:
    """A byte count for people, in binary units; ``-`` where it is unknown."""
    return "-" if nbytes is None else size_text(nbytes)


def moment(seconds: float | None) -> str:
    """A unix time for people, in the local time zone."""
    if seconds is None:
        return "-"
    try:
        return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{seconds}"


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over `total` bytes on stderr while it is a terminal; yields the function that counts bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    with Progress(
        *columns,
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(clean(title), total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def working(title: str) -> Iterator[None]:
    """A spinner on stderr while it is a terminal, for work of unknown length."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(clean(title)):
        yield


@contextmanager
def _ended_tidily() -> Iterator[None]:
    """SIGTERM and SIGHUP, unless they are ignored, end what is inside as Ctrl-C does, so that it cleans up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # cleaning up has begun
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for taken, handler in before.items():
            signal.signal(taken, handler)


def make_streams_safe() -> None:
    """Names that stdout's encoding lacks are escaped, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
