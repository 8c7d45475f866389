from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyckpt.format import layout

STEPS = st.integers(0, layout.MAX_STEP)
WORDS = st.from_regex(r"[0-9A-Za-z_-]{1,64}", fullmatch=True)
RANKS = st.integers(0, layout.MAX_RANK)

PARSERS = [
    layout.parse_step_dir,
    layout.parse_stale_dir,
    layout.parse_tmp_dir,
    layout.parse_shard_file,
    layout.parse_index_file,
    layout.parse_pin_file,
]
WRITERS = {
    layout.parse_step_dir: layout.step_dir,
    layout.parse_stale_dir: lambda found: layout.stale_dir(*found),
    layout.parse_tmp_dir: lambda found: layout.tmp_dir(*found),
    layout.parse_shard_file: layout.shard_file,
    layout.parse_index_file: layout.index_file,
    layout.parse_pin_file: lambda step: layout.pin_file(step).removeprefix("pins/"),
}


def test_spellings_are_those_of_the_design():
    assert layout.step_dir(30) == "step-00000030"
    assert layout.stale_dir(30, "ab") == "step-00000030.stale-ab"
    assert layout.tmp_dir(30, "n1-2") == ".step-00000030.n1-2.tmp"
    assert layout.shard_file(0) == "rank-00000.safetensors"
    assert layout.index_file(12) == "rank-00012.json"
    assert layout.pin_file(30) == "pins/step-30"
    assert layout.events_file(3) == "events/rank-00003.jsonl"
    assert layout.temp_file("latest", "x") == ".latest.x.tmp"
    assert layout.trash_dir("step-00000030", "x") == ".trash-x-step-00000030"


@given(STEPS, WORDS, RANKS)
def test_every_name_is_read_back_by_its_parser_and_by_no_other(step, word, rank):
    names = {
        layout.step_dir(step): (layout.parse_step_dir, step),
        layout.stale_dir(step, word): (layout.parse_stale_dir, (step, word)),
        layout.tmp_dir(step, word): (layout.parse_tmp_dir, (step, word)),
        layout.shard_file(rank): (layout.parse_shard_file, rank),
        layout.index_file(rank): (layout.parse_index_file, rank),
    }
    for name, (own, value) in names.items():
        assert layout.safe_name(name)
        assert own(name) == value
        for parser in PARSERS:
            # A pin is looked for in its own directory only, where its name may look like a step's.
            if parser is not own and parser is not layout.parse_pin_file:
                assert parser(name) is None, (parser, name)
        assert layout.parse_trash_dir(name) is None
        assert not layout.is_temp_file(name)


@given(st.text(alphabet="step-rank0123456789.tmpalejson/\n_ ٣safet", max_size=30))
def test_a_parser_takes_only_what_its_writer_gives(name):
    for parser in PARSERS:
        found = parser(name)
        if found is not None:
            assert WRITERS[parser](found) == name


@pytest.mark.parametrize(
    "name",
    [
        "step-30",
        "step-0000030", "step-000000030", "step-0000003a", "step-00000030\n", " step-00000030", "step-٠٠٠٠٠٠٣٠",
        "step--0000030", "step-00000030.stale-", ".step-00000030..tmp", ".step-00000030.a.b.tmp", "rank-0.json",
        "rank-000001.json", "step-00000030/x", "step-" + "9" * 19,
    ],
)  # fmt: skip
def test_other_spellings_are_not_ours(name):
    assert all(parser(name) is None for parser in PARSERS if parser is not layout.parse_pin_file)


@pytest.mark.parametrize("name", ["step-030", "step-", "step-1.x", "30"])
def test_a_pin_is_spelled_one_way(name):
    assert layout.parse_pin_file(name) is None


def test_steps_are_ordered_by_number_beyond_eight_digits():
    assert layout.parse_step_dir("step-100000000") == 100_000_000
    assert layout.step_dir(100_000_000) == "step-100000000"


@pytest.mark.parametrize("step", [-1, layout.MAX_STEP + 1])
def test_no_name_for_an_impossible_step(step):
    with pytest.raises(ValueError, match="step"):
        layout.step_dir(step)


@pytest.mark.parametrize("word", ["", "a/b", "..", "a.b", "x" * 65, "a\n"])
def test_no_name_with_a_dangerous_word(word):
    for make in (layout.stale_dir, layout.tmp_dir):
        with pytest.raises(ValueError, match="file name"):
            make(1, word)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/passwd", "a\\b", "a\0b", "a\nb", "\ud800", "x" * 256, "é" * 128, None, 3, b"a"]
)
def test_unsafe_names(name):
    assert not layout.safe_name(name)


@pytest.mark.parametrize("name", ["model.safetensors", ".hidden", "a b", "...", "é" * 127, "rng_state_0.pth"])
def test_safe_names(name):
    assert layout.safe_name(name)


def test_temporary_files_and_attempts_are_told_apart():
    assert layout.is_temp_file(layout.temp_file("lease.json", "n1"))
    assert layout.parse_tmp_dir(layout.temp_file("lease.json", "n1")) is None
    assert not layout.is_temp_file(layout.tmp_dir(3, "n1"))
    with pytest.raises(ValueError, match="small file"):
        layout.temp_file("step-00000003", "n1")


def test_what_lies_beside_the_lease_is_told_from_other_temporary_files():
    successor = layout.temp_file(layout.LEASE, "n1")
    assert layout.is_beside_lease(successor)
    assert layout.is_beside_lease(layout.temp_file(successor, "n2"))  # what the successor file is made through
    others = (layout.LEASE, layout.temp_file("latest", "n1"), layout.temp_file("lease.json.bak", "n1"), f".{successor}")
    assert not any(layout.is_beside_lease(name) for name in others)


def test_trash_is_recognised_whatever_it_was():
    for name in ("step-00000001", ".step-00000001.a.tmp", "step-00000001.stale-t"):
        assert layout.parse_trash_dir(layout.trash_dir(name, "n")) == name
    assert layout.parse_trash_dir(".trash-n-") is None
    with pytest.raises(ValueError, match="nonce"):
        layout.trash_dir("step-00000001", "a-b")


def test_native_naming_is_this_module():
    naming: layout.NamingScheme = layout.NativeNaming()
    assert naming.parse_committed(naming.committed(7)) == 7
    assert naming.parse_temporary(naming.temporary(7, "a")) == (7, "a")
    assert naming.parse_stale(naming.stale(7, "line")) == (7, "line")
    assert naming.parse_trash(naming.trash(naming.committed(7), "n")) == naming.committed(7)
