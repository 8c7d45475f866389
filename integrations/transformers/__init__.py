"""Hugging Face Trainer: wrapped, it saves in the background and resumes exactly.

::

    from easyckpt.integrations.transformers import TrainerWrapper

    trainer = TrainerWrapper(trainer)
    trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from easyckpt.integrations.transformers import versions
from easyckpt.integrations.transformers.wrapper import TrainerWrapper

versions.check()

__all__ = ["TrainerWrapper"]
