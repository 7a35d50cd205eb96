"""Where ``sapwood`` starts: finds the verb, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sapwood._version import __version__
from sapwood.errors import SapwoodError

if TYPE_CHECKING:
    from cyclopts import App

__all__ = ["main", "make_app"]

_VERBS = {
    "run": "Start the ranks of a script on this machine, or join those of torchrun, srun, mpirun.",
    "fork": "Fork a running training, without stopping it, onto ranks of its own.",
    "runs": "List the runs of a folder: state, step, what they were forked from; remove old ones.",
    "trace": "Show where the time of a step went, as text, SVG or a Perfetto file.",
    "ckpt": "List, check, compare, mend, thin out and export checkpoints.",
    "data": "Make, index, check and measure databases of training samples.",
    "store": "List, compare, check, import and export the models of a repository.",
    "doctor": "Check this machine and this installation, and say what to do about problems.",
    "completion": "Print what makes the Tab key complete commands in bash, zsh or fish.",
    "demo": "Train a small model on two ranks and show what Sapwood saw.",
}
_ABOUT = """The layer of a training run that moves things.

New here? `sapwood demo` shows it at work, `sapwood VERB --help` explains a verb with examples.
`sapwood --debug VERB` (or SAPWOOD_DEBUG=1) shows the traceback of an error.
"""
_INSTALL = "the sapwood command needs two more packages: pip install 'sapwood[cli]'"
FAILED, MISUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = bool(os.environ.get("SAPWOOD_DEBUG", "").strip("0"))
    if tokens[:1] == ["--debug"]:
        debug = True
        del tokens[0]
    try:
        return _call(tokens)
    except SapwoodError as error:
        if debug:
            raise
        print(f"sapwood: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`| head`); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _call(tokens: list[str]) -> int:
    try:
        from cyclopts import CycloptsError
    except ModuleNotFoundError as error:
        if error.name != "cyclopts":
            raise
        print(f"sapwood: {_INSTALL}", file=sys.stderr)
        return MISUSED
    app = make_app(listing=not tokens or tokens[0] not in _VERBS)
    try:
        tokens = _with_script_apart(tokens)
        result: Any = app(tokens, exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return MISUSED
    return result if isinstance(result, int) else 0


def _with_script_apart(tokens: list[str]) -> list[str]:
    """The verbs that start a script leave its options to it."""
    if tokens[:1] == ["run"]:
        from sapwood.cli.splitting import protect_script
        from sapwood.cli.verbs.run import run

        return protect_script(tokens, run)
    if tokens[:1] == ["fork"]:
        from sapwood.cli.splitting import protect_script
        from sapwood.cli.verbs.fork import fork

        return protect_script(tokens, fork, words_before=1)
    return tokens


def make_app(*, listing: bool) -> App:
    """The application; summaries are given only for the list, as they would hide a verb's help."""
    from cyclopts import App

    app = App(name="sapwood", help=_ABOUT, version=__version__, help_format="markdown")
    for verb, summary in _VERBS.items():
        path = f"sapwood.cli.verbs.{verb}:{verb}"
        if listing:
            app.command(path, name=verb, help=summary)
        else:
            app.command(path, name=verb)
    return app
