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
        back_pressure = engine.pop("back_pressure", "wait")
        for name, value, choices in (
            ("on_save", on_save, ("later", "wait")),
            ("back_pressure", back_pressure, ("wait", "skip")),
        ):
            if value not in choices:
                raise ConfigError(f"{name} must be {choices[0]!r} or {choices[1]!r}, not {value!r}")
        for name, argument in _TRAINERS.items():
            if name in engine:
                raise ConfigError(f"{name}: the Trainer has an argument for that: set {argument} instead")
        resolve(engine, config)  # raises now what would be raised when training begins
        return cls(on_save, back_pressure, config, engine)

    def settings(self) -> dict[str, Any]:
        """Arguments for the engine."""
        return {"save_storage_interval": _NEVER, "config": self.config, **self.engine}
