"""One try at one commit, as rank 0 follows it: from its announcement until I/O of rank 0 has to end it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from easyckpt.saving.messages import Flush, Post, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """I/O that the leader wants done in the background; the answer comes back through `Leader.finished`."""

    kind: Literal["commit", "clean up"]
    flush: Flush
    files: dict[str, tuple[int, str]] = field(default_factory=dict)


def attempt_name(incarnation: str, number: int) -> str:
    """The name of an attempt: whose it is, and its number there."""
    return f"{incarnation}-{number:06d}"


def is_own(attempt: str | None, incarnation: str) -> bool:
    """Whether `attempt` is one of `incarnation`: it may be running, whatever its directory looks like."""
    return attempt is not None and attempt.rpartition("-")[0] == incarnation


class Attempt:
    """Pure, as the leader is. `flush` is what stands on the board."""

    def __init__(self, flush: Flush, now: float, *, commit_timeout: float, give_up_timeout: float) -> None:
        self.flush = flush
        self._commit_timeout, self._give_up_timeout = commit_timeout, give_up_timeout
        self._deadline = now + commit_timeout
        self._working = False
        self.lost = False
        """Nothing else is wrong than that a rank does not hold the snapshot any more."""

    @property
    def committing(self) -> bool:
        """Whether it may become real at any moment."""
        return self._working and self.flush.abandoned is None

    def give_up(self, reason: str, now: float) -> None:
        """Abandon it, unless it is too late for that."""
        if not self._working and self.flush.abandoned is None:
            self._abandon(reason, now)

    def advance(self, posts: Sequence[Post | None], now: float) -> Work | None:
        """Take in what the ranks report; returns the work that ends this attempt, once."""
        if self._working:
            return None
        reports = [self._report_of(post) for post in posts]
        silent = [rank for rank, report in enumerate(reports) if report is None or self._lacks_an_answer(report)]
        if self.flush.abandoned is not None:
            return self._begin("clean up", {}) if not silent or now > self._deadline else None
        errors = [f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report and report.error]
        if errors:
            self.lost = all(report.lost for report in reports if report and report.error)
            self._abandon("; ".join(errors), now)
        elif not silent and self.flush.share is None:
            digests = {report.digest for report in reports if report}
            self.flush = replace(self.flush, share=len(digests) == 1)
        elif not silent:
            files = [report.files for report in reports if report and report.files]
            return self._begin("commit", dict(ChainMap(*files)))
        elif now > self._deadline:
            ranks = ", ".join(map(str, silent))
            self._abandon(f"no answer from rank {ranks} within {self._commit_timeout:g} s", now)
        return None

    def _begin(self, kind: Literal["commit", "clean up"], files: dict[str, tuple[int, str]]) -> Work:
        self._working = True
        return Work(kind=kind, flush=self.flush, files=files)

    def _abandon(self, reason: str, now: float) -> None:
        self.flush = replace(self.flush, abandoned=reason)
        self._deadline = now + self._give_up_timeout

    def _report_of(self, post: Post | None) -> Report | None:
        report = None if post is None else post.report
        return report if report is not None and report.attempt == self.flush.attempt else None

    def _lacks_an_answer(self, report: Report) -> bool:
        """Whether `report` lacks what is waited for now."""
        if report.error is not None:
            return False
        return report.digest is None if self.flush.share is None else report.files is None
