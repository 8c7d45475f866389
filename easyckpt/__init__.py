"""easyckpt: asynchronous distributed checkpoints for PyTorch; a killed job goes on bit for bit."""

from __future__ import annotations

from easyckpt.config import CheckpointConfig
from easyckpt.engine import Checkpointer
from easyckpt.errors import (
    ConfigError,
    DamagedCheckpoint,
    EasyckptError,
    FormatError,
    LeaseLost,
    NewerFormat,
    NoCheckpoint,
    NotLoaded,
    OutcomeUnknown,
    OutOfSpace,
    PartlyApplied,
    PeerError,
    RootInUse,
    SaveError,
    SaveFailed,
    StateError,
    StateMismatch,
    StepError,
    StorageError,
    UnsupportedValue,
    UsageError,
    WorldSizeChanged,
)
from easyckpt.format.codec import register_codec
from easyckpt.loading.loader import Restored
from easyckpt.loading.read_only import restore
from easyckpt.state.ddp import settle_ddp
from easyckpt.state.sampler import SkipBatchSampler
from easyckpt.version import VERSION as __version__  # noqa: N811

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "ConfigError",
    "DamagedCheckpoint",
    "EasyckptError",
    "FormatError",
    "LeaseLost",
    "NewerFormat",
    "NoCheckpoint",
    "NotLoaded",
    "OutOfSpace",
    "OutcomeUnknown",
    "PartlyApplied",
    "PeerError",
    "Restored",
    "RootInUse",
    "SaveError",
    "SaveFailed",
    "SkipBatchSampler",
    "StateError",
    "StateMismatch",
    "StepError",
    "StorageError",
    "UnsupportedValue",
    "UsageError",
    "WorldSizeChanged",
    "__version__",
    "register_codec",
    "restore",
    "settle_ddp",
]
