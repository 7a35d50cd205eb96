"""``sapwood store ui``: the web page of a repository."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.store.place import DEFAULT, At, opened

__all__ = ["ui"]

_TICK = 0.5


def ui(
    *,
    at: At = None,
    port: int = 0,
    no_browser: Annotated[bool, Parameter(negative="")] = False,
    token_file: Path | None = None,
) -> int:
    """Show the repository as a page in the browser, until Ctrl-C.

    Only this machine can open it. It is read-only; with `--token-file`, who enters the token may
    tag and remove versions. From another machine: `ssh -L 8080:localhost:PORT machine`.

    ```
    sapwood store ui
    sapwood store ui --at /data/models --port 8080 --no-browser
    sapwood store ui --token-file ~/.sapwood-ui     made if it is not there
    ```

    Args:
        at: The repository.
        port: Where to listen on 127.0.0.1; 0 takes a free port.
        no_browser: Only print the address.
        token_file: A file that only you may read, with the token that allows changes.
    """
    from sapwood.report.store import Serving
    from sapwood.runtime.tokens import read_or_make_token

    with _ending_signals(), opened(at) as repo:
        token, made = read_or_make_token(token_file) if token_file is not None else (None, False)
        place = at or os.environ.get("SAPWOOD_STORE") or DEFAULT
        with Serving(repo, place=place, port=port, token=token) as serving:
            what = f"changes need the token in {token_file}" if token else "read-only"
            if made:
                print(f"made a token in {token_file}")
            print(f"{place}: {serving.url} ({what}; Ctrl-C ends it)", flush=True)
            if not no_browser:
                _open_browser(serving.url)
            try:
                while not serving.wait(_TICK):
                    pass
            except KeyboardInterrupt:
                return 0
    return 1  # the server ended by itself; its log says why


@contextmanager
def _ending_signals() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that the repository is closed in any case."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _open_browser(url: str) -> None:
    # Without a display, what opens is a browser in this terminal, which nobody asked for.
    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        return
    import webbrowser

    webbrowser.open(url)
