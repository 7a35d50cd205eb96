"""What a request must be to be heard.

The server listens on loopback only, but a browser on this machine sends it whatever any web page
asks for. So a request must name this machine as its host (or a foreign name that was made to point
here could read everything), and must not come from another page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sapwood.report.store.plain import Json

__all__ = ["HEADERS", "Guard", "refusal"]

# Any port: a tunnel, as of `ssh -L`, mostly has another one at its other end.
_HOST = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?", re.ASCII)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_METHODS = ("GET", "HEAD", "POST")
_BODY = 4096


class Guard:
    """Lets requests of this machine's own page through, and gives every response its headers."""

    def __init__(self, app: ASGIApp) -> None:
        """``app`` answers what gets through."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        found = refusal(scope["method"], scope["path"], Headers(scope=scope))
        if found is None:
            await self._app(scope, receive, sending)
            return
        status, why = found
        await Json({"error": why}, status_code=status)(scope, receive, sending)


def refusal(method: str, path: str, headers: Headers) -> tuple[int, str] | None:
    """Why a request is not heard, with the status of the answer; None if it is."""
    if method not in _METHODS:
        return 405, f"{method} is not known here"
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].lower()):
        return 421, "this server answers requests to localhost and 127.0.0.1 only"
    if _is_foreign(method, path, headers, hosts[0].lower()):
        return 403, "this request comes from another page"
    if method == "POST":
        return _bad_body(headers)
    return None


def _is_foreign(method: str, path: str, headers: Headers, host: str) -> bool:
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.lower() != f"http://{host}":
        return True
    if method == "POST":
        # Browsers send both; whoever sends neither is a program, and needs the token all the same.
        return site not in (None, "same-origin")
    if site in (None, "same-origin", "none"):
        return False
    # A link to the page itself may be anywhere; what it shows it asks for by itself.
    opened = headers.get("sec-fetch-mode") == "navigate"
    return not (path == "/" and opened and headers.get("sec-fetch-dest") == "document")


def _bad_body(headers: Mapping[str, str]) -> tuple[int, str] | None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return 415, "expected JSON"
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
        return 411, "expected content-length"
    if len(length) > 9 or int(length) > _BODY:
        return 413, f"expected at most {_BODY} bytes"
    return None
