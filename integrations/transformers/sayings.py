"""What a Trainer's files without weights are made of, told cheaply: they are made anew only where that has changed."""

from __future__ import annotations

from typing import Any

from easyckpt.state.modules import unwrap

#: Of a tokenizer, beside its size. Its inside is not compared: it is as large as its file.
_OF_TOKENIZERS = ("chat_template", "padding_side", "truncation_side", "model_max_length", "special_tokens_map")


def what_is_saved(trainer: Any) -> list[Any]:
    """Equal: the model's configuration, the arguments and the tokenizer are saved as the same files."""
    model = unwrap(trainer.model)
    processing = getattr(trainer, "processing_class", None) or getattr(trainer.data_collator, "tokenizer", None)
    configurations = [getattr(model, "config", None), getattr(model, "generation_config", None), trainer.args]
    adapters = {name: str(kept.to_dict()) for name, kept in getattr(model, "peft_config", {}).items()}
    return [id(model), *map(_text, configurations), adapters, _told(processing)]


def _text(value: Any) -> str:
    return str(value.to_json_string() if hasattr(value, "to_json_string") else value)


def _told(processing: Any) -> list[Any]:
    """Of a tokenizer, of what processes images, or of a processor of several such parts."""
    if processing is None:
        return []
    parts = [_told(getattr(processing, name, None)) for name in getattr(processing, "attributes", ())]
    told = [str(getattr(processing, name, None)) for name in _OF_TOKENIZERS]
    if hasattr(processing, "to_json_string") and not parts:
        told.append(_text(processing))
    size = len(processing) if hasattr(processing, "__len__") else 0
    return [id(processing), size, *told, *parts]
