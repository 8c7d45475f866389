"""Generators of random numbers as plain values and tensors: the global ones of this process, and the user's own."""

from __future__ import annotations

import array
import numbers
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

_MT19937_WORDS, _PHILOX_BUFFER = 624, 4


def host_generators() -> dict[str, Any]:
    """The states of those on the host, in tensors and plain values; NumPy's only where NumPy is in use."""
    states: dict[str, Any] = {"python": _python_state(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        states["numpy"] = _numpy_state(numpy)
    return states


def set_host_generators(states: Mapping[str, Any]) -> None:
    """Put back what `host_generators` returned."""
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        _set_numpy_state(states["numpy"])


def check_host_states(states: Any) -> None:
    """Raise ValueError where `states` is not of the form that `host_generators` returns; more may be in it.

    Of tensors the form alone is looked at, so that others may stand in for those that are not read yet.
    """
    if not isinstance(states, Mapping):
        raise ValueError("the states of the generators are malformed")
    python, (version, words, _) = states.get("python"), random.getstate()
    if (
        not isinstance(python, Mapping)
        or python.get("version") != version
        or not _is_tensor(python.get("words"), torch.int64, len(words))
        or not _is_gauss(python.get("gauss", ""))
    ):
        raise ValueError("the state of Python's generator is malformed")
    if not _is_tensor(states.get("torch"), torch.uint8, torch.get_rng_state().numel()):
        raise ValueError("the state of torch's generator is malformed")
    if "numpy" in states:
        try:
            check_numpy_state(states["numpy"], _live_numpy_state())
        except ValueError as error:
            raise ValueError(f"the state of NumPy's generator is malformed: {error}") from error


def try_host_states(states: Any) -> None:
    """As `check_host_states`, of states that were read: generators of no use to anybody take them."""
    check_host_states(states)
    python = states["python"]
    taking = random.Random()  # noqa: S311 - nothing is drawn
    taking.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.Generator().set_state(states["torch"])


def _is_tensor(value: Any, dtype: torch.dtype, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype and value.shape == (length,)


def _is_gauss(value: Any) -> bool:
    """Python itself takes anything for the normal number that it has drawn ahead."""
    return value is None or isinstance(value, float)


def seed_host_generators(seed: int) -> None:
    """Seed all of them from one number of 63 bits."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for the accelerators too
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def cuda_generators() -> tuple[torch.Generator, ...]:
    """The default generator of every device, once this process uses CUDA. Reading their states wakes no device."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators
    return ()


def _python_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    # By way of an array: torch would look at each of the words.
    return {"version": version, "words": torch.frombuffer(array.array("q", words), dtype=torch.int64), "gauss": gauss}


def _live_numpy_state() -> dict[str, Any]:
    """What `host_generators` has of NumPy, which is imported for it."""
    import numpy as np  # noqa: PLC0415  (only where the saved job had it in use)

    return _numpy_state(np)


def _numpy_state(numpy: Any) -> dict[str, Any]:
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":  # its words as a tensor: that costs less at each save
        words = torch.from_numpy(state["state"]["key"].astype(numpy.int64))
        state = {**state, "state": {**state["state"], "key": words}}
    return state


def _set_numpy_state(state: dict[str, Any]) -> None:
    import numpy as np  # noqa: PLC0415  (only where the saved job had it in use)

    key = state["state"].get("key")
    if isinstance(key, torch.Tensor):
        words = np.array(key.tolist(), dtype=np.uint32)
        state = {**state, "state": {**state["state"], "key": words}}
    np.random.set_state(state)


def own_kinds() -> tuple[type, ...]:
    """Classes of generators that a program may make of Python's and NumPy's; the latter only where NumPy is in use.

    Exact ones: a subclass may hold more than its state says, or (SystemRandom) have none.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return (random.Random,)
    return (random.Random, numpy.random.Generator, numpy.random.RandomState)


def global_generators() -> tuple[Any, ...]:
    """The objects behind the functions of `random` and `numpy.random`, whose states `host_generators` reads."""
    found = [random.random.__self__]  # type: ignore[attr-defined]
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        found.append(numpy.random.get_state.__self__)
    return tuple(found)


def own_state(generator: Any) -> dict[str, Any]:
    """All that decides what a generator of `own_kinds` draws next, as plain values and arrays."""
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": array.array("q", words).tobytes(), "gauss": gauss}
    of_numpy: dict[str, Any] = (
        generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)
    )
    return of_numpy


def set_own_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Put back what `own_state` returned. Raises ValueError where it cannot be a state of this generator."""
    try:
        if isinstance(generator, random.Random):
            words = array.array("q")
            words.frombytes(state["words"])
            if not _is_gauss(state["gauss"]):
                raise ValueError("its normal number drawn ahead is none")
            generator.setstate((state["version"], tuple(words), state["gauss"]))
            return
        check_numpy_state(state, own_state(generator))
        if hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def check_numpy_state(state: Any, like: Mapping[str, Any]) -> None:
    """Raise ValueError where `state` has not the form of `like`, a live state, or a number that it cannot hold.

    NumPy would believe most of that, and read beyond the ends of arrays.
    """
    if not _same_form(state, like):
        raise ValueError(f"not the form of a state of {like['bit_generator']}")
    for position, length in ((state["state"].get("pos"), _MT19937_WORDS), (state.get("buffer_pos"), _PHILOX_BUFFER)):
        if position is not None and not 0 <= position <= length:
            raise ValueError(f"a position of {position} in {length} words")
    for flag in ("has_uint32", "has_gauss"):
        if state.get(flag, 0) not in (0, 1):
            raise ValueError(f"{flag} of {state[flag]}, where only 0 and 1 are")


def _same_form(value: Any, like: Any) -> bool:
    if isinstance(like, Mapping):
        return (
            isinstance(value, Mapping)
            and value.keys() == like.keys()
            and all(_same_form(value[key], like[key]) for key in like)
        )
    if hasattr(like, "dtype"):  # an array, or a tensor in its place
        return type(value) is type(like) and value.dtype == like.dtype and value.shape == like.shape
    if isinstance(like, str):
        return bool(value == like)
    kind = numbers.Integral if isinstance(like, numbers.Integral) else numbers.Real
    return isinstance(value, kind) and not isinstance(value, bool)
