"""Names in shared memory: read back for what they are, and safe whatever the user is called."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from easyckpt.format import layout, memory_names


def test_spellings_are_those_of_the_design():
    arena = memory_names.arena_id("0123456789abcdef" * 2, "/some/root")
    assert arena.startswith("0123456789ab-")
    assert len(arena) == 21
    assert memory_names.slot_file("me", arena, 1, 2) == f"easyckpt-me-{arena}-00001.2"
    assert memory_names.owner_file("me", arena, 1) == f"easyckpt-me-{arena}-00001.owner"


def test_files_of_an_arena_are_told_by_user_arena_and_rank():
    arena, other = memory_names.arena_id("a" * 32, "/one"), memory_names.arena_id("a" * 32, "/two")
    slot, owner = memory_names.slot_file("jo-ann", arena, 3, 7), memory_names.owner_file("jo-ann", arena, 3)
    for fits in ((), ("jo-ann",), ("jo-ann", arena), ("jo-ann", arena, 3)):
        assert memory_names.is_slot_file(slot, *fits)
        assert not memory_names.is_slot_file(owner, *fits)
        assert memory_names.is_arena_file(slot, *fits[:2])
        assert memory_names.is_arena_file(owner, *fits[:2])
    assert not memory_names.is_arena_file(slot, "jo")  # whose name another one's begins with
    assert not memory_names.is_arena_file(slot, "jo-ann", other)
    assert not memory_names.is_slot_file(slot, "jo-ann", arena, 2)


@given(st.text(max_size=80))
def test_any_user_name_gives_a_safe_arena_file(user):
    arena = memory_names.arena_id("0" * 32, "/r")
    for name in (memory_names.slot_file(user, arena, 0, 3), memory_names.owner_file(user, arena, 0)):
        assert layout.safe_name(name)
        assert memory_names.is_arena_file(name)
    assert layout.safe_name(memory_names.node_lock_file(user))
    assert not memory_names.is_arena_file(memory_names.node_lock_file(user))


def test_a_copied_root_has_another_arena():
    run = "0" * 32
    assert memory_names.arena_id(run, "/a") != memory_names.arena_id(run, "/b")
    assert memory_names.arena_id(run, "/a\udcff")  # a path that is not UTF-8


def test_the_owner_file_lies_beside_its_slots():
    arena = memory_names.arena_id("0" * 32, "/r")
    slot, owner = memory_names.slot_file("me", arena, 1, 12), memory_names.owner_file("me", arena, 1)
    assert memory_names.owner_beside(f"/dev/shm/{slot}") == f"/dev/shm/{owner}"
