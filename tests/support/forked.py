"""Real child processes that cost no import: a test says what the child does, reads what it says, and kills it."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable

from easyckpt import failpoints


class Forked:
    """Runs `body(self)` in a forked child, with `armed` failpoints. Use as a context manager: it ends with the test."""

    def __init__(self, body: Callable[[Forked], None], armed: str = "") -> None:
        read, self._say = os.pipe()
        self._go, write = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(read)
                os.close(write)
                failpoints.arm(armed)
                body(self)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(self._say)
        os.close(self._go)
        self._lines = os.fdopen(read)
        self._write = write

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._lines.close()
        os.close(self._write)

    # In the child.

    def say(self, line: object) -> None:
        os.write(self._say, f"{line}\n".encode())

    def wait_for_go(self) -> None:
        os.read(self._go, 1)

    # In the test.

    def read(self, until: str | None = None) -> list[str]:
        """What the child says, up to the line `until` or the end."""
        lines = []
        for line in self._lines:
            lines.append(line.strip())
            if lines[-1] == until:
                break
        return lines

    def line(self) -> str:
        """The next line that the child says; empty at the end."""
        return self._lines.readline().strip()

    def go(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write, b"x")

    def wait(self) -> int:
        """The exit status; minus the signal's number when a signal ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> int:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()
