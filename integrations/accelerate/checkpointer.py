"""AccelerateCheckpointer: a Checkpointer that knows what an Accelerator has prepared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from typing_extensions import Unpack, override

from easyckpt.engine import Checkpointer
from easyckpt.errors import ConfigError, UsageError
from easyckpt.integrations.accelerate.loaders import Loaders, is_prepared
from easyckpt.integrations.accelerate.prepared import check, state_of
from easyckpt.settings import Settings, shows_settings

#: The component with the positions in prepared loaders.
NAME = "accelerate"


class AccelerateCheckpointer(Checkpointer):
    """As `easyckpt.Checkpointer`, for a training loop with an Accelerator.

    Make it when everything is prepared and registered: the state is all that ``accelerator.save_state()`` saves,
    and positions in the data that can be resumed exactly.

    Args:
        root: directory of this run's checkpoints.
        accelerator: models, optimizers and schedulers that it has prepared are part of the state (``model``,
            ``model_1``, … in their order), and so are its GradScaler (``scaler``) and what was handed to
            ``register_for_checkpointing`` (``registered``, ``registered_1``, …).
        state: what belongs to the state besides, by name; a name given to something prepared takes the place of the
            one above.
        config, process_group, settings: as for `Checkpointer`.

    A step is an optimizer step. With accumulation count and save where ``accelerator.sync_gradients`` is true.
    """

    @shows_settings
    def __init__(
        self,
        root: str | os.PathLike[str],
        accelerator: Any,
        state: Mapping[str, Any] | None = None,
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        process_group: Any = None,
        **settings: Unpack[Settings],
    ) -> None:
        check(accelerator)
        self._accelerator, self._loaders = accelerator, Loaders(accelerator)
        parts = state_of(accelerator, state or {})
        if NAME in parts:
            raise ConfigError(f"state: the name {NAME!r} is taken; choose another")
        super().__init__(root, {**parts, NAME: self._loaders}, config=config, process_group=process_group, **settings)

    @override
    def save_if_needed(self, step: int) -> None:
        """As of `Checkpointer`. While gradients are accumulated, the step before may be handed over again."""
        if not self._accumulating(step):
            super().save_if_needed(step)

    @override
    def save(self, step: int, *, wait: bool = False) -> Future[int]:
        """As of `Checkpointer`; UsageError while gradients are accumulated."""
        self._refuse_accumulating(step)
        return super().save(step, wait=wait)

    @override
    def batches(self, loader: Any, epoch: int, name: str = "train") -> Iterator[Any]:
        """As of `Checkpointer`, for loaders that accelerate has prepared, and for others too.

        A prepared loader is told the epoch.
        """
        if not is_prepared(loader):
            return super().batches(loader, epoch, name)
        return self._loaders.batches(loader, epoch, name, self._restore_generators, self._position)

    def _accumulating(self, step: int) -> bool:
        if self._accelerator.sync_gradients:
            return False
        if step > max(self._step, 0):
            self._refuse_accumulating(step)
        return True

    def _refuse_accumulating(self, step: int) -> None:
        if not self._accelerator.sync_gradients:
            raise UsageError(
                f"step {step} is no optimizer step: its gradients are still being accumulated, and they are not state. "
                "Count and save where accelerator.sync_gradients is true"
            )
