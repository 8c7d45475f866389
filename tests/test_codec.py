from __future__ import annotations

import argparse
import collections
import copy
import datetime
import enum
import math
import pathlib
import struct
import subprocess
import sys
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyckpt.errors import DamagedCheckpoint, FormatError, StateMismatch, UnsupportedValue, UsageError
from easyckpt.format import codec, codec_registry
from easyckpt.format.codec import decode, dumps, encode, encode_plain, loads, path_from_json, path_text, path_to_json
from tests.support.json_values import places


class Point(NamedTuple):
    x: object
    y: object


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


def round_trip(value, like=None):
    tensors = []

    def on_tensor(path, tensor):
        tensors.append(tensor)
        return len(tensors) - 1

    return decode(loads(dumps(encode(value, ("x",), on_tensor))), tensors.__getitem__, like)


def same(a, b):
    """Equal to the bit and to the type, also in what `==` does not look at."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, float) and type(a) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        extra = (getattr(a, "default_factory", None), vars(a) if hasattr(a, "__dict__") else None)
        other = (getattr(b, "default_factory", None), vars(b) if hasattr(b, "__dict__") else None)
        return same(list(a.items()), list(b.items())) and extra == other
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, collections.deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (set, frozenset)):
        return same(sorted(a, key=repr), sorted(b, key=repr))
    if isinstance(a, slice):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        return same(vars(a), vars(b))
    if isinstance(a, np.ndarray):
        flags = a.flags.f_contiguous == b.flags.f_contiguous and b.flags.writeable
        return flags and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, datetime.datetime):
        return (a, a.fold, str(a.tzinfo)) == (b, b.fold, str(b.tzinfo))
    return a == b


texts = st.text(alphabet=st.characters(), max_size=6)  # lone surrogates and pairs of them too
# NaN as an element of a set or a key is equal to nothing, and sorts nowhere.
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**3000), 2**3000),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    texts,
    st.binary(max_size=6),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 2**70)),
    st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size),
    st.sampled_from([torch.float32, torch.bfloat16, torch.qint8, torch.device("cpu"), torch.device("cuda:3")]),
    st.datetimes(
        timezones=st.one_of(
            st.none(),
            st.timedeltas(min_value=datetime.timedelta(hours=-23), max_value=datetime.timedelta(hours=23)).map(
                datetime.timezone
            ),
        )
    ),
    st.dates(),
    st.times(),
    st.timedeltas(),
    texts.map(pathlib.PurePosixPath),
    texts.map(pathlib.PureWindowsPath),
    texts.map(pathlib.Path),
)
keys = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=2).map(tuple), st.frozensets(inner, max_size=2)),
    max_leaves=4,
)
unhashable = st.one_of(
    st.floats(),
    st.complex_numbers(),
    st.binary(max_size=6).map(bytearray),
    st.sampled_from(["<f4", ">i2", "|b1", "<c16", "<U3", "|S4", "<M8[ns]", "<m8[25s]", "<f2"]).flatmap(
        lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.zeros(shape, dtype))
    ),
    st.sampled_from(
        [
            np.float32(0.1),
            np.int8(-3),
            np.bool_(True),
            np.str_("a\0"),
            np.bytes_(b"a\0"),
            np.str_(""),
            np.complex64(1j),
            np.float64("nan"),
            np.datetime64("2024-02-29T01", "s"),
            np.longdouble(0.1),
            np.uint64(2**63),
        ]
    ),
)


def containers(inner):
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: collections.defaultdict(list, d)),
        st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
        st.tuples(st.lists(inner, max_size=3), st.sampled_from([None, 3, 2**40])).map(lambda x: collections.deque(*x)),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        st.tuples(inner, inner, inner).map(lambda x: slice(*x)),
        st.dictionaries(texts, inner, max_size=3).map(lambda d: argparse.Namespace(**d)),
        st.dictionaries(texts, inner, max_size=3).map(lambda d: types.SimpleNamespace(**d)),
    )


values = st.recursive(st.one_of(scalars, unhashable), containers, max_leaves=12)


@settings(max_examples=250, deadline=None)
@given(values)
def test_every_value_comes_back_exactly(value):
    again = round_trip(value)
    assert same(again, value), (value, again)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            texts,
            st.integers(),
            st.floats(allow_nan=False),
            st.booleans(),
            st.none(),
            st.binary(),
            st.tuples(texts, st.integers()),
        )
    )
)
def test_paths_come_back_exactly(path):
    path = tuple(path)
    assert same(path_from_json(loads(dumps(path_to_json(path)))), path)
    path_text(path).encode("utf-8")


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        math.nan,
        -0.0,
        5e-324,
        struct.unpack(">d", b"\xff\xf8\0\0\0\0\1\1")[0],
        10**5000,
        -(10**5000),
        1e22,
        "\ud83d\ude00",
        {"\ud83d\ude00": 1, "😀": 2},
        {"$": "tensor", "v": 0},
        {1: "a", "1": "b"},
        {(1, ("a",)): []},
        {None: 1, False: 2},
        [],
        {},
        (),
        set(),
        collections.OrderedDict(),
        collections.deque(maxlen=0),
        {"a": {}, "b": [()]},
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array("x"),
        np.zeros((0, 3), ">f8"),
        np.arange(10)[::2],
        np.array(["a\0b", ""]),
        datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
        datetime.datetime(2024, 1, 1, fold=1),
        torch.Size([]),
        slice(None),
        float("1e-310"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_others_lose(value):
    assert same(
        round_trip(value),
        np.ascontiguousarray(value)
        if value is not None and isinstance(value, np.ndarray) and not value.flags.forc
        else value,
    )


def test_ints_do_not_depend_on_pythons_limit_of_digits():
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert round_trip(3**8000) == 3**8000
    finally:
        sys.set_int_max_str_digits(limit)


def test_tensors_are_taken_out_with_their_paths():
    seen = {}
    a, b = torch.ones(2), torch.zeros(3)
    value = {"m": [a, (b, a)], 3: Point(a, 1), "n": argparse.Namespace(w=b), Colour.RED: a}

    def on_tensor(path, tensor):
        seen[path] = tensor
        return 0 if tensor is a else 1

    json = encode(value, ("c",), on_tensor)
    key = '{"$":"enum","class":"Colour","v":"RED"}'
    assert set(seen) == {("c", "m", 0), ("c", "m", 1, 0), ("c", "m", 1, 1), ("c", 3, "x"), ("c", "n", "w"), ("c", key)}
    again = decode(loads(dumps(json)), [a, b].__getitem__, value)
    assert again["m"][0] is a
    assert again["m"][1][1] is a
    assert again[3] == Point(a, 1)
    assert again["n"].w is b
    assert again[Colour.RED] is a


def test_classes_come_from_the_live_object():
    value = {"p": Point(1, [Point(2, 3)]), "c": Colour.BLUE, "l": [Level.LOW], "f": Mode.READ | Mode.WRITE}
    again = round_trip(value, copy.deepcopy(value))
    assert again == value
    assert type(again["p"]) is Point
    assert type(again["p"].y[0]) is Point
    assert again["c"] is Colour.BLUE
    assert type(again["l"][0]) is Level
    assert round_trip({Colour.RED: 1, "x": 2}, {Colour.BLUE: 0}) == {Colour.RED: 1, "x": 2}


def test_a_namedtuple_without_a_live_one_gets_a_generated_class():
    again = round_trip(Point(1, "a"))
    assert again == (1, "a")
    assert (again.x, again.y, type(again).__name__, again._fields) == (1, "a", "Point", ("x", "y"))
    assert again._replace(x=2)._asdict() == {"x": 2, "y": "a"}
    assert repr(again) == "Point(x=1, y='a')"
    assert same(round_trip(again, again), again)
    renamed = collections.namedtuple("Odd", ["class", "ok"], rename=True)(1, 2)
    assert round_trip(renamed)._fields == ("_0", "ok")


@pytest.mark.parametrize("value", [Colour.RED, Level.LOW, Mode.READ, collections.defaultdict(lambda: 3)])
def test_without_the_live_class_it_says_what_is_missing(value):
    json = encode_plain(value)
    with pytest.raises(codec.MissingContext) as error:
        decode(json, [].__getitem__)
    assert isinstance(error.value, FormatError)
    assert isinstance(error.value, StateMismatch)


def test_an_enum_that_lost_the_member_is_a_mismatch():
    json = {"$": "enum", "class": "Colour", "v": "GREEN"}
    with pytest.raises(codec.MissingContext, match="GREEN"):
        decode(json, [].__getitem__, Colour.RED)


def test_default_factories():
    for factory in (list, int, dict, set, float, None):
        assert round_trip(collections.defaultdict(factory, a=1)).default_factory is factory
    live = collections.defaultdict(lambda: 7, a=1)
    again = round_trip(live, live)
    assert again["new"] == 7


def test_module_versions_on_a_state_dict_are_kept():
    state = torch.nn.BatchNorm1d(2).state_dict()
    again = round_trip(state)
    assert same(again._metadata, state._metadata)
    assert list(again) == list(state)
    state.other = 1
    with pytest.raises(UnsupportedValue, match="attributes of its own"):
        encode(state, (), lambda path, tensor: 0)


class Custom:
    def __init__(self, value):
        self.value = value


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        Custom(1),
        Text("a"),
        object(),
        print,
        lambda: 0,
        np.array([object()]),
        np.zeros(2, "i4,f4"),
        int,
        np.ma.array([1]),
        types.MappingProxyType({}),
        iter([]),
        torch.nn.Linear(1, 1),
        torch.max(torch.ones(1, 1), 0),
        type("D", (dict,), {})(),
        type("L", (list,), {})(),
        datetime.datetime(2024, 1, 1, tzinfo=type("Z", (datetime.tzinfo,), {})()),
        torch.Generator(),
        memoryview(b"a"),
        collections.ChainMap(),
        {"a"}.__class__,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_refused_by_its_path(value):
    with pytest.raises(UnsupportedValue, match=r"opt\.groups\.1\.k: .*register_codec"):
        encode({"groups": [1, {"k": value}]}, ("opt",), lambda path, tensor: 0)


def test_a_tensor_as_a_key_is_refused():
    with pytest.raises(UnsupportedValue, match="tensor"):
        encode({torch.ones(1): 1}, ("c",), lambda path, tensor: 0)


def test_a_value_in_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(UnsupportedValue, match="in itself"):
        encode_plain(value)


def nested(wrap, depth):
    value = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda v: [v],
        lambda v: {1: v},
        lambda v: (v,),
        lambda v: types.SimpleNamespace(**{"$": v}),
        lambda v: Point(v, 0),
        slice,
        lambda v: collections.OrderedDict(a=v),
    ],
)
def test_what_can_be_written_can_be_read(wrap):
    """The deepest value that encode takes is not too deep for the reader."""
    for depth in range(20, 80):
        try:
            encode_plain(nested(wrap, depth))
        except UnsupportedValue:
            break
        assert same(round_trip(nested(wrap, depth), nested(wrap, depth)), nested(wrap, depth))
    assert 30 <= depth < 79


# Registered codecs.


@pytest.fixture
def _registry(monkeypatch):
    monkeypatch.setattr(codec_registry, "BY_TYPE", {})
    monkeypatch.setattr(codec_registry, "BY_NAME", {})


@pytest.mark.usefixtures("_registry")
def test_a_registered_type_is_kept_by_name():
    codec.register_codec(Custom, lambda custom: {"v": custom.value}, lambda kept: Custom(kept["v"]), "custom")
    tensor = torch.ones(1)
    again = round_trip([Custom((1, tensor))])
    assert type(again[0]) is Custom
    assert again[0].value[1] is tensor
    json = encode_plain(Custom(1))
    codec_registry.BY_NAME.clear()
    with pytest.raises(codec.MissingContext, match="custom"):
        decode(json, [].__getitem__)


@pytest.mark.usefixtures("_registry")
def test_a_codec_that_fails_on_rotten_input_is_a_damaged_checkpoint():
    codec.register_codec(Custom, lambda custom: custom.value, lambda kept: Custom(1 // kept), "custom")
    with pytest.raises(DamagedCheckpoint, match="custom"):
        decode(encode_plain(Custom(0)), [].__getitem__)


@pytest.mark.usefixtures("_registry")
def test_a_codec_that_returns_its_own_type_does_not_run_for_ever():
    codec.register_codec(Custom, lambda custom: custom, lambda kept: kept)
    with pytest.raises(UnsupportedValue, match="in itself"):
        encode_plain(Custom(0))


@pytest.mark.usefixtures("_registry")
def test_names_and_types_are_registered_once():
    codec.register_codec(Custom, lambda custom: 1, lambda kept: Custom(1), "a")
    codec.register_codec(Custom, lambda custom: 2, lambda kept: Custom(2), "a")
    assert round_trip(Custom(0)).value == 2
    for kind, name in ((Custom, "b"), (Text, "a"), (dict, "d"), (np.ndarray, "n")):
        with pytest.raises(UsageError, match="register_codec"):
            codec.register_codec(kind, lambda value: 1, lambda kept: kept, name)


# Text.


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1e999",
        '{"a":1,"a":2}',
        "[" * 201 + "]" * 201,
        "[" * 100_000,
        "[1,]",
        "{",
        "1 2",
        "\x00",
        "'a'",
        '"é"',
        "1" * 10_000,
        '"\t"',
    ],
    ids=lambda text: text[:12],
)
def test_loads_is_strict(text):
    with pytest.raises(DamagedCheckpoint):
        loads(text.encode("utf-8"))


def test_dumps_is_compact_ordered_and_ascii():
    assert dumps({"b": [1, 1.5, None, True], "a": "é\ud800"}) == b'{"b":[1,1.5,null,true],"a":"\\u00e9\\ud800"}'
    with pytest.raises(ValueError, match="Out of range"):
        dumps(math.nan)


# Hostile input.

junk = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-3, 70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
        st.sampled_from(
            [
                "inf",
                "<f8",
                "O",
                "|O",
                "AAAA",
                "list",
                "like",
                "class",
                "__class__",
                "Point",
                "C",
                "cpu",
                "argparse",
                "0",
            ]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=9),
        st.dictionaries(st.sampled_from(["v", "$", "a", "items", "name"]), inner, max_size=3),
    ),
    max_leaves=10,
)
TAGS = sorted({*codec.decode.__globals__["_CONTAINERS"], *codec.decode.__globals__["READERS"], "none"})
tagged = st.fixed_dictionaries(
    {"$": st.sampled_from(TAGS)},
    optional=dict.fromkeys(("v", "items", "fields", "name", "class", "factory", "maxlen", "metadata"), junk),
)


def only_format_errors(read):
    try:
        return read()
    except FormatError:
        return None


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        tagged,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.builds(lambda tag, v: {"$": tag, "v": v, "items": v}, st.sampled_from(TAGS), inner),
        ),
        max_leaves=4,
    )
)
def test_malformed_tags_give_only_format_errors(json):
    only_format_errors(lambda: decode(json, [torch.ones(1)].__getitem__, [Colour.RED]))


@settings(max_examples=200, deadline=None)
@given(values, st.data())
def test_swapped_types_give_only_format_errors(value, data):
    json = loads(dumps([encode_plain(value)]))
    for _ in range(data.draw(st.integers(1, 3))):
        node, key = data.draw(st.sampled_from(places(json) or [(json, 0)]))
        if isinstance(node, list) and data.draw(st.booleans()):
            node[: key + 1] = []
        else:
            node[key] = data.draw(st.one_of(junk, tagged))
        if not json:
            return
    result = only_format_errors(lambda: decode(json, [].__getitem__))
    if result is not None:
        repr(result)  # nothing half-built that breaks later


@settings(max_examples=200, deadline=None)
@given(values, st.data())
def test_flipped_bits_and_cuts_give_only_format_errors(value, data):
    text = bytearray(dumps(encode_plain(value)))
    if data.draw(st.booleans()):
        del text[data.draw(st.integers(0, len(text))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if text:
            bit = data.draw(st.integers(0, len(text) * 8 - 1))
            text[bit // 8] ^= 1 << bit % 8
    only_format_errors(lambda: decode(loads(text), [].__getitem__))


def test_a_failure_of_the_callers_own_is_not_called_damage():
    def leaf(number):
        raise RuntimeError("the reader's bug")

    with pytest.raises(RuntimeError, match="the reader's bug"):
        decode([{"$": "tuple", "v": [{"$": "tensor", "v": 0}]}], leaf)
    with pytest.raises(DamagedCheckpoint, match="no tensor 5"):
        decode({"$": "tensor", "v": 5}, [].__getitem__)


@pytest.mark.parametrize(
    "dtype", ["O", "|O", "|V8", "i4,f4", "float64", "<f", "<M8[ns", "<M9[s]", "=f8", "<b1", "", None, ["<f8"]]
)
def test_only_plain_dtypes_in_their_own_spelling(dtype):
    for payload in (
        {"$": "ndarray", "v": [dtype, [1], "C", "AAAAAAAAAAA="]},
        {"$": "numpy", "v": [dtype, "AAAAAAAAAAA="]},
    ):
        with pytest.raises(DamagedCheckpoint):
            decode(payload, [].__getitem__)


def test_the_reader_has_a_limit_of_its_own():
    for depth in (62, 150, 100_000):
        json = None
        for _ in range(depth):
            json = [json]
        with pytest.raises(DamagedCheckpoint, match="deeper"):
            decode(json, [].__getitem__)


def test_small_text_cannot_ask_for_much_memory():
    for payload in (["<f8", [2**40], "C", ""], ["<U1000000000", [1], "C", ""], ["<f8", [0, 2**62, 2**62], "C", ""]):
        only_format_errors(lambda payload=payload: decode({"$": "ndarray", "v": payload}, [].__getitem__))
    assert len(decode({"$": "range", "v": [0, 2**60, 1]}, [].__getitem__)) == 2**60


HOSTILE = r"""
import sys, torch, numpy, random
from easyckpt.format.codec import decode, encode_plain
from easyckpt.errors import FormatError

