"""Every error Sapwood raises on purpose.

    SapwoodError
    ├── ConfigError            a setting is wrong, or two settings do not go together
    ├── LaunchError            the launcher's environment is incomplete or contradictory
    ├── MismatchError          ranks do not agree (models, dtypes, orders, plans)
    ├── UsageError             calls in the wrong order (backward twice, step forgotten, ...)
    ├── SubscriberError        a subscriber of an event raised; the cause is chained
    ├── DeadlineError          something did not happen in time
    │   └── FenceTimeout       a subscriber held a bucket for too long
    ├── PeerFailed             another rank failed, died or left
    ├── RunFolderError         a run folder is missing, foreign or damaged
    ├── TraceError             a trace file cannot be read
    ├── CheckpointError        a checkpoint is missing, damaged, or of another model
    │   └── ReplicasDiffer     ranks that must hold equal weights do not; nothing mixed is saved
    ├── TierError              a place for checkpoints cannot be written or read now
    ├── StorageError           a keeper of bytes cannot do what it was asked for
    │   ├── BadKey             no key of an object; nothing was touched
    │   ├── NotFound           there is no such object
    │   ├── AlreadyThere       there is one, and it was not to be replaced
    │   ├── Damaged            bytes are not those that were kept
    │   │   └── Truncated      an object, or what was given of one, ends too early
    │   ├── NoRoom             the device, the quota or the memory is full
    │   ├── Unreachable        nobody answers there now; trying again may help
    │   └── CannotMap          its bytes cannot be had without copying them; read them instead
    ├── TransportError         bytes could not be moved: the other side is gone, late or unreachable
    ├── GraphError             a model's architecture graph cannot be found, read or matched
    ├── DataError              a database is damaged, of an unknown kind, or changed meanwhile
    ├── CloneError             a fork was refused or failed; the running job goes on
    ├── StoreError             the model repository cannot do what was asked
    │   ├── BadName            not a name, a version or a tag of a model
    │   ├── ModelNotFound      no such model, version, tag or tensor; says what is like it
    │   ├── ModelExists        a version never changes: a second save of it fails
    │   ├── Gone               removed by somebody else while it was used
    │   ├── Denied             the token has no right to it
    │   └── DoesNotFit         names, shapes or dtypes of what is loaded and of its target differ
    └── RankError              a rank of ``sapwood.testing`` failed; carries its traceback

A message names what was set, what was expected and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "AlreadyThere",
    "BadKey",
    "BadName",
    "CannotMap",
    "CheckpointError",
    "CloneError",
    "ConfigError",
    "Damaged",
    "DataError",
    "DeadlineError",
    "Denied",
    "DoesNotFit",
    "FenceTimeout",
    "Gone",
    "GraphError",
    "LaunchError",
    "MismatchError",
    "ModelExists",
    "ModelNotFound",
    "NoRoom",
    "NotFound",
    "PeerFailed",
    "RankError",
    "ReplicasDiffer",
    "RunFolderError",
    "SapwoodError",
    "StorageError",
    "StoreError",
    "SubscriberError",
    "TierError",
    "TraceError",
    "TransportError",
    "Truncated",
    "Unreachable",
    "UsageError",
]


class SapwoodError(Exception):
    """The root of all errors Sapwood raises on purpose."""


class ConfigError(SapwoodError, ValueError):
    """A setting is wrong, or two settings do not go together."""


class LaunchError(SapwoodError, RuntimeError):
    """The launcher's environment is incomplete or contradictory."""


class MismatchError(SapwoodError, RuntimeError):
    """The ranks of a group do not agree on something they must agree on."""


class UsageError(SapwoodError, RuntimeError):
    """A call came at the wrong time, or a model does something an engine cannot handle."""


class SubscriberError(SapwoodError, RuntimeError):
    """A subscriber of an event raised; its own exception is the cause of this one."""


class DeadlineError(SapwoodError, TimeoutError):
    """Something did not happen in the time it was given."""


class FenceTimeout(DeadlineError):
    """A subscriber held a bucket's fence past its timeout, so the bucket could not be updated."""


class PeerFailed(SapwoodError, RuntimeError):
    """Another rank of the group failed, died or left."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        """``rank`` is the rank that failed, where it is known."""
        super().__init__(message)
        self.rank = rank


class RunFolderError(SapwoodError, RuntimeError):
    """A run folder is missing, belongs to something else, or is damaged."""


class TraceError(SapwoodError, ValueError):
    """A trace file is missing, or holds something that is not a trace."""


class CheckpointError(SapwoodError, RuntimeError):
    """A checkpoint is missing, damaged, or was made from another model."""


class ReplicasDiffer(CheckpointError):
    """Ranks that must have equal weights, optimizer state or buffers have not."""


class TierError(SapwoodError, OSError):
    """A place for checkpoints cannot be written or read now; trying again may help."""


class StorageError(SapwoodError, OSError):
    """A keeper of bytes cannot do what it was asked for."""


class BadKey(StorageError, ValueError):
    """A text is no key of an object; nothing was touched."""


class NotFound(StorageError):
    """There is no such object."""


class AlreadyThere(StorageError):
    """There is such an object, and it was not to be replaced."""


class Damaged(StorageError):
    """Bytes are not those that were kept."""


class Truncated(Damaged):
    """An object ends before the bytes asked for, or fewer bytes came than were announced."""


class NoRoom(StorageError):
    """The device, the quota or the memory is full; something must be removed first."""


class Unreachable(StorageError):
    """Nobody answers there now; trying again may help."""


class CannotMap(StorageError):
    """An object's bytes cannot be had without copying them; reading them works."""


class RankError(SapwoodError, RuntimeError):
    """A rank started by ``sapwood.testing`` failed; the message holds its traceback."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        """``rank`` is the first rank that failed, where it is known."""
        super().__init__(message)
        self.rank = rank


class TransportError(SapwoodError, RuntimeError):
    """Bytes could not be moved: the other side is gone, late, or cannot be reached."""


class GraphError(SapwoodError, ValueError):
    """A model's architecture graph cannot be found, decoded, or compared with another one."""


class DataError(SapwoodError, RuntimeError):
    """A database is damaged, of an unknown kind, or was changed while it was read."""


class CloneError(SapwoodError, RuntimeError):
    """A fork was refused or failed; the running job goes on, and the fork may be tried again."""


class StoreError(SapwoodError, RuntimeError):
    """The model repository cannot do what was asked."""


class BadName(StoreError, ValueError):
    """Not a name, a version or a tag of a model."""


class ModelNotFound(StoreError, LookupError):
    """The repository has no such model, version, tag or tensor."""


class ModelExists(StoreError):
    """A version of a model never changes, and this one is there."""


class Gone(StoreError):
    """What was found a moment ago was removed by somebody else."""


class Denied(StoreError):
    """The token has no right to it."""


class DoesNotFit(StoreError):
    """What is loaded and where it shall go differ in names, shapes or dtypes."""
