"""What a user may choose beside the Trainer's own arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from easyckpt.config_sources import resolve
from easyckpt.errors import ConfigError

#: A flush is asked for by the Trainer, never due by its number.
_NEVER = 10**15
#: Settings that the Trainer's own arguments stand for.
_TRAINERS = {"save_storage_interval": "save_steps", "max_ckpt_num": "save_total_limit"}
#: Every checkpoint that the Trainer's arguments ask for is made, if nothing else is chosen.
_DEFAULTS = {"back_pressure": "wait"}


@dataclass(frozen=True, slots=True)
class Options:
    """See TrainerWrapper."""

    on_save: Literal["later", "wait"] = "later"
    back_pressure: Literal["wait", "skip"] = "wait"
    config: Any = None
    engine: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Check what was given. Raises ConfigError naming what is wrong."""
        engine = dict(given)
        on_save, config = engine.pop("on_save", "later"), engine.pop("config", None)
        if on_save not in ("later", "wait"):
            raise ConfigError(f"on_save must be 'later' or 'wait', not {on_save!r}")
        for name, argument in _TRAINERS.items():
            if name in engine:
                raise ConfigError(f"{name}: the Trainer has an argument for that: set {argument} instead")
        settings = resolve(engine, config, defaults=_DEFAULTS)  # raises now what would be raised when training begins
        return cls(on_save, settings.back_pressure, config, engine)

    def settings(self) -> dict[str, Any]:
        """Arguments for the engine."""
        return {"save_storage_interval": _NEVER, "config": self.config, **self.engine}
