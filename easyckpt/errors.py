"""Every error that easyckpt raises on purpose.

::

    EasyckptError
    ├── ConfigError (ValueError)        a setting or an argument is wrong; names the field
    ├── UsageError                      a call that cannot be right at this moment (closed, wrong order)
    │   ├── StepError                   the step went backwards, or is not a number of finished steps
    │   ├── NotLoaded                   first save into a root that holds checkpoints, without a load()
    │   └── NoCheckpoint                the step that was asked for is not there
    ├── StateError                      the user's objects
    │   ├── UnsupportedValue            a leaf that the format cannot hold exactly; names the path
    │   ├── StateMismatch               a checkpoint does not fit the live objects; nothing was applied
    │   ├── WorldSizeChanged            saved by another number of ranks; nothing was applied
    │   └── PartlyApplied               applying failed half-way; the objects must be rebuilt
    ├── FormatError                     bytes that are not what they should be
    │   ├── ForeignFormat               not ours at all
    │   ├── NewerFormat                 ours, but of a version or with a feature unknown here
    │   └── DamagedCheckpoint           ours, but torn, truncated or rotten
    ├── StorageError                    the place where bytes live
    │   ├── OutOfSpace                  storage (or shared memory) is full
    │   ├── NotShared                   ranks do not see the same directory
    │   ├── RootInUse                   another job owns the root
    │   └── LeaseLost                   another job has taken the root over
    ├── PeerError                       other ranks
    │   ├── PeerTimeout                 a rank did not answer in time
    │   └── PeerFailed                  a rank reported an error of its own
    └── SaveError                       a save that did not become durable
        ├── SaveFailed                  certainly not committed
        └── OutcomeUnknown              may or may not have been committed
"""

from __future__ import annotations


class EasyckptError(Exception):
    """Base of every error that easyckpt raises on purpose."""


class ConfigError(EasyckptError, ValueError):
    """A setting or an argument is wrong; the message names the field."""


class UsageError(EasyckptError):
    """A call that cannot be right at this moment."""


class StepError(UsageError):
    """The step went backwards without a load, or is not a number of finished steps."""


class NotLoaded(UsageError):
    """The first save went into a root that holds checkpoints, and load() was never called."""


class NoCheckpoint(UsageError):
    """The checkpoint that was asked for is not there."""


class StateError(EasyckptError):
    """Something about the objects that the user handed over."""


class UnsupportedValue(StateError):
    """A value that cannot be kept exactly; the message names its path and how to register a codec."""


class StateMismatch(StateError):
    """The checkpoint does not fit the live objects. Nothing was applied."""


class WorldSizeChanged(StateError):
    """The checkpoint was saved by another number of ranks. Nothing was applied."""


class PartlyApplied(StateError):
    """Applying a verified checkpoint failed half-way: rebuild the objects before going on."""


class FormatError(EasyckptError):
    """Bytes that are not what the format says."""


class ForeignFormat(FormatError):
    """The file or directory was not written by easyckpt."""


class NewerFormat(FormatError):
    """Written by a newer version, or with a feature that this version does not know."""


class DamagedCheckpoint(FormatError):
    """Torn, truncated or rotten bytes; the message names file, tensor and chunk where known."""


class StorageError(EasyckptError):
    """The place where checkpoints live refused."""


class OutOfSpace(StorageError):
    """Storage or shared memory is full."""


class NotShared(StorageError):
    """The ranks do not see the same directory."""


class RootInUse(StorageError):
    """Another job owns the root; the message names it."""


class LeaseLost(StorageError):
    """Another job has taken the root over."""


class PeerError(EasyckptError):
    """Something about other ranks."""


class PeerTimeout(PeerError):
    """A rank did not answer in time; the message names it."""


class PeerFailed(PeerError):
    """A rank reported an error of its own; the message names it."""


class SaveError(EasyckptError):
    """A save that did not become durable."""


class SaveFailed(SaveError):
    """The checkpoint was certainly not committed."""


class OutcomeUnknown(SaveError):
    """The checkpoint may or may not have been committed: look into the root."""
