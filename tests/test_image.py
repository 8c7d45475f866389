from __future__ import annotations

import json
import math

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyckpt.errors import DamagedCheckpoint, FormatError, NewerFormat, UnsupportedValue
from easyckpt.format import dtypes, image
from easyckpt.format.canonical import dumps, loads
from easyckpt.format.image import Layout, LeafSpec, plan_layout, shard_header, shard_keys, written_bytes
from easyckpt.format.leaf import COLUMNS


def spec(path, dtype="float32", shape=(2,), order=None, replicated=False, device="cpu"):
    order = tuple(range(len(shape))) if order is None else order
    return LeafSpec(tuple(path), dtype, tuple(shape), order, device, replicated)


@st.composite
def specs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return LeafSpec(
        path=tuple(
            draw(st.lists(st.one_of(st.text(max_size=4), st.integers(), st.none(), st.binary(max_size=2)), max_size=3))
        ),
        dtype=draw(st.sampled_from(sorted(image.DTYPES))),
        shape=shape,
        order=tuple(draw(st.permutations(range(len(shape))))),
        device=draw(st.sampled_from(["cpu", "cuda"])),
        replicated=draw(st.booleans()),
    )


@st.composite
def layouts(draw):
    world_size = draw(st.integers(1, 3))
    return plan_layout(
        draw(st.lists(specs(), max_size=8)), {"model": [{"$": "tensor", "v": 0}]}, world_size - 1, world_size
    )


@given(layouts())
def test_a_layout_is_read_back_equal(layout):
    again = Layout.from_bytes(layout.encoded)
    assert again == layout
    assert again.digest == layout.digest
    assert len(layout.digest) == 32


@given(layouts())
def test_leaves_are_aligned_and_fill_their_groups(layout):
    assert all(leaf.offset % image.ITEM_BYTES[leaf.dtype] == 0 for leaf in layout.leaves)
    used = [(leaf.offset, leaf.offset + leaf.nbytes) for leaf in layout.leaves if leaf.nbytes]
    own = sum(leaf.nbytes for leaf in layout.leaves if not leaf.replicated)
    assert layout.own_bytes == own
    assert all(begin >= end for (_, end), (begin, _) in zip(sorted(used), sorted(used)[1:], strict=False))
    for leaf in layout.leaves:
        inside = (layout.replicated_offset, layout.image_bytes) if leaf.replicated else (0, layout.own_bytes)
        assert inside[0] <= leaf.offset <= leaf.offset + leaf.nbytes <= inside[1]
    assert layout.replicated_offset % 4096 == 0 or layout.replicated_offset == layout.image_bytes


def test_one_rank_owns_everything():
    layout = plan_layout([spec("a", replicated=True), spec("b")], {}, 0, 1)
    assert layout.own_bytes == layout.image_bytes == 16
    assert not any(leaf.replicated for leaf in layout.leaves)


def test_what_the_rank_writes_comes_first():
    layout = plan_layout([spec("a", replicated=True), spec("b"), spec("c", "float64")], {}, 1, 2)
    assert [leaf.offset for leaf in layout.leaves] == [4096, 16, 0]
    assert written_bytes(layout, False) == 24
    assert written_bytes(layout, True) == 4096 + 8


def test_the_encoding_is_made_once():
    layout = plan_layout([spec("a")], {}, 0, 1)
    assert layout.encoded is layout.encoded
    assert shard_header(layout, True) is shard_header(layout, True)


# The shard file and the safetensors library.

SAMPLES = {
    ("zero", "dim"): torch.tensor(1.5),
    ("empty",): torch.empty((0, 3), dtype=torch.float64),
    ("bool",): torch.tensor([[True, False, True]]),
    ("bf16",): torch.randn(3, 5).to(torch.bfloat16),
    ("fp8", "e4m3"): torch.randn(7).to(torch.float8_e4m3fn),
    ("fp8", "e5m2"): torch.randn(7).to(torch.float8_e5m2),
    ("c64",): torch.randn(2, 2, dtype=torch.complex64),
    ("c128",): torch.randn(3, 2, dtype=torch.complex128),
    ("c128", "zero"): torch.tensor(1 + 2j, dtype=torch.complex128),
    ("c128", "empty"): torch.empty((2, 0), dtype=torch.complex128),
    ("permuted",): torch.randn(2, 3, 4).permute(2, 0, 1),
    ("channels", "last"): torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ("int",): torch.arange(5),
    ("u16",): torch.arange(5).to(torch.uint16),
    ("a", 1, "x"): torch.ones(3, dtype=torch.uint8),
    ("a.1", "x"): torch.zeros(3, dtype=torch.uint8),
    ("\ud800 ü",): torch.ones(1),
    ("__metadata__",): torch.ones(2),
    ("easyckpt", "padding"): torch.ones(4),
}


