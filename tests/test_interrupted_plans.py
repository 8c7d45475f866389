"""Where words of memory lie is planned anew when tensors move. Ctrl-C at any line of that leaves no mixture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import torch

from easyckpt.saving import gathering, probes
from easyckpt.saving.gathering import Gather
from easyckpt.saving.probes import PROBES, Probes
from easyckpt.state.capture import StateCapture

TENSORS = 40


def interrupted(file: str, line: int, action: Callable[[], Any]) -> bool:
    """Run `action` up to the `line`-th line in `file`; whether it came to that."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_probes_read_the_memory_that_they_are_asked_for():
    offsets = list(range(0, 4 * PROBES, 4))
    one, other = torch.arange(PROBES, dtype=torch.int32), torch.arange(100, 100 + PROBES, dtype=torch.int32)
    fresh: Callable[[], Probes] = lambda: Probes(offsets, [])  # noqa: E731
    for line in count(1):
        used, new = fresh(), fresh()
        used.words([one.data_ptr()])
        if not interrupted(probes.__file__, line, lambda used=used: used.words([other.data_ptr()])):
            break
        interrupted(probes.__file__, line, lambda new=new: new.words([other.data_ptr()]))
        for plan in (used, new):
            assert plan.words([other.data_ptr()]).tolist() == other.tolist()
            assert plan.words([one.data_ptr()]).tolist() == one.tolist()
    assert line > 3


class Handing:
    """Hands over fresh tensors at each call, of the same form and elsewhere in memory."""

    def __init__(self) -> None:
        self.sets = {
            first: [torch.full((5,), first + n, dtype=torch.uint8) for n in range(TENSORS)] for first in (0, 100)
        }
        self.sets[100] = [torch.cat([torch.zeros(8, dtype=torch.uint8), t])[8:] for t in self.sets[100]]
        self.first = 0

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.sets[self.first]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_tiny_tensors_are_gathered_from_where_they_are():
    handing = Handing()
    capture = StateCapture({"handing": handing})
    captures = {}
    for first in handing.sets:
        handing.first = first
        captures[first] = capture.capture()
    leaves = captures[0].layout.leaves
    numbers = [n for n, leaf in enumerate(leaves) if leaf.path[0] == "handing" and leaf.nbytes == 5]
    assert len(numbers) == TENSORS

    def gathered(gather: Gather, first: int) -> list[int]:
        return gather.words(captures[first]).tolist()

    expected = {first: gathered(Gather(captures[first], numbers), first) for first in captures}
    assert expected[0] != expected[100]
    for line in count(1):
        gather = Gather(captures[0], numbers)
        gathered(gather, 0)
        if not interrupted(gathering.__file__, line, lambda gather=gather: gathered(gather, 100)):
            break
        assert gathered(gather, 0) == expected[0]
        assert gathered(gather, 100) == expected[100]
    assert line > 5
