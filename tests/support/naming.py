"""A second naming scheme: directories as Hugging Face's Trainer calls them, and nothing that is called as ours are."""

from __future__ import annotations

import re


class CheckpointNaming:
    """``checkpoint-30``, and what becomes of it. See `easyckpt.format.layout.NamingScheme`."""

    shared = False

    def committed(self, step: int) -> str:
        return f"checkpoint-{step}"

    def parse_committed(self, name: str) -> int | None:
        match = re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", name)
        return None if match is None else int(match[1])

    def temporary(self, step: int, attempt: str) -> str:
        return f"tmp_checkpoint-{step}_{attempt}"

    def parse_temporary(self, name: str) -> tuple[int, str] | None:
        match = re.fullmatch(r"tmp_checkpoint-(0|[1-9][0-9]*)_([0-9A-Za-z-]+)", name)
        return None if match is None else (int(match[1]), match[2])

    def stale(self, step: int, timeline: str) -> str:
        return f"checkpoint-{step}_stale_{timeline}"

    def parse_stale(self, name: str) -> tuple[int, str] | None:
        match = re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)_stale_([0-9A-Za-z]+)", name)
        return None if match is None else (int(match[1]), match[2])

    def trash(self, name: str, nonce: str) -> str:
        return f"trash_{nonce}_{name}"

    def parse_trash(self, name: str) -> str | None:
        match = re.fullmatch(r"trash_[0-9A-Za-z-]+_(.+)", name)
        return None if match is None else match[1]
