"""The files of the page. All are in the package: nothing is fetched from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response

__all__ = ["Assets"]

# Said here, for the system's own table may lack one, and browsers then refuse the file.
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Assets:
    """All files, read once: no address can name any other file."""

    def __init__(self) -> None:
        """They are small."""
        self._found: dict[str, tuple[bytes, str]] = {}
        for file in files("sapwood.report.store").joinpath("static").iterdir():
            kind = _KINDS.get(f".{file.name.rpartition('.')[2]}")
            if kind is not None:
                self._found[file.name] = (file.read_bytes(), kind)

    def get(self, name: str) -> Response | None:
        """One of them; None if there is none of that name."""
        if name not in self._found:
            return None
        content, kind = self._found[name]
        return Response(content, media_type=kind)
