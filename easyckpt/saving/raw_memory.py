"""Moving and looking at memory by address. Whoever calls keeps that memory mapped.

One large memmove is the fastest copy that a CPU gives, needs no second thread pool, and releases the GIL. For small
tensors that release costs more than the copy: they are moved at once, holding it.
"""

from __future__ import annotations

import ctypes

import torch

from easyckpt.state.tensors import copy_exact

#: Below this size a move holds the GIL.
SMALL_BYTES = 32 << 10
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: (destination, source, bytes); for small pieces: it holds the GIL.
move_small = ctypes.PyDLL(None).memmove
move_small.argtypes, move_small.restype = _ARGUMENTS, None
#: The same, letting go of the GIL.
move_large = ctypes.CDLL(None).memmove
move_large.argtypes, move_large.restype = _ARGUMENTS, None
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes, _compare.restype = _ARGUMENTS, ctypes.c_int

WORD = 4
_FIRST = 4096  # no process has memory below
#: All memory as one tensor: many words of it are read in one call.
_everything = torch.frombuffer((ctypes.c_char * (1 << 62)).from_address(_FIRST), dtype=torch.uint8)
_as_words = {kind: _everything.view(kind) for kind in (torch.uint8, torch.int16, torch.int32, torch.int64)}


def move(destination: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address to address; lets go of the GIL where that pays."""
    (move_small if nbytes < SMALL_BYTES else move_large)(destination, source, nbytes)


def equal(one: int, other: int, nbytes: int) -> bool:
    """Whether two pieces of memory hold the same bytes; lets go of the GIL."""
    return bool(_compare(one, other, nbytes) == 0)


def word_number(addresses: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Which words of `nbytes` are at `addresses` (int64, multiples of it)."""
    return (addresses - _FIRST) // nbytes


def words_at(numbers: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The words, as the integers `kind`, with these numbers (see `word_number`)."""
    return _as_words[kind].index_select(0, numbers)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over raw memory."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def move_strided(address: int, source: torch.Tensor, nbytes: int) -> None:
    """Gather a tensor that no permutation makes contiguous, in its logical order."""
    copy_exact(bytes_at(address, nbytes).view(source.dtype).view(source.shape), source.detach())
