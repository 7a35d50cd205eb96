"""``sapwood ckpt``: looking after checkpoints."""

from __future__ import annotations

from cyclopts import App

from sapwood.cli.verbs.ckpt.diff import diff
from sapwood.cli.verbs.ckpt.export import export
from sapwood.cli.verbs.ckpt.inspect import inspect
from sapwood.cli.verbs.ckpt.ls import ls
from sapwood.cli.verbs.ckpt.prune import prune
from sapwood.cli.verbs.ckpt.repair import repair
from sapwood.cli.verbs.ckpt.verify import verify

__all__ = ["ckpt"]

_ABOUT = """List, check, compare, mend, thin out and export checkpoints.

A *place* is the folder of a checkpointer, one node's local folder or the folder of all nodes,
`s3://bucket/prefix`, or a model repository, `store://models/`; without one it is `ckpts`. A
*checkpoint* is a step (`15`: that of the current branch), an id (`00000015-3f9a1c`) or `latest`;
put a place before it to look elsewhere: `/data/ckpts/latest`.

```
sapwood ckpt ls                      what is there, and whether it is whole
sapwood ckpt verify                  read and check every byte
sapwood ckpt diff 10 latest          which tensors changed, and by how much
sapwood ckpt prune --last 3          say what would go; add --yes to do it
sapwood ckpt export latest model.safetensors
```
"""


def __getattr__(name: str) -> App:
    """A new ``ckpt`` for whoever asks: the list of verbs gives the one it gets a shorter help."""
    if name != "ckpt":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = App(name="ckpt", help=_ABOUT, help_format="markdown")
    for verb in (ls, inspect, verify, diff, repair, prune, export):
        app.command(verb)
    return app
