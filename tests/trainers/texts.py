"""Texts and a tokenizer made on the spot: of lines of Python's own library."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

UNKNOWN, PADDING, END = "[UNK]", "[PAD]", "[END]"
MODEL_INPUTS = ["input_ids", "attention_mask"]


def lines(count: int) -> list[str]:
    """`count` lines with at least four words each."""
    found = [" ".join(line.split()) for line in inspect.getsource(argparse).splitlines()]
    return [line for line in found if 4 <= len(line.split()) <= 12][:count]


def tokenizer(texts: list[str]) -> Any:
    """One token for each word of `texts`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: number for number, word in enumerate([PADDING, END, UNKNOWN, *words])}
    made = Tokenizer(models.WordLevel(vocabulary, UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": UNKNOWN, "pad_token": PADDING, "eos_token": END, "model_input_names": MODEL_INPUTS}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)
