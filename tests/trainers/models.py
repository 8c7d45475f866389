"""Tiny models, made from their configuration; dropout is on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.trainers.data import IGNORED, LENGTH, TOKENS

WIDTH = 32
SEED = 11
_LLAMA = {"vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
_LLAMA |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    shape = {"vocab_size": TOKENS, "n_positions": 2 * LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, **settings))


def llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**_LLAMA | settings))


def classifier(**settings: Any) -> nn.Module:
    """A llama that gives each sequence one number."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(SEED)
    return LlamaForSequenceClassification(LlamaConfig(**_LLAMA | settings, num_labels=1))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(SEED)
    shape = {"vocab_size": TOKENS, "d_model": WIDTH, "d_kv": 16, "d_ff": WIDTH, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base = gpt2()
    torch.manual_seed(SEED)
    config = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(base, config)


class Plain(nn.Module):
    """No model of the framework's; batch norm gives it buffers, and its two ends may be tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.dropout(hidden))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}
