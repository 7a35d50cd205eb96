"""What the fork server of the ranks loads last: the library itself. Then all of it is frozen.

A rank is a copy of the server, so what is loaded here costs a rank nothing. But the first garbage
collection in a rank would look at every object, and the kernel would have to copy the memory of all
of them for that. Frozen objects are not looked at.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

_LIBRARY = (
    "sapwood.run",
    "sapwood.checkpoint.checkpointer",
    "sapwood.data.reader",
    "sapwood.testing.workloads",
)

for _name in _LIBRARY:
    with suppress(ImportError):  # what an extra needs may not be installed
        import_module(_name)
gc.collect()
gc.freeze()
