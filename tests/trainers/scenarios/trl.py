"""trl's trainers, where trl is installed: each keeps metrics and counters of its own; most make batches their way."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.trainers import models, texts
from tests.trainers.scenarios.table import EIGHT, SAVE, Setup, scenario

LOGGED = {"logging_steps": 3, "save_steps": SAVE}


def prepared() -> tuple[Any, list[str]]:
    """The tokenizer, and lines."""
    lines = texts.lines(2 * EIGHT)
    return texts.tokenizer(lines), lines


def sized(tokens: Any, **settings: Any) -> nn.Module:
    return models.llama(vocab_size=len(tokens), eos_token_id=1, **settings)


@scenario(needs="trl")
def trl_sft() -> Setup:
    """Supervised fine-tuning, shuffled epochs, evaluated: the count of tokens and the means between logs go on."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokens, lines = prepared()
    data = Dataset.from_dict({"text": lines[:EIGHT]})
    arguments = {**LOGGED, "eval_strategy": "steps", "eval_steps": 4}
    more = {"processing_class": tokens}
    return Setup(arguments, sized(tokens), data, Dataset.from_dict({"text": lines[-6:]}), more, SFTTrainer, SFTConfig)


@scenario(needs="trl")
def trl_sft_packed() -> Setup:
    """Sequences are packed into blocks, two batches to a step, with LoRA and noise on the embeddings."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    tokens, lines = prepared()
    arguments: dict[str, Any] = {**LOGGED, "packing": True, "packing_strategy": "wrapped", "max_length": 12}
    arguments |= {"gradient_accumulation_steps": 2, "neftune_noise_alpha": 5.0}
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    more = {"processing_class": tokens, "peft_config": adapters}
    return Setup(arguments, sized(tokens), Dataset.from_dict({"text": lines}), None, more, SFTTrainer, SFTConfig)


def preferences(lines: list[str]) -> Any:
    from datasets import Dataset

    pairs = zip(lines[::2], lines[1::2], strict=False)
    rows = [{"prompt": one.split()[0] + " ", "chosen": one, "rejected": other} for one, other in pairs]
    return Dataset.from_list(rows)


@scenario(needs="trl")
def trl_dpo() -> Setup:
    """Direct preference optimization beside a reference model."""
    from trl import DPOConfig, DPOTrainer

    tokens, lines = prepared()
    data = preferences(lines)
    arguments = {**LOGGED, "eval_strategy": "steps", "eval_steps": 4}
    more = {"processing_class": tokens, "ref_model": sized(tokens)}
    return Setup(arguments, sized(tokens), data, data.select(range(6)), more, DPOTrainer, DPOConfig)


@scenario(needs="trl")
def trl_dpo_synced() -> Setup:
    """The reference model follows the one that is trained."""
    from trl import DPOConfig, DPOTrainer

    tokens, lines = prepared()
    arguments = {**LOGGED, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3}
    more = {"processing_class": tokens, "ref_model": sized(tokens)}
    return Setup(arguments, sized(tokens), preferences(lines), None, more, DPOTrainer, DPOConfig)


@scenario(needs="trl")
def trl_reward() -> Setup:
    """A reward model."""
    from trl import RewardConfig, RewardTrainer

    tokens, lines = prepared()
    model = models.classifier(vocab_size=len(tokens))
    more = {"processing_class": tokens}
    return Setup(LOGGED, model, preferences(lines), None, more, RewardTrainer, RewardConfig)


def grpo(**arguments: Any) -> Setup:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    tokens, lines = prepared()
    prompts = Dataset.from_dict({"prompt": [" ".join(line.split()[:2]) for line in lines]})
    own = {**LOGGED, "num_generations": 2, "max_completion_length": 6, **arguments}
    more: dict[str, Any] = {"processing_class": tokens, "reward_funcs": distinct}
    if "beta" in arguments:  # without its adapters, the model is its own reference
        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return Setup(own, sized(tokens), prompts, None, more, GRPOTrainer, GRPOConfig)


def distinct(completions: list[str], **_: Any) -> list[float]:
    """A reward for different words."""
    return [float(len(set(text.split()))) for text in completions]


@scenario(needs="trl")
def trl_grpo() -> Setup:
    """Policy optimization: what is trained on is generated."""
    return grpo()


@scenario(needs="trl", until=13)
def trl_grpo_reused() -> Setup:
    """What was generated is trained on for four steps, twice, with a reference model: stopped within."""
    return grpo(num_iterations=2, steps_per_generation=2, beta=0.1)
