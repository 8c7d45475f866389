"""Hugging Face Trainer: wrapped, it saves in the background and resumes exactly.

::

    from easyckpt.integrations.transformers import TrainerWrapper

    trainer = TrainerWrapper(trainer)
    trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from easyckpt.integrations.transformers.wrapper import TrainerWrapper

__all__ = ["TrainerWrapper"]


def __getattr__(name: str) -> Any:
    """Import transformers only for what needs it: checkpoints can be looked at without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from easyckpt.integrations.transformers import supported  # noqa: PLC0415

    supported.check()  # first: what an old version lacks would say less about it
    from easyckpt.integrations.transformers import wrapper  # noqa: PLC0415

    return getattr(wrapper, name)
