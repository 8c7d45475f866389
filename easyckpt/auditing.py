"""What EASYCKPT_AUDIT asks of a run: what its randomness was at each step, parts that a load leaves out, a stop.

Nothing of it runs in a job that is not audited. It may cost time there, but never changes what is trained: generators
are looked at and never drawn from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from easyckpt.config import Audit
from easyckpt.format import layout
from easyckpt.state.components import Component
from easyckpt.state.content import digest_of
from easyckpt.state.data_position import DataPosition
from easyckpt.state.generators import cuda_generators, host_generators, own_kinds
from easyckpt.storage.base import Storage
from easyckpt.strangers import Strangers, state_digest

#: How many steps after `search_from` the process is searched for generators: rarely, since that takes a while.
_SEARCHED = frozenset({1, 3, 10, 30, 100, 300, 1000})


#: What the names of generators that are components begin with.
COMPONENT = "component:"

_log = logging.getLogger("easyckpt")


class Auditor:
    """Of one rank. Its notes are lines in the root, in the order of the program."""

    def __init__(
        self, audit: Audit, storage: Storage, rank: int, components: Mapping[str, Component], position: DataPosition
    ) -> None:
        self._audit, self._storage, self._file = audit, storage, layout.audit_file(rank)
        self._components, self._position = components, position
        self._batches: dict[str, list[Any]] = {}
        self._strangers = Strangers()
        self.stopping = False
        """The run has come to the step at which it is to stop."""
        position.on_batch = self._saw_batch
        storage.makedirs(layout.AUDIT)

    def wanted(self, asked: Collection[str] | None) -> Collection[str] | None:
        """The components that a load restores where `asked` are asked for (None: all)."""
        self._note({"loading": True})
        if not self._audit.left_out:
            return asked
        return set(self._components if asked is None else asked).difference(self._audit.left_out)

    def loaded(self, step: int, tier: str | None) -> None:
        """A load has ended."""
        self._note({"loaded": step, "tier": tier})

    def after(self, step: int) -> bool:
        """Note what the step has left; returns whether the run is to stop here."""
        known = dict(self._known())
        schedulers = {
            name: component.target
            for name, component in self._components.items()
            if isinstance(component.target, LRScheduler)
        }
        if step - self._audit.search_from in _SEARCHED:
            self._search([*known.values(), *schedulers.values()])
        generators = {name: digest_of(state) for name, state in host_generators().items()}
        generators |= {name: state_digest(generator) for name, generator in known.items()}
        note = {
            "step": step,
            "generators": generators,
            "strangers": self._strangers.digests(),
            "schedulers": sorted(schedulers),
            "rates": {name: rates for name, component in self._components.items() if (rates := _rates(component))},
            "batches": {name: list(seen) for name, seen in sorted(self._batches.items())},
        }
        self._batches = {}
        self._note(note)
        stop = self._audit.stop_step
        self.stopping = stop is not None and step >= stop
        return self.stopping

    def _search(self, known: Collection[Any]) -> None:
        try:
            self._strangers.search(known)
        except Exception:  # noqa: BLE001 - whatever the program's objects do, training goes on
            _log.warning("audit: what is not part of the state could not be searched for", exc_info=True)

    def _known(self) -> Iterator[tuple[str, Any]]:
        """The generators that are part of the state, beside the global ones of the host."""
        for number, generator in enumerate(cuda_generators()):
            yield f"cuda:{number}", generator
        for name, component in self._components.items():
            if isinstance(component.target, torch.Generator) or type(component.target) in own_kinds():
                yield f"{COMPONENT}{name}", component.target
        for name, generator in self._position.generators():
            yield name, generator

    def _saw_batch(self, name: str, batch: Any) -> None:
        before = self._batches.setdefault(name, [0, ""])
        before[:] = [before[0] + 1, digest_of([before[1], batch])]

    def _note(self, note: dict[str, Any]) -> None:
        self._storage.append(self._file, json.dumps(note).encode() + b"\n")


def _rates(component: Component) -> list[Any]:
    """The learning rates of an optimizer, by group."""
    try:
        groups = getattr(component.target, "param_groups", None) or ()
        return [float(group["lr"]) for group in groups if isinstance(group, Mapping) and "lr" in group]
    except Exception:  # noqa: BLE001 - whatever the program's objects do, training goes on
        return []
