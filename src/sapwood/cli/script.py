"""Running a user's script or module in this process as if it had been given to python."""

from __future__ import annotations

import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sapwood.clone.order import ENV
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
        """Refuse a file or module that is not there before any process is started for it.

        Raises:
            LaunchError: There is none, or it is a folder that python cannot run.
        """
        if self.module:
            if not _is_found(self.target):
                raise LaunchError(
                    f"there is no module {self.target!r} in this folder or among what is "
                    "installed; without -m, give the path of a Python file"
                )
            return
        path = Path(self.target)
        if not self.target or not path.exists():
            raise LaunchError(
                f"there is no script {self.target!r} here; give the path of a Python file, "
                "or -m and the name of a module"
            )
        if path.is_dir() and not any(path.glob("__main__.py*")):
            raise LaunchError(
                f"{self.target} is a folder without __main__.py; give the path of a Python file, "
                "or -m and the name of a module"
            )
        if not path.is_dir() and not path.is_file():  # reading a FIFO would wait forever
            raise LaunchError(
                f"{self.target} is neither a file nor a folder; give the path of a Python file, "
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
            _say_what_was_not_forked()
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


def _is_found(module: str) -> bool:
    """Whether python would find a module; what is inside a package only its import can tell."""
    top = module.partition(".")[0]
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return bool(top) and importlib.util.find_spec(top) is not None
    except ValueError:  # it is loaded here, and does not say from where
        return True
    finally:
        sys.path[:] = before


def _write_whole_lines() -> None:
    """Ranks share a terminal or a pipe: a line shows when it ends, and never inside another's."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, write_through=False)


def _say_what_was_not_forked() -> None:
    """A script without a Run, started by `sapwood fork`, ends as if all were well."""
    # Used up by the Run that took the parent's state; a child process may have one of its own.
    if os.environ.get(ENV) and os.environ.get("RANK", "0") == "0":
        print(
            "sapwood: nothing was forked by this process: its script made no sapwood.Run, which "
            "would have gone on from the parent's state",
            file=sys.stderr,
        )


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
