"""``sapwood runs``: the runs of a folder, and thinning them out."""

from __future__ import annotations

from cyclopts import App

from sapwood.cli.verbs.runs.prune import prune
from sapwood.cli.verbs.runs.table import show

__all__ = ["runs"]


def __getattr__(name: str) -> App:
    """A new ``runs`` for whoever asks: the list of verbs gives the one it gets a shorter help."""
    if name != "runs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = App(name="runs", help_format="markdown")
    app.default(show)
    app.command(prune)
    return app
