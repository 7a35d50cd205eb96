"""Writing a file for a user: there whole and durable, or not at all, and never over another one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sapwood.storage.files import Files

__all__ = ["new_file"]


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name to write to first; the file gets its own when it is complete and on the device.

    Raises:
        OSError: as the system gives it; ``FileExistsError`` if there is such a file by then.
    """
    files = Files()
    draft = path.with_name(f".{path.name}.draft-{os.getpid()}")
    try:
        yield draft
        with files.share(draft) as writer:
            writer.sync()
        os.link(draft, path)  # unlike a rename, it fails if somebody made the file meanwhile
        files.sync_folder(path.parent)
    finally:
        with suppress(OSError):
            draft.unlink()
