"""DistributedDataParallel sums gradients in another order in its first iteration than in all later ones.

Its reducer starts with one bucket for all parameters. During the first backward it notes the order in which gradients
become ready, and at the next forward rebuilds its buckets in that order and of the configured size, once for the life
of the process. Which rank adds what first depends on where a gradient lies in its bucket, so from about four ranks on
the sums differ in their last bits. A job that is resumed at step k has its first iteration at k, one that went straight
on had it at 0. `settle_ddp` has it in both before anything counts.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from easyckpt.errors import UsageError
from easyckpt.state.generators import cuda_generators, host_generators, set_host_generators

MAX_RUNS = 4
"""One to note the order, one to rebuild; more only where a run did not reduce gradients."""

_log = logging.getLogger("easyckpt")


def settle_ddp(model: nn.Module, run_once: Callable[[], Any]) -> int:
    """Bring every DDP module in `model` past its first iteration; returns how often `run_once` was called.

    `run_once` does one forward and backward as the training does it, without an optimizer step; its input does not
    matter, its graph does. Call this on all ranks, after the model is wrapped and before ``load()``, and in runs that
    start from nothing too: then a resumed run sums gradients as a straight one does. Gradients, buffers (persistent or
    not) and all global generators are afterwards as they were, and so must be the parameters.

    Nothing is run where nothing is rebuilt: without DDP, with ``find_unused_parameters=True`` (unless the graph is
    static), or when it happened before. State of your own that a forward changes outside of buffers, and that of
    communication hooks, is not put back.
    """
    waiting = [module for module in model.modules() if _will_rebuild(module)]
    if not waiting:
        return 0
    runs = 0
    digests = _parameter_digests(model)
    with _as_before(model):
        while any(_will_rebuild(module) for module in waiting):
            if runs == MAX_RUNS:
                raise UsageError(
                    f"settle_ddp: after {runs} runs DDP has not rebuilt its gradient buckets; run_once must do a "
                    "forward through the wrapped model and a backward that reaches every parameter, outside no_sync()"
                )
            run_once()
            runs += 1
    changed = [name for name, digest in _parameter_digests(model).items() if digests.get(name) != digest]
    if changed:
        raise UsageError(
            f"settle_ddp: run_once changed {len(changed)} parameters ({', '.join(changed[:3])}…); it must do forward "
            "and backward only, no optimizer step. The model has to be built again"
        )
    _log.debug("DDP's buckets were settled in %d runs", runs)
    return runs


def _will_rebuild(module: nn.Module) -> bool:
    if not isinstance(module, DistributedDataParallel):
        return False
    if getattr(module, "_delay_all_reduce_all_params", False) or getattr(module, "_use_python_reducer", False):
        return False  # these have no buckets of the reducer's
    return not module._has_rebuilt_buckets and (module.static_graph or not module.find_unused_parameters)


@dataclass(slots=True)
class _Buffer:
    owner: nn.Module
    name: str
    tensor: torch.Tensor
    value: torch.Tensor


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers and generators of the body do not outlive it."""
    buffers = [
        _Buffer(module, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # A copy too: with gradient_as_bucket_view a gradient's memory belongs to the buckets, and is written.
    values = [None if gradient is None else gradient.detach().clone() for _, gradient in gradients]
    generators, cuda = host_generators(), [(generator, generator.get_state()) for generator in cuda_generators()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for (parameter, gradient), value in zip(gradients, values, strict=True):
                if gradient is not None and value is not None:
                    gradient.copy_(value)
                parameter.grad = gradient
            for buffer in buffers:
                buffer.tensor.copy_(buffer.value)
                buffer.owner._buffers[buffer.name] = buffer.tensor
        set_host_generators(generators)
        for generator, state in cuda:
            generator.set_state(state)


def _parameter_digests(model: nn.Module) -> dict[str, bytes]:
    """Bits of each parameter in 16 bytes: a copy of them all may not fit beside the model."""
    return {name: _digest(parameter.detach()) for name, parameter in model.named_parameters()}


def _digest(tensor: torch.Tensor) -> bytes:
    host = tensor.cpu().contiguous()
    nbytes = host.numel() * host.element_size()
    content = (ctypes.c_char * nbytes).from_address(host.data_ptr()) if nbytes else b""
    return xxhash.xxh3_128_digest(content)
