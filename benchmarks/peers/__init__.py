"""One file for each library that `benchmarks/compare.py` measures."""

from __future__ import annotations

import importlib

from benchmarks.peers.base import Peer

# Where each is; imported in the processes that run it only, so that one that cannot be imported stops no other.
WHERE = {
    "none": "base:Nothing",
    "torch.save": "torch_save:TorchSave",
    "DCP save": "dcp:Save",
    "DCP async, thread": "dcp:AsyncThread",
    "DCP async, process": "dcp:AsyncProcess",
    "torch_checkpointing": "torch_checkpointing:TorchCheckpointing",
    "torchsnapshot": "torchsnapshot:TorchSnapshot",
    "lm-resiliency": "lm_resiliency:LmResiliency",
    "lm-resiliency, CRC": "lm_resiliency:LmResiliencyChecked",
    "DLRover": "dlrover:DLRover",
    "easyckpt": "ours:Easyckpt",
}


def peer(name: str) -> type[Peer]:
    """The adapter of that name. Importing it imports no library but torch."""
    module, _, attribute = WHERE[name].partition(":")
    found: type[Peer] = getattr(importlib.import_module(f"benchmarks.peers.{module}"), attribute)
    return found
