"""What training changes and no file of the Trainer's holds: buffers that are not persistent, and what callbacks keep.

Such buffers are put into the snapshots once they have changed, beside the Trainer's own progress, so that the weights'
files stay as they are. What a callback keeps for itself only its author could put back: it is named, once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import ExportableState

from easyckpt.state.modules import unwrap

_log = logging.getLogger("easyckpt")

#: Of a callback's own values: how deep and how far they are looked at.
_DEPTH, _ITEMS = 3, 1000
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one once `tensor` was written or has its content elsewhere. No content is read, no device waited for.

    What is written through ``.data`` it does not tell.
    """
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own
        place = 0
    return -1 if tensor.is_inference() else tensor._version, place


@dataclass(slots=True)
class _Watched:
    module: nn.Module
    key: str
    seen: torch.Tensor
    """The tensor that was looked at last, and what it was stamped with then."""
    stamp: tuple[int, int]
    first: torch.Tensor
    """What it held at first."""
    changed: bool = False

    def look(self) -> torch.Tensor | None:
        """The buffer, if it is not what it was at first. Its content is compared only where it was written.

        On a device it counts as changed then: to compare would be to wait for that, at every step. But once, where it
        has come to the device with its model, it is compared.
        """
        now = self.module._buffers.get(self.key)
        if now is None:
            return None
        if not self.changed and (now is not self.seen or stamp(now) != self.stamp):
            compared = now.is_cpu or now.device != self.seen.device
            self.seen, self.stamp = now, stamp(now)
            # (DDP writes each buffer at each step, mostly with what is in it.)
            same = compared and now.dtype == self.first.dtype and torch.equal(now.cpu(), self.first.cpu())
            self.changed = not same
        return now if self.changed else None


class Buffers:
    """The buffers of a model that no ``state_dict`` has."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._watched: dict[str, _Watched] = {}
        for path, module in unwrap(model).named_modules():
            for key in sorted(module._non_persistent_buffers_set):
                tensor = module._buffers.get(key)
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    self._watched[name] = _Watched(module, key, tensor, stamp(tensor), tensor.detach().clone())

    def changed(self) -> dict[str, torch.Tensor]:
        """Those that training has changed, by name."""
        found = ((name, watched.look()) for name, watched in self._watched.items())
        return {name: tensor for name, tensor in found if tensor is not None}

    def put_back(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fill them as they were; what has another form by now is replaced."""
        for name, value in values.items():
            watched = self._watched.get(name)
            if watched is None:
                _log.warning("the buffer %s, which a checkpoint holds, is none of this model's any more", name)
                continue
            now = watched.module._buffers[watched.key]
            if now is not None and (now.shape, now.dtype) == (value.shape, value.dtype):
                with torch.no_grad():
                    now.copy_(value)
            else:
                device = watched.first.device if now is None else now.device
                watched.module._buffers[watched.key] = value.to(device)
            watched.changed = True


def buffers_of(trainer: Any) -> Buffers:
    """Watched since the model is there: a process that resumes has them as they were made."""
    known: Buffers | None = trainer._easyckpt.buffers
    return known if known is not None and known.model is trainer.model else Buffers(trainer.model)


class OwnState:
    """What callbacks of the program's keep for themselves, as it was before the first step."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        own = [callback for callback in callbacks if _keeps_for_itself(callback)]
        self._first = [(callback, _looks(callback)) for callback in own]

    def tell(self) -> None:
        """Name, once, what has changed since then and will be lost."""
        left = []
        for callback, first in self._first:
            now = _looks(callback)
            changed = sorted(name for name in now.keys() | first.keys() if now.get(name) != first.get(name))
            if not changed:
                left.append((callback, first))
                continue
            _log.warning(
                "the callback %s changes %s while training goes on, and no checkpoint holds that: a resumed run begins "
                "with it anew. If what it does depends on it, derive it from transformers' ExportableState",
                type(callback).__name__,
                ", ".join(changed),
            )
        self._first = left


def _keeps_for_itself(callback: Any) -> bool:
    known = type(callback).__module__.partition(".")[0] in ("transformers", "easyckpt")
    return not known and not isinstance(callback, ExportableState)


def _looks(callback: Any) -> dict[str, Any]:
    return {name: _look(value, _DEPTH) for name, value in getattr(callback, "__dict__", {}).items()}


def _look(value: Any, depth: int) -> Any:
    """Something that differs once `value` has changed; of most objects only what they are."""
    if type(value) in _PLAIN:
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return (id(value), stamp(value))
    if isinstance(value, nn.Module):
        return [_look(tensor, 0) for tensor in _tensors(value)]
    if depth and isinstance(value, dict):
        items = list(value.items())[:_ITEMS]
        return (len(value), [(_look(key, 0), _look(item, depth - 1)) for key, item in items])
    if depth and isinstance(value, (list, tuple, deque)):
        return (len(value), [_look(item, depth - 1) for item in list(value)[-_ITEMS:]])
    if isinstance(value, (set, frozenset)):
        return len(value)
    return type(value)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
