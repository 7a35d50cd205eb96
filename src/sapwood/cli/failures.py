"""Which rank failed first, and which were only ended because of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.rank import TRACEBACK

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["SentSignals", "report"]


class SentSignals:
    """Notes the signals torch's launcher sends to ranks, while it is entered.

    Its result does not tell a rank it ended from one that somebody else ended with the same signal.
    """

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self._sent: dict[int, set[int]] = {}
        self._handler: Any = None
        self._close: Any = None

    def __enter__(self) -> SentSignals:
        """Begin to note."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        self._handler, self._close = SubprocessHandler, SubprocessHandler.close
        close = self._close

        def noting(handler: Any, death_sig: signal.Signals | None = None) -> None:
            self.note(handler.proc.pid, death_sig or signal.SIGTERM)
            close(handler, death_sig)

        self._handler.close = noting
        return self

    def __exit__(self, *error: object) -> None:
        """Leave torch as it was."""
        self._handler.close = self._close

    def note(self, pid: int, number: int) -> None:
        """The launcher sends this signal."""
        self._sent.setdefault(pid, set()).add(number)

    def ended(self, failure: ProcessFailure) -> bool:
        """Whether a signal of the launcher ended this rank."""
        return -failure.exitcode in self._sent.get(failure.pid, ())


def report(failures: Mapping[int, ProcessFailure], sent: SentSignals) -> tuple[int, Path | None]:
    """Say which rank failed first; return its exit code and the file with its traceback, if any."""
    rank, failure = min(failures.items(), key=lambda item: _when(item[1], sent))
    code = failure.exitcode
    how = f"exit code {code}" if code >= 0 else f"signal {failure.signal_name()}"
    text = Path(failure.error_file).with_name(TRACEBACK)
    kept = text if text.exists() else None
    if kept is not None:
        where = f"its traceback is above and in {text}"
    else:
        where = "it left no traceback: look at its last lines above, or run again with --logs"
    for other, ended in sorted(failures.items()):
        if other != rank and ended.exitcode == -signal.SIGKILL and sent.ended(ended):
            print(
                f"sapwood: rank {other} did not end in the time it had after SIGTERM, and was "
                "killed by sapwood",
                file=sys.stderr,
            )
    print(f"sapwood: rank {rank} failed with {how}; {where}", file=sys.stderr)
    return (code if code >= 0 else 128 - code), kept


def _when(failure: ProcessFailure, sent: SentSignals) -> tuple[bool, bool, bool, int]:
    """Orders failures by how likely they are the cause of the others.

    The launcher ends the remaining ranks, and a killed rank makes its peers fail.
    """
    data = failure.error_file_data
    return (
        sent.ended(failure),
        failure.exitcode >= 0,
        data.get("error_type") == "PeerFailed",
        int(data.get("time_ns", failure.timestamp * 1_000_000_000)),
    )
