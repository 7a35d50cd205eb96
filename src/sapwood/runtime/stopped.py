"""Stopped: how a run that was asked to stop leaves the training loop."""

from __future__ import annotations

__all__ = ["EXIT_CODE", "Stopped"]

EXIT_CODE = 75
"""EX_TEMPFAIL: try again. Not 0, or launchers would take the run for finished; not 128 + n, which
says that a signal killed the process."""


class Stopped(SystemExit):
    """The run was asked to stop, and has: its last step is saved, if it has a Checkpointer.

    A ``SystemExit`` and not an error: a script that does not catch it ends with exit code 75, which
    makes launchers start it again, and its ``with`` blocks close as usual.

    Attributes:
        step: the last step; all ranks ended it.
        reason: who asked.
        saved: whether all ranks saw the step become durable.
        final: the job's time is over, so that starting again inside the same job is of no use.
    """

    def __init__(self, *, step: int, reason: str, saved: bool, final: bool = False) -> None:
        """The exit code is always ``EXIT_CODE``."""
        super().__init__(EXIT_CODE)
        self.step = step
        self.reason = reason
        self.saved = saved
        self.final = final

    def __str__(self) -> str:
        """What happened, for logs."""
        saved = "saved" if self.saved else "not saved"
        return f"stopped after step {self.step} ({saved}): {self.reason}"