import argparse, collections, datetime, pathlib
samples = [encode_plain(v) for v in (
    numpy.arange(3), numpy.float32(1), pathlib.Path("/etc/passwd"), datetime.datetime.now(), torch.float32,
    argparse.Namespace(a=1), collections.defaultdict(list), collections.namedtuple("P", "x y")(1, 2))]
words = ["os.system", "builtins.eval", "__import__('os')", "posix",
         "subprocess.Popen", "O", "import os", "__class__", "exec"]
def mutate(json):
    if isinstance(json, dict):
        return {k: random.choice(words) if random.random() < 0.2 else mutate(v) for k, v in json.items()}
    if isinstance(json, list):
        return [random.choice(words) if random.random() < 0.2 else mutate(v) for v in json]
    return json
random.seed(0)
documents = samples + [mutate(s) for s in samples for _ in range(200)]
for name in words:
    documents += [{"$": tag, "v": name, "name": name, "class": name, "factory": name, "items": []}
                  for tag in ("codec", "enum", "flag", "namespace", "defaultdict", "dtype", "device", "path")]
    documents += [{"$": "namedtuple", "name": name, "fields": [name], "v": [1]}]
def run():
    for document in documents:
        try:
            decode(document, [].__getitem__)
        except FormatError:
            pass
run()
bad = []
def hook(event, args):
    if event.split(".")[0] in {"import", "exec", "compile", "open", "os", "subprocess", "pickle", "marshal", "ctypes"}:
        bad.append((event, str(args)[:80]))
sys.addaudithook(hook)
run()
found = list(bad)
print(len(documents), found[:5])
sys.exit(bool(found))
"""


def test_reading_imports_executes_and_opens_nothing():
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
