"""Train a small GPT-2 with the Hugging Face Trainer on the sources of the Python installation, and survive kills.

    python examples/hf_trainer.py --output_dir runs/hf --max_steps 200
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --output_dir runs/hf --max_steps 200

Needs ``pip install transformers accelerate``. Every argument of the Trainer is one of this script. Kill it whenever you
like (kill -9 too) and run the same command again: it goes on from the newest whole state, and losses and weights are
those of a run that was never stopped, bit for bit. What easyckpt needs is marked with (n): two lines.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

from easyckpt.integrations.transformers import TrainerWrapper

VOCABULARY = 256  # a token is a byte


@dataclass
class ModelArguments:
    """How large the model is; it starts from random weights."""

    layers: int = field(default=4, metadata={"help": "Number of transformer blocks."})
    width: int = field(default=128, metadata={"help": "Size of the hidden states."})
    heads: int = field(default=4, metadata={"help": "Attention heads a block."})
    dropout: float = field(default=0.1, metadata={"help": "Of embeddings, attention and residuals."})


@dataclass
class DataArguments:
    """What it reads."""

    block_size: int = field(default=128, metadata={"help": "Tokens a sequence."})
    corpus_bytes: int = field(default=2_000_000, metadata={"help": "How much of the text is used."})
    eval_blocks: int = field(default=64, metadata={"help": "Sequences at the text's end that are kept for evaluation."})


class Blocks(Dataset[dict[str, Tensor]]):
    """Consecutive sequences of a text; the model itself shifts the labels by one."""

    def __init__(self, text: bytes, block_size: int) -> None:
        count = len(text) // block_size
        tokens = torch.frombuffer(bytearray(text[: count * block_size]), dtype=torch.uint8)
        self.blocks = tokens.view(count, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.blocks[index].long()
        return {"input_ids": tokens, "labels": tokens}


def read_text(data: DataArguments) -> tuple[Blocks, Blocks]:
    """(training, evaluation) blocks of the standard library's sources, which every machine with Python has."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    text = text[: data.corpus_bytes]
    split = len(text) - data.eval_blocks * data.block_size
    if split < data.block_size:
        raise SystemExit("--corpus_bytes leaves no block to train on beside --eval_blocks of --block_size")
    return Blocks(bytes(text[:split]), data.block_size), Blocks(bytes(text[split:]), data.block_size)


def build_model(model: ModelArguments, data: DataArguments) -> Any:
    """A GPT-2 of the size that is asked for."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=data.block_size, n_layer=model.layers, n_embd=model.width,
        n_head=model.heads, embd_pdrop=model.dropout, attn_pdrop=model.dropout, resid_pdrop=model.dropout,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def predicted(logits: Tensor, labels: Tensor) -> Tensor:
    """What is kept of an evaluation's logits: whole ones would fill the memory."""
    return logits.argmax(dim=-1)


def accuracy(prediction: Any) -> dict[str, float]:
    """How often the next byte was guessed."""
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels).mean())}


def arguments() -> tuple[ModelArguments, DataArguments, Any]:
    """The command line: the Trainer's own arguments, with defaults of ours, and those above."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    gpu = torch.cuda.is_available()
    parser.set_defaults(
        output_dir="runs/hf", resume_from_checkpoint=True, max_steps=200, report_to="none",
        per_device_train_batch_size=8, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=20,
        logging_steps=10, eval_strategy="steps", eval_steps=50, use_cpu=not gpu, dataloader_pin_memory=gpu,
        save_strategy="steps", save_steps=50, save_total_limit=3,
    )  # fmt: skip
    model, data, training = parser.parse_args_into_dataclasses()
    return model, data, training


def digest(model: torch.nn.Module) -> str:
    """SHA-256 over all weights, to compare two runs."""
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        sha.update(name.encode() + value.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    """Train, from wherever an earlier run of the same command got to, then evaluate."""
    model_arguments, data_arguments, args = arguments()
    set_seed(args.seed)  # the first weights, and dropout
    train_blocks, eval_blocks = read_text(data_arguments)
    trainer = Trainer(
        model=build_model(model_arguments, data_arguments),
        args=args,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=predicted,
    )
    trainer = TrainerWrapper(trainer)  # (1) checkpoints in the background, a snapshot of every step in memory
    # (2) the newest checkpoint that is whole; another one by its path, and nothing there: from the beginning
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)

    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 100.0))
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"weights {digest(trainer.model)}")


if __name__ == "__main__":
    main()
