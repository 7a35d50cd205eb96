"""Running a user's script or module in this process as if it had been given to python."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sapwood.errors import LaunchError
from sapwood.runtime.folder import STARTED

__all__ = ["Script"]

_OUR_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What to run: a file, or a module as after ``python -m``."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False

    def check(self) -> None:
        """Refuse a file that is not there before any process is started for it.

        Raises:
            LaunchError: There is no such file.
        """
        if not self.module and not Path(self.target).exists():
            raise LaunchError(
                f"there is no script {self.target!r} here; give the path of a Python file, "
                "or -m and the name of a module"
            )

    def tokens(self) -> tuple[str, ...]:
        """The words after which `parse` gives this script again."""
        return (*(("-m",) if self.module else ()), self.target, *self.args)

    @classmethod
    def parse(cls, tokens: list[str]) -> Script:
        """The reverse of `tokens`."""
        module = tokens[0] == "-m"
        target, *args = tokens[module:]
        return cls(target=target, args=tuple(args), module=module)

    def run(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        """Run it here, with ``sys.argv`` and ``sys.path`` as python would set them.

        An error is shown as python shows it, without the frames that are ours, and ends this
        process with exit code 1; ``on_failure`` is told first.
        """
        sys.argv = [self.target, *self.args]
        _write_whole_lines()
        _show_which_run_begins()
        try:
            self._run()
        except SystemExit as error:
            if on_failure is not None and error.code not in (None, 0):
                on_failure(error)
            raise
        except BaseException as error:
            error.__traceback__ = _without_our_frames(error.__traceback__)
            if on_failure is not None:
                on_failure(error)
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)

    def _run(self) -> None:
        home = Path.cwd() if self.module else Path(self.target).resolve().parent
        if not sys.flags.safe_path:  # with `python -P` the first entry is not ours to replace
            sys.path[0] = str(home)
        if self.module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.target, run_name="__main__")


def _write_whole_lines() -> None:
    """Ranks share a terminal or a pipe: a line shows when it ends, and never inside another's."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, write_through=False)


def _show_which_run_begins() -> None:
    """A library does not print; the command line shows the one line that all who use it need."""
    logger = logging.getLogger(STARTED)
    logger.setLevel(logging.INFO)
    logger.addHandler(_StartedHandler())


class _StartedHandler(logging.Handler):
    """Writes to standard error, unless the script shows or keeps its log itself."""

    def emit(self, record: logging.LogRecord) -> None:
        handlers = [*logging.getLogger().handlers, *logging.getLogger("sapwood").handlers]
        if all(handler.level > logging.INFO for handler in handlers):
            print(f"sapwood: {record.getMessage()}", file=sys.stderr)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that starts in the user's code, after our frames and runpy's."""
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename in _OUR_FILES:
        start = start.tb_next
    return start or trace
