"""Checkpoints made by hand: real slots, real shards, and a manifest written without the commit protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from easyckpt.format import layout as names
from easyckpt.format.image import LeafSpec, dtype_name, plan_layout
from easyckpt.format.manifest import FileRecord, Manifest, RootRecord, Timeline
from easyckpt.memory.private_slot import PrivateSlot
from easyckpt.memory.slot import SlotMeta, SlotView
from easyckpt.saving.writer import ShardWriter
from easyckpt.storage.local import LocalStorage

RUN = "a" * 32
LINE = "main"
ARENA = "a" * 12 + "-" + "b" * 8


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in its own dimension order; bitwise, so that NaNs compare too."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d)))


def make_view(
    tensors: Mapping[str, torch.Tensor],
    *,
    replicated: Sequence[str] = (),
    rank: int = 0,
    world_size: int = 1,
    step: int = 10,
    timeline: str = LINE,
    run: str = RUN,
    objects: Any = None,
    **meta: Any,
) -> SlotView:
    """A sealed snapshot of `tensors`, as staging would have left it."""
    specs = [
        LeafSpec(("model", name), dtype_name(t.dtype), tuple(t.shape), order_of(t), "cpu", name in replicated)
        for name, t in tensors.items()
    ]
    tree = {"kind": "module", "leaves": list(range(len(specs))), "tree": {"names": list(tensors)}}
    layout = plan_layout(specs, {"model": tree}, rank, world_size)
    slot = PrivateSlot.create("test", layout.image_bytes, 4096)
    slot.begin()
    for leaf, tensor in zip(layout.leaves, tensors.values(), strict=True):
        slot.image[leaf.offset : leaf.offset + leaf.nbytes] = raw(tensor.permute(leaf.order))
    slot.seal(
        SlotMeta(
            run=run, arena_id=ARENA, incarnation="1", timeline=timeline, step=step, rank=rank, world_size=world_size,
            layout_digest=layout.digest, image_bytes=layout.image_bytes, **meta,
        ),
        layout.encoded,
        json.dumps({"trees": {}} if objects is None else objects, separators=(",", ":")).encode(),
    )  # fmt: skip
    return slot.view()


def write_checkpoint(
    storage: LocalStorage,
    *views: SlotView,
    attempt: str = "try-1",
    share: bool = True,
    directory: str | None = None,
) -> Manifest:
    """Write one checkpoint of all ranks' `views`; rank 0 writes what is replicated if `share`, else everybody."""
    meta = views[0].meta
    directory = names.step_dir(meta.step) if directory is None else directory
    storage.makedirs(directory)
    files: dict[str, FileRecord] = {}
    for view in views:
        files |= ShardWriter(storage).write(directory, view, write_replicated=view.meta.rank == 0 or not share)
    return write_manifest(
        storage,
        directory,
        Manifest(
            run=meta.run, timeline=meta.timeline, step=meta.step, world_size=meta.world_size, attempt=attempt,
            created=1.0, files=files,
        ),
    )  # fmt: skip


def write_manifest(storage: LocalStorage, directory: str, manifest: Manifest) -> Manifest:
    storage.replace(f"{directory}/{names.MANIFEST}", manifest.to_bytes())
    return manifest


def line(id_: str = LINE, parent: str | None = None, fork_step: int = 0, explicit: bool = False) -> Timeline:
    return Timeline(id_, parent, fork_step, explicit, 1.0)


def root_record(*lines: Timeline, run: str = RUN, parent: str | None = None) -> RootRecord:
    return RootRecord(run=run, created=1.0, timelines=lines or (line(),), parent=parent)