def order_of(tensor):
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d)))


def raw(tensor):
    flat = tensor.permute(order_of(tensor)).contiguous().reshape(-1)
    return b"" if flat.numel() == 0 else flat.view(torch.uint8).numpy().tobytes()


def build(tensors, replicated, rank=0, world_size=2):
    layout = plan_layout(
        [
            LeafSpec(path, image.dtype_name(t.dtype), tuple(t.shape), order_of(t), t.device.type, path in replicated)
            for path, t in tensors.items()
        ],
        {},
        rank,
        world_size,
    )
    memory = bytearray(b"\xee" * layout.image_bytes)
    for leaf in layout.leaves:
        memory[leaf.offset : leaf.offset + leaf.nbytes] = raw(tensors[leaf.path])
    return layout, memory


def shard(layout, memory, write_replicated):
    header = shard_header(layout, write_replicated)
    assert len(header) % 4096 == 0
    return header + memory[: written_bytes(layout, write_replicated)]


def check_loaded(data, layout, tensors, expected):
    loaded = safetensors.torch.load(bytes(data))
    keys = dict(zip((leaf.path for leaf in layout.leaves), shard_keys(layout), strict=True))
    assert set(loaded) - {image.PADDING_KEY} == {keys[path] for path in expected}
    for leaf in layout.leaves:
        if leaf.path not in expected:
            continue
        tensor = loaded[keys[leaf.path]]
        if tensor.dtype != image.DTYPES[leaf.dtype]:
            assert tensor.dtype == torch.uint8
            tensor = tensor.reshape(-1).view(image.DTYPES[leaf.dtype]).reshape(leaf.stored_shape)
        tensor = tensor.permute(tuple(leaf.order.index(d) for d in range(len(leaf.order))))
        original = tensors[leaf.path]
        assert tensor.shape == original.shape
        assert tensor.dtype == original.dtype
        assert raw(tensor.permute(leaf.order).contiguous()) == raw(original)
        assert torch.equal(tensor.to(torch.complex128), original.to(torch.complex128))


@pytest.mark.parametrize(
    "replicated", [set(), set(list(SAMPLES)[::2]), set(SAMPLES)], ids=["own", "both", "replicated"]
)
@pytest.mark.parametrize("write_replicated", [False, True])
def test_a_shard_is_a_safetensors_file(replicated, write_replicated):
    layout, memory = build(SAMPLES, replicated)
    data = shard(layout, memory, write_replicated)
    expected = {path for path in SAMPLES if write_replicated or path not in replicated}
    check_loaded(data, layout, SAMPLES, expected)


def test_a_shard_names_its_maker_and_loads_from_a_file(tmp_path):
    layout, memory = build(SAMPLES, set(list(SAMPLES)[::2]))
    (tmp_path / "x.safetensors").write_bytes(shard(layout, memory, True))
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "easyckpt": "1"}
        assert image.PADDING_KEY in file.keys()  # noqa: SIM118  not a dict


@settings(deadline=None)
@given(layouts(), st.booleans())
def test_safetensors_accepts_every_layout(layout, write_replicated):
    data = shard(layout, bytearray(layout.image_bytes), write_replicated)
    names = [name for name, _ in safetensors.deserialize(bytes(data))]
    keys = shard_keys(layout)
    assert len(set(keys)) == len(keys)
    expected = {key for key, leaf in zip(keys, layout.leaves, strict=True) if write_replicated or not leaf.replicated}
    assert set(names) - {image.PADDING_KEY} == expected


def test_keys_clash_in_order_and_never_with_the_reserved_ones():
    layout = plan_layout([spec(("a", "b")), spec(("a.b",)), spec(("a.b#1",)), spec(("__metadata__",))], {}, 0, 1)
    assert shard_keys(layout) == ("a.b", "a.b#1", "a.b#1#1", "__metadata__#1")


def test_an_empty_state_is_a_shard():
    layout = plan_layout([], {}, 0, 1)
    assert safetensors.deserialize(shard_header(layout, True)) == []
    assert Layout.from_bytes(layout.encoded) == layout


def test_a_header_that_safetensors_would_refuse_is_not_written(monkeypatch):
    monkeypatch.setattr(image, "MAX_HEADER_BYTES", 8192)
    layout = plan_layout([spec((number,)) for number in range(200)], {}, 0, 1)
    with pytest.raises(UnsupportedValue, match="200 tensors"):
        shard_header(layout, True)


