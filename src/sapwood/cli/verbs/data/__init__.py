"""``sapwood data``: looking after databases of training samples."""

from __future__ import annotations

from cyclopts import App

from sapwood.cli.verbs.data.bench import bench
from sapwood.cli.verbs.data.verbs import index, inspect, verify
from sapwood.cli.verbs.data.write import compact, convert

__all__ = ["data"]

_ABOUT = """Make, index, check and measure databases of training samples.

A *database* is an LMDB file, or a folder with `data.mdb` in it. It is never changed, and no lock is
taken: if somebody writes to it meanwhile, that is an error.

```
sapwood data inspect train.mdb           what is in it: records, sizes, named databases
sapwood data index train.mdb             note where every record is, in train.mdb.sapwood-index
sapwood data verify train.mdb            check the structure of every page that a record needs
sapwood data convert photos/ train.mdb   make one of images, .npy, tar or safetensors files
sapwood data compact old.mdb new.mdb     a copy in the order of keys, without free pages
sapwood data bench train.mdb             how fast it can be read here, beside py-lmdb and the disk
```
"""


def __getattr__(name: str) -> App:
    """A new ``data`` for whoever asks: the list of verbs gives the one it gets a shorter help."""
    if name != "data":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = App(name="data", help=_ABOUT, help_format="markdown")
    for verb in (inspect, index, verify, convert, compact, bench):
        app.command(verb)
    return app
