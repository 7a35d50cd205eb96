"""``sapwood store``: looking after a repository of models."""

from __future__ import annotations

from cyclopts import App

from sapwood.cli.verbs.store.care import gc, rm, tag, untag, verify
from sapwood.cli.verbs.store.history import diff, log
from sapwood.cli.verbs.store.hub import hub
from sapwood.cli.verbs.store.listing import find, ls, show
from sapwood.cli.verbs.store.members import members_app
from sapwood.cli.verbs.store.moving import get, put
from sapwood.cli.verbs.store.serve import serve
from sapwood.cli.verbs.store.ui import ui

__all__ = ["store"]

_ABOUT = """List, compare, check, import and export the models of a repository.

A *model* is `name@version`, `name@tag`, or a name, which means its latest version. The repository
is the folder `models`, or what `--at` says, or SAPWOOD_STORE: a folder, or providers on other
machines, as sapwood://host:port.

```
sapwood store put weights.safetensors resnet50@imagenet --tag best
sapwood store ls                            what is there
sapwood store find 'val_acc > 0.9'          versions by metric, name, tag, size or age
sapwood store show resnet50                 its tensors, and what it comes from
sapwood store diff resnet50@1 resnet50@2    which tensors changed, and by how much
sapwood store get resnet50@best out.safetensors
sapwood store hub                           for transformers and others, as HF_ENDPOINT
sapwood store gc                            give back the room of what was removed
sapwood store serve /data/models            let other processes and machines use a repository
sapwood store ui                            all of it as a page in the browser
```
"""


def __getattr__(name: str) -> App:
    """A new ``store`` for whoever asks: the list of verbs gives the one it gets a shorter help."""
    if name != "store":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = App(name="store", help=_ABOUT, help_format="markdown")
    for verb in (ls, find, show, log, diff, get, put, tag, untag, rm, gc, verify, serve, hub, ui):
        app.command(verb)
    app.command(members_app())
    return app
