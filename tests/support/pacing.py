"""Steps of a test take next to no time; those of a training take longer than a round of the memory tier."""

from __future__ import annotations

import time

import easyckpt


def wait_for_a_slot(checkpointer: easyckpt.Checkpointer, step: int, seconds: float = 5.0) -> bool:
    """Wait until neither the snapshot of `step` nor a flush that is due then would be skipped.

    False where that did not come to be in `seconds`. Only for tests that are about something else than what is
    skipped: however busy the machine is, nothing is then.
    """
    arena, ledger = checkpointer._parts.arena, checkpointer._parts.coordinator.ledger
    due = step % checkpointer._config.save_storage_interval == 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with ledger.lock:
            floor, held = ledger.floor, ledger.held()
        with arena._lock:
            slots = list(arena._supply.slots.values())
            free = [slot for slot in slots if arena._is_free(slot, floor if floor >= 0 else None, held)]
        if ledger.fatal is not None or ((free or not slots) and not (due and ledger.pending())):
            return True
        time.sleep(0.001)
    return False
