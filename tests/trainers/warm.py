"""Everything that a training of the table imports, and no more: nothing is run, so a fork of this is as good as new."""

from __future__ import annotations

import accelerate  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
from transformers import (  # noqa: F401 - an import of a name is what loads its module
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Trainer,
)

import easyckpt  # noqa: F401
from tests.trainers import job  # noqa: F401
