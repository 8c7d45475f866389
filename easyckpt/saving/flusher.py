"""One rank's storage work, on one background thread: write the shard; rank 0: commit, clean up, retain, open lines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from easyckpt import catalog, failpoints
from easyckpt.catalog import Catalog, Entry
from easyckpt.distributed.ranks import Ranks
from easyckpt.errors import EasyckptError, LeaseLost, OutcomeUnknown, SaveFailed
from easyckpt.events import Event, Retained
from easyckpt.format.image import Layout
from easyckpt.format.manifest import RootRecord
from easyckpt.saving.commit import CommitContext, build_manifest, check_files, commit
from easyckpt.saving.leader import Work
from easyckpt.saving.line import Origin, open_line
from easyckpt.saving.messages import Flush
from easyckpt.saving.metrics import Metrics, metrics_in
from easyckpt.saving.policy import Policy, measure
from easyckpt.saving.retention import apply_retention
from easyckpt.saving.worker import Result, Worker
from easyckpt.saving.writer import ShardWriter, SnapshotBytes, replicated_digest

logger = logging.getLogger("easyckpt")

FLUSH_BEGIN = failpoints.declare("flush.begin", "the attempt's directory exists; this rank has written nothing")


@dataclass(frozen=True, slots=True)
class CommitResult:
    """How a commit ended; `reason` is None when it succeeded."""

    reason: str | None
    unknown: bool
    nbytes: int
    seconds: float


class Flusher:
    """Runs a rank's flush jobs one after the other; each returns a Future."""

    def __init__(
        self,
        context: CommitContext,
        ranks: Ranks,
        run: str,
        *,
        policy: Policy,
        writer: ShardWriter,
        emit: Callable[[Event], None],
    ) -> None:
        self._context = context
        self._ranks = ranks
        self._run = run
        self.policy = policy
        self.untold: frozenset[int] = frozenset()
        """Steps that somebody is still to be told of: they stay until then."""
        """Which checkpoints stay. May be replaced between two commits, from any thread."""
        self._warned = False
        self._emit = emit
        self._writer = writer
        self._worker = Worker("easyckpt-flush")
        self._begun = 0.0
        """When the newest write was asked for: of the attempt that is committed next, since there is one at a time."""

    def prepare(self, layout: Layout) -> None:
        """The layout of the snapshots to come, so that it need not be parsed out of them."""
        self._writer.prepare(layout)

    def digest(self, view: SnapshotBytes) -> Future[str]:
        """Digest of the replicated leaves of `view`, to be compared across ranks."""

        def job() -> str:
            digest = replicated_digest(view)
            if not view.still_sealed():
                raise SaveFailed(f"the snapshot of step {view.meta.step} was given up while it was being read")
            return digest

        return self._worker.submit(job)

    def write(
        self, flush: Flush, view: SnapshotBytes, abandoned: threading.Event
    ) -> Future[dict[str, tuple[int, str]]]:
        """Write and fsync this rank's shard and index into the attempt's directory."""
        self._begun = time.perf_counter()

        def job() -> dict[str, tuple[int, str]]:
            directory = self._context.naming.temporary(flush.step, flush.attempt)
            self._context.check_lease()
            self._context.storage.makedirs(directory)
            failpoints.hit(FLUSH_BEGIN)
            records = self._writer.write(
                directory,
                view,
                write_replicated=self._ranks.rank == 0 or flush.share is False,
                abandoned=abandoned.is_set,
            )
            self._context.storage.sync_dir(directory)
            return {name: (record.size, record.digest) for name, record in records.items()}

        return self._worker.submit(job)

    def commit(self, work: Work, view: SnapshotBytes) -> Future[CommitResult]:
        """Rank 0: steps 4 and 5 of the commit protocol."""
        begun = self._begun

        def job() -> CommitResult:
            try:
                record = catalog.read_root(self._context.storage)
                self._check_line(record, view.meta.timeline, work.flush.step)
                directory = self._context.naming.temporary(work.flush.step, work.flush.attempt)
                check_files(self._context.storage, directory, work.files)
                files, parts = self._writer.gather(directory, work.files, self._ranks.world_size)
                manifest = build_manifest(
                    work.flush,
                    files,
                    run=self._run,
                    timeline=view.meta.timeline,
                    world_size=self._ranks.world_size,
                    parent=record.parent if record is not None else None,
                    metrics=metrics_in(self._writer.layout_of(view), view.objects),
                )
                nbytes = commit(self._context, work.flush, files, manifest, parts)
            except OutcomeUnknown as error:
                return CommitResult(str(error), True, 0, time.perf_counter() - begun)
            except (EasyckptError, OSError) as error:
                self._remove_attempt(work.flush)
                return CommitResult(f"rank 0: {error}", False, 0, time.perf_counter() - begun)
            return CommitResult(None, False, nbytes, time.perf_counter() - begun)

        return self._worker.submit(job)

    def clean_up(self, work: Work) -> Future[CommitResult]:
        """Rank 0: remove what an abandoned attempt has left."""

        def job() -> CommitResult:
            self._remove_attempt(work.flush)
            return CommitResult(work.flush.abandoned, False, 0, 0.0)

        return self._worker.submit(job)

    def retain(self, held: Collection[int]) -> Future[None]:
        """Rank 0, after a commit was published: rotate. A failure costs space, never a checkpoint: it is logged."""

        def job() -> None:
            begun = time.perf_counter()
            storage, naming = self._context.storage, self._context.naming
            try:
                found = catalog.scan(storage, naming)
                removed = apply_retention(
                    storage,
                    naming,
                    found,
                    policy=self.policy,
                    held={*held, *self.untold},
                    check_lease=self._context.check_lease,
                )
            except LeaseLost as error:
                logger.warning("old checkpoints are not rotated any more: %s", error)
                return
            except (EasyckptError, OSError) as error:
                logger.warning("rotating old checkpoints failed, will try again after the next commit: %s", error)
                return
            if removed:
                self._warn_without_metric(found)
                self._emit(_retained(found, removed, time.perf_counter() - begun))

        return self._worker.submit(job)

    def open_line(
        self, origin: Origin | None, metrics: Metrics, *, incarnation: str, busy: Callable[[], None]
    ) -> Future[tuple[RootRecord, int]]:
        """Rank 0: see `line.open_line`. It follows what was handed over before, so that nothing runs beside it."""
        return self._worker.submit(
            lambda: open_line(self._context, origin, metrics, incarnation=incarnation, busy=busy)
        )

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run any job on this thread, between flushes."""
        return self._worker.submit(job)

    def stop(self, timeout: float | None) -> bool:
        """Finish the jobs handed over; False when they did not end in `timeout` seconds."""
        return self._worker.stop(timeout)

    def _check_line(self, record: RootRecord | None, timeline: str, step: int) -> None:
        """A checkpoint beside the root's line would be no candidate ever: that must not pass for a save."""
        if record is not None and not record.on_ancestry(timeline, step):
            raise SaveFailed(
                f"step {step} belongs to the line of training {timeline}, and {self._context.storage.root} goes on "
                "from another one by now"
            )

    def _warn_without_metric(self, found: Catalog) -> None:
        """Once: nothing that is kept for its metric is mostly a name that was spelled in two ways."""
        metric = self.policy.metric
        if metric is None or self._warned or any(measure(entry, metric) is not None for entry in found.committed()):
            return
        self._warned = True
        logger.warning(
            "no checkpoint is kept as one of the best: none has a number under best_metric=%r, which is logged by "
            "ckpt.log(%s=...) before save_if_needed",
            metric,
            metric,
        )

    def _remove_attempt(self, flush: Flush) -> None:
        directory = self._context.naming.temporary(flush.step, flush.attempt)
        try:
            self._context.check_lease()  # who has taken the root over may be making this very attempt a checkpoint
            if self._context.storage.exists(directory):
                self._context.storage.remove_tree(directory)
        except (EasyckptError, OSError) as error:
            logger.warning("removing %s failed: %s", directory, error)


def _retained(found: Catalog, removed: Sequence[Entry], seconds: float) -> Retained:
    kept = [entry.step for entry in found.committed() if entry not in removed]
    return Retained(
        step=max(kept, default=None),
        bytes=sum(entry.nbytes for entry in removed),
        seconds=seconds,
        removed=tuple(entry.step for entry in removed),
        kept=tuple(kept),
    )
