"""Small files that others may read at any moment: replaced whole, never half written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["replace_text"]


def replace_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Give a file this content; ``mode`` holds from the first moment, so a secret never shows.

    Raises:
        OSError: as the system gives it; then the file is as it was.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        draft.unlink()
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
