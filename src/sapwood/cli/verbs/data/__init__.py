"""``sapwood data``: looking after databases of training samples."""

from __future__ import annotations

from cyclopts import App

from sapwood.cli.verbs.data.verbs import index, inspect, verify

__all__ = ["data"]

_ABOUT = """Index, look at and check databases of training samples.

A *database* is an LMDB file, or a folder with `data.mdb` in it. Nothing of it is changed, and no
lock is taken: if somebody writes to it meanwhile, that is an error.

```
sapwood data inspect train.mdb       what is in it: records, sizes, named databases
sapwood data index train.mdb         note where every record is, in train.mdb.sapwood-index
sapwood data verify train.mdb        check the structure of every page that a record needs
```
"""


def __getattr__(name: str) -> App:
    """A new ``data`` for whoever asks: the list of verbs gives the one it gets a shorter help."""
    if name != "data":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = App(name="data", help=_ABOUT, help_format="markdown")
    for verb in (index, inspect, verify):
        app.command(verb)
    return app
