"""What a tensor of the user's state is to us: one dense block of memory, a strided view, or something to refuse.

Everything here is exact to the bit: values are moved, never converted.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from easyckpt.errors import UnsupportedValue
from easyckpt.format import codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from easyckpt.format.codec import Path

#: Two tensors with equal keys are the same memory seen in the same way, that is: tied.
TieKey = tuple[Any, ...]


def require_supported(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Return `tensor`, or an equal one with plain memory behind it (lazy conjugates are resolved).

    Raises UnsupportedValue, which names the path, for whatever has no storage that says everything about it.
    """
    reason = _refusal(tensor)
    if reason:
        raise UnsupportedValue(f"{codec.path_text(path)}: {reason}")
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor


_KNOWN = (torch.Tensor, nn.Parameter, nn.Buffer)


def _refusal(tensor: torch.Tensor) -> str | None:
    kind = type(tensor)
    if kind not in _KNOWN:
        if any(base.__name__ == "DTensor" for base in kind.__mro__):
            return "is a DTensor: sharded state is not supported yet"
        if is_lazy(tensor):
            return "is a lazy parameter without a shape: run one forward pass before the Checkpointer is used"
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return (
                f"is a tensor subclass ({kind.__module__}.{kind.__qualname__}) whose content is not its storage; "
                "hand over its plain tensors through an object with state_dict and load_state_dict"
            )
    if tensor.is_nested or tensor.layout is not torch.strided:
        what = "nested" if tensor.is_nested else str(tensor.layout)
        return f"is a {what} tensor, which cannot be kept exactly; hand over its indices and values as plain tensors"
    if tensor.is_quantized:
        return "is a quantized tensor; hand over its int_repr() and its scales as plain tensors"
    if tensor.is_meta:
        return "is on the meta device: it has no values to save; materialize the module first"
    return None


def require_memory(tensor: torch.Tensor, path: Path) -> int:
    """The data pointer of `tensor` (0 only when it is empty). Raises UnsupportedValue where its memory is gone."""
    pointer = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise UnsupportedValue(
            f"{codec.path_text(path)}: has lost its storage (freed or sharded by another library); "
            "save when the full tensor is there"
        )
    return pointer


@functools.cache
def _identity(dimensions: int) -> tuple[int, ...]:
    """One object for all tensors that have so many dimensions."""
    return tuple(range(dimensions))


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The permutation of dimensions under which `tensor` is contiguous; None: strided under every one."""
    identity = _identity(tensor.dim())
    if tensor.is_contiguous():
        return identity
    strides = tensor.stride()
    # A dimension of size 1 may carry any stride; it goes where its stride puts it, which keeps memory formats apart.
    order = tuple(sorted(identity, key=lambda d: (-strides[d], -tensor.shape[d], d)))
    return order if tensor.permute(order).is_contiguous() else None


def stored(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`tensor` as it lies in the image: a view with the dimensions in `order`, sharing memory and version counter."""
    view = tensor.detach()
    return view if order == _identity(tensor.dim()) else view.permute(order)


def tie_key(tensor: torch.Tensor) -> TieKey:
    """Equal for tied tensors only. An empty tensor has no memory: it is tied to nothing but itself."""
    where = tensor.data_ptr() if tensor.numel() else ("empty", id(tensor))
    return (where, tensor.device, tensor.dtype, tensor.shape, tensor.stride())


def storage_key(tensor: torch.Tensor) -> TieKey:
    """Equal for tensors that look into the same storage."""
    pointer = tensor.untyped_storage().data_ptr()
    return (tensor.device, pointer) if pointer else ("empty", id(tensor))


def copy_all_exact(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`copy_exact` for many: all that are simple blocks of memory in one call, since each call has its price."""
    simple: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if _is_simple(target):
            simple[0].append(target)
            simple[1].append(source)
        else:
            copy_exact(target, source)
    if simple[0]:
        with torch.no_grad():
            torch._foreach_copy_(*simple)


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether ``tensor.copy_`` alone is exact: nothing lazy, expanded or exotic about it."""
    return (
        type(tensor) in _KNOWN
        and tensor.dtype in _SIMPLE
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and not tensor.is_neg()
    )


def copy_exact(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fill `target` in place with the bits of `source` (same shape and dtype), whatever their memory formats."""
    if _is_simple(target):
        with torch.no_grad():
            target.copy_(source)
        return
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        for dim, (size, step) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if step == 0 and size > 1:  # expanded: all places are one, and writing one writes all
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        if target.is_conj() or target.is_neg():
            target.copy_(source)
        elif target.dtype in _PLAIN:
            target.detach().copy_(source)
        else:
            _bits(target).copy_(_bits(source))


_PLAIN = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128,
    }
)  # fmt: skip
_SIMPLE = frozenset(dtype for dtype in _PLAIN if not dtype.is_complex)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Many young dtypes have no copy kernel; integers of their size always do.
    return tensor.detach().view(_BITS[tensor.element_size()])


def same_kind(live: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
    """Whether `live` is a tensor that a leaf of this shape and dtype can fill in place."""
    return isinstance(live, torch.Tensor) and tuple(live.shape) == tuple(shape) and live.dtype == dtype


def new_like(source: torch.Tensor, device: torch.device | str, like: torch.Tensor | None = None) -> torch.Tensor:
    """A fresh tensor with the bits and the memory format of `source`, on `device`.

    `like` settles the strides of dimensions of size 1, which the image does not tell, where both describe one layout.
    """
    if like is not None and like.shape == source.shape and like.dtype.is_floating_point:
        empty = torch.empty_like(like, dtype=source.dtype, device=device, requires_grad=False)
    else:
        empty = torch.empty_like(source, device=device, requires_grad=False)
    if not (empty.is_contiguous() and source.is_contiguous()) and dense_order(empty) != dense_order(source):
        empty = torch.empty_like(source, device=device, requires_grad=False)
    copy_exact(empty, source)
    return empty


def device_for(saved: str, like: torch.Tensor | None = None) -> torch.device:
    """Where a leaf that was saved on a device of type `saved` is to live: "cpu" stays; others go where `like` is."""
    if saved == "cpu":
        return torch.device("cpu")
    if like is not None:
        return like.device
    if saved == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
