"""Steps of a test take next to no time; those of a training take longer than a round of the memory tier."""

from __future__ import annotations

import time

import easyckpt


def wait_for_a_slot(checkpointer: easyckpt.Checkpointer, seconds: float = 5.0) -> bool:
    """Wait until the next snapshot would not be skipped. False where no slot became free in `seconds`.

    Only for tests that are about something else than skipped snapshots: however busy the machine is, none is then.
    """
    arena, ledger = checkpointer._parts.arena, checkpointer._parts.coordinator.ledger
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        floor, held = ledger.floor, ledger.held()
        with arena._lock:
            slots = list(arena._supply.slots.values())
            free = [slot for slot in slots if arena._is_free(slot, floor if floor >= 0 else None, held)]
        if free or not slots or ledger.fatal is not None:
            return True
        time.sleep(0.001)
    return False