def test_dtypes_with_a_storage_are_known_and_the_others_refused():
    assert {torch.float32, torch.bfloat16, torch.complex128, torch.bool} <= set(image.DTYPES.values())
    every = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    missing = {str(dtype) for dtype in every - set(image.DTYPES.values())}
    assert missing == {"torch.qint8", "torch.qint32", "torch.quint8", "torch.quint4x2", "torch.quint2x4"}
    with pytest.raises(UnsupportedValue, match="qint8"):
        image.dtype_name(torch.qint8)
    supported = {str(dtype)[6:] for dtype in safetensors.torch._TYPES.values()}
    assert set(dtypes._SAFETENSORS) == supported


# Hostile input.

GOOD = plan_layout(
    [spec(("m", 0), shape=(2, 3)), spec(("m", b"k"), "int8", (4,)), spec("r", "float64", (), replicated=True)],
    {"m": [1]}, 1, 2,
)  # fmt: skip


def edited(change):
    value = loads(GOOD.encoded)
    change(value)
    return dumps(value)


def put(number, name, value):
    return lambda layout: layout["leaves"][name].__setitem__(number, value)


@pytest.mark.parametrize(
    "change",
    [
        put(0, "offset", 4), put(0, "offset", -4), put(0, "offset", 2**70), put(0, "nbytes", 23),
        put(0, "shape", [2, 4]),
        put(0, "shape", [True, 6]), put(0, "shape", [2.0, 3]), put(0, "order", [0, 0]), put(0, "order", [1]),
        put(0, "order", [0, 2]), put(0, "path", "m"), put(0, "path", [{"$": "list"}]), put(0, "path", [[1]]),
        put(0, "path", [{"$": "tensor", "v": 0}]), put(0, "path", [{"$": "set", "v": []}]), put(0, "replicated", 1),
        put(0, "replicated", True), put(0, "device", "../x"), put(0, "dtype", "qint8"), put(0, "dtype", None),
        put(0, "shape", [2**40, 2**40]), put(0, "shape", [0, 2**70]), put(1, "offset", 0), put(2, "offset", 28),
        put(0, "owner", -1), put(0, "owner", "0"), put(0, "owner", None), put(0, "owner", True), put(0, "nbytes", None),
        put(0, "device", None),
        lambda layout: layout.update(own_bytes=32), lambda layout: layout.update(image_bytes=2**80),
        lambda layout: layout.update(rank=2), lambda layout: layout.update(world_size=0),
        lambda layout: layout.update(leaves={}), lambda layout: layout.update(leaves=[]),
        *(lambda layout, name=name: layout["leaves"][name].pop() for name in COLUMNS[:-1]),
        *(lambda layout, name=name: layout["leaves"][name].append(3) for name in COLUMNS[:-1]),
        *(lambda layout, name=name: layout["leaves"].update({name: None}) for name in COLUMNS[:-1]),
        lambda layout: layout.pop("trees"),
    ],
)  # fmt: skip
def test_every_field_is_checked(change):
    with pytest.raises(FormatError):
        Layout.from_bytes(edited(change))


def test_a_newer_layout_is_named_so():
    with pytest.raises(NewerFormat, match="format 2"):
        Layout.from_bytes(edited(lambda layout: layout.update(format=2)))


@pytest.mark.parametrize(
    "change",
    [
        put(0, "owner", 0), put(2, "owner", 1),
        lambda layout: layout["leaves"].update({"global": [[[4, 3], [2, 0]], None, None]}),
        lambda layout: layout["leaves"].update(compressed=[]), lambda layout: layout["leaves"].pop("device"),
    ],
)  # fmt: skip
def test_what_a_later_version_may_write_is_refused_as_newer(change):
    """Pieces of tensors, and replicated tensors that another rank than rank 0 wrote."""
    with pytest.raises(NewerFormat, match="upgrade"):
        Layout.from_bytes(edited(change))


def test_not_a_layout():
    for data in (b"", b"[]", b"null", b"{}", b'{"format":1', b"\xff"):
        with pytest.raises(DamagedCheckpoint):
            Layout.from_bytes(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bits_and_cuts_never_give_anything_but_a_format_error(data):
    text = bytearray(GOOD.encoded)
    if data.draw(st.booleans()):
        del text[data.draw(st.integers(0, len(text) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if text:
            bit = data.draw(st.integers(0, len(text) * 8 - 1))
            text[bit // 8] ^= 1 << bit % 8
    try:
        layout = Layout.from_bytes(bytes(text))
    except FormatError:
        return
    assert sum(leaf.nbytes for leaf in layout.leaves) <= layout.image_bytes
    assert all(math.prod(leaf.shape) * image.ITEM_BYTES[leaf.dtype] == leaf.nbytes for leaf in layout.leaves)
    json.loads(shard_header(layout, True)[8:])
