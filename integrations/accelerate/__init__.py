"""accelerate without a Trainer: a training loop of one's own that resumes exactly.

::

    from accelerate import Accelerator
    from easyckpt.integrations.accelerate import AccelerateCheckpointer

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with AccelerateCheckpointer("runs/1", accelerator, {"progress": progress}) as ckpt:
        step = ckpt.load().step
        for epoch in range(progress["epoch"], epochs):  # progress = {"epoch": 0}
            progress["epoch"] = epoch
            for batch in ckpt.batches(loader, epoch):
                with accelerator.accumulate(model):
                    ...
                if accelerator.sync_gradients:
                    step += 1
                    ckpt.save_if_needed(step)
"""

from __future__ import annotations

from easyckpt.integrations.accelerate.checkpointer import AccelerateCheckpointer

__all__ = ["AccelerateCheckpointer"]
