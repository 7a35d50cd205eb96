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
    ├── TierError              a place for checkpoints cannot be written or read now
    ├── TransportError         bytes could not be moved: the other side is gone, late or unreachable
    ├── DataError              a database is damaged, of an unknown kind, or changed meanwhile
    ├── CloneError             a fork was refused or failed; the running job goes on
    └── RankError              a rank of ``sapwood.testing`` failed; carries its traceback

A message names what was set, what was expected and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CloneError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "FenceTimeout",
    "LaunchError",
    "MismatchError",
    "PeerFailed",
    "RankError",
    "RunFolderError",
    "SapwoodError",
    "SubscriberError",
    "TierError",
    "TraceError",
    "TransportError",
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


class TierError(SapwoodError, OSError):
    """A place for checkpoints cannot be written or read now; trying again may help."""


class RankError(SapwoodError, RuntimeError):
    """A rank started by ``sapwood.testing`` failed; the message holds its traceback."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        """``rank`` is the first rank that failed, where it is known."""
        super().__init__(message)
        self.rank = rank


class TransportError(SapwoodError, RuntimeError):
    """Bytes could not be moved: the other side is gone, late, or cannot be reached."""


class DataError(SapwoodError, RuntimeError):
    """A database is damaged, of an unknown kind, or was changed while it was read."""


class CloneError(SapwoodError, RuntimeError):
    """A fork was refused or failed; the running job goes on, and the fork may be tried again."""
