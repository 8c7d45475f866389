"""The records of a root: whose it is, its timelines, and who may write it."""

from __future__ import annotations

from dataclasses import dataclass

from easyckpt.format import records
from easyckpt.format.canonical import Json
from easyckpt.format.fields import HEX_32, TOKEN, Fields
from easyckpt.format.layout import MAX_STEP

FORMAT = records.FORMAT

_ROOT = "easyckpt.root"
_LEASE = "easyckpt.lease"


@dataclass(frozen=True, slots=True)
class Timeline:
    """One unbroken line of training."""

    id: str
    parent: str | None
    """The timeline that it goes on from; None for one that began from nothing."""
    fork_step: int
    """The step of the parent that it goes on from. Without a parent: of what training has gone on from that is not in a
    checkpoint of ours; 0 for nothing."""
    explicit: bool
    """The user named the step: what was set aside stays until it is pruned by hand."""
    opened: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootRecord:
    """``easyckpt.json``: whose root this is and which timelines it has seen, oldest first."""

    format: int = FORMAT
    features: tuple[str, ...] = ()
    run: str
    created: float
    timelines: tuple[Timeline, ...]
    parent: str | None = None
    """``run/timeline/step`` of the checkpoint that the run began from: one copied from another run's root."""

    def to_bytes(self) -> bytes:
        """Return the text of the file."""
        timelines: list[Json] = [
            {
                "id": line.id,
                "parent": line.parent,
                "fork_step": line.fork_step,
                "explicit": line.explicit,
                "opened": line.opened,
            }
            for line in self.timelines
        ]
        return records.write(
            _ROOT,
            {
                "format": self.format,
                "features": list(self.features),
                "run": self.run,
                "created": self.created,
                "timelines": timelines,
                "parent": self.parent,
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> RootRecord:
        """Read and check the file. Raises ForeignFormat, NewerFormat or DamagedCheckpoint."""
        fields = records.read(data, _ROOT)
        return cls(
            format=fields.number("format"),
            features=fields.texts("features"),
            run=fields.text("run", HEX_32),
            created=fields.real("created"),
            timelines=_timelines(fields),
            parent=fields.optional_text("parent"),
        )

    def ancestry(self) -> list[tuple[str, int | None]]:
        """Return (timeline, newest step of it that still counts; None: all), from the newest timeline back."""
        known = {line.id: line for line in self.timelines}
        line = self.timelines[-1] if self.timelines else None
        limit: int | None = None
        result: list[tuple[str, int | None]] = []
        while line is not None:
            result.append((line.id, limit))
            if line.parent is None:
                break
            limit = line.fork_step if limit is None else min(limit, line.fork_step)
            line = known[line.parent]
        return result

    @property
    def begun_at(self) -> int:
        """The step at which the line that is open began, of what is in no checkpoint of ours; 0: from nothing."""
        known = {line.id: line for line in self.timelines}
        return known[self.ancestry()[-1][0]].fork_step if self.timelines else 0

    def on_ancestry(self, timeline: str, step: int) -> bool:
        """Does `step` of `timeline` lie in the past of the newest timeline?"""
        return any(name == timeline and (limit is None or step <= limit) for name, limit in self.ancestry())

    @property
    def runs(self) -> frozenset[str]:
        """Runs whose checkpoints belong here: this one, and the one whose checkpoints were copied."""
        return frozenset(filter(None, (self.run, (self.parent or "").partition("/")[0])))

    def is_past(self, run: str, timeline: str, step: int) -> bool:
        """Is `step` of `run` one that training may go on from, and that rotation counts?"""
        return run in self.runs and self.on_ancestry(timeline, step)


def _timelines(fields: Fields) -> tuple[Timeline, ...]:
    timelines: dict[str, Timeline] = {}
    for number, value in enumerate(fields.items("timelines")):
        item = Fields(value, f"{_ROOT}: timeline {number}")
        line = Timeline(
            id=item.text("id", TOKEN),
            parent=item.optional_text("parent", TOKEN),
            fork_step=item.number("fork_step", high=MAX_STEP),
            explicit=item.flag("explicit"),
            opened=item.real("opened"),
        )
        # Parents come first, so that no chain of parents is a circle.
        if line.id in timelines or (line.parent is not None and line.parent not in timelines):
            fields.damaged("timelines", "a list of timelines, each after its parent")
        timelines[line.id] = line
    return tuple(timelines.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """``lease.json``: which process may write the root."""

    format: int = FORMAT
    features: tuple[str, ...] = ()
    host: str
    boot: str
    """Identity of the host's boot: a pid means nothing in another one."""
    pid: int
    process: str = ""
    """Which process `pid` is: kernel, namespace and start of it; '' where it could not tell."""
    run: str
    incarnation: str
    token: str
    lock: str
    """Path of the owner's record lock file, on its host."""
    elastic_run: str | None = None
    """TORCHELASTIC_RUN_ID, None where it is the default."""
    restart_count: int = 0
    """TORCHELASTIC_RESTART_COUNT."""
    renewed: int = 0
    """Counts renewals: a watcher on another host needs no common clock."""
    time: float
    """Seconds since 1970 by the owner's clock, for people."""

    def to_bytes(self) -> bytes:
        """Return the text of the file."""
        return records.write(
            _LEASE,
            {
                "format": self.format,
                "features": list(self.features),
                "host": self.host,
                "boot": self.boot,
                "pid": self.pid,
                "process": self.process,
                "run": self.run,
                "incarnation": self.incarnation,
                "token": self.token,
                "lock": self.lock,
                "elastic_run": self.elastic_run,
                "restart_count": self.restart_count,
                "renewed": self.renewed,
                "time": self.time,
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaseRecord:
        """Read and check the file. Raises ForeignFormat, NewerFormat or DamagedCheckpoint."""
        fields = records.read(data, _LEASE)
        return cls(
            format=fields.number("format"),
            features=fields.texts("features"),
            host=fields.text("host"),
            boot=fields.text("boot"),
            pid=fields.number("pid"),
            process=fields.text("process"),
            run=fields.text("run", HEX_32),
            incarnation=fields.text("incarnation", TOKEN),
            token=fields.text("token", TOKEN),
            lock=fields.text("lock"),
            elastic_run=fields.optional_text("elastic_run"),
            restart_count=fields.number("restart_count"),
            renewed=fields.number("renewed"),
            time=fields.real("time"),
        )
