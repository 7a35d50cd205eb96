"""Who may ask: requests that name another host are refused, and those without the token."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sapwood.integrations.hub.answers import failure

__all__ = ["Guard"]


class Guard:
    """Stands before an application."""

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: frozenset[str] | None) -> None:
        """``hosts``: the names it may be asked under, None for any; ``token``: None for none."""
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        # A web page somewhere may have its own name point to this machine (DNS rebinding).
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            allowed = ", ".join(sorted(self._hosts))
            answer = failure(421, f"this server answers to {allowed}; set HF_ENDPOINT to that")
            await answer(scope, receive, send)
            return
        if self._token is not None:
            given = headers.get("authorization")
            if given is None:
                answer = failure(
                    401,
                    "this server asks for a token: set HF_TOKEN",
                    code="RepoNotFound",
                    WWW_Authenticate="Bearer",
                )
                await answer(scope, receive, send)
                return
            if not self._proven(given):
                # The words by which clients tell a wrong token from a model that is not there.
                wrong = "Invalid credentials in Authorization header"
                await failure(401, wrong, WWW_Authenticate="Bearer")(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _proven(self, given: str) -> bool:
        kind, _, token = given.partition(" ")
        known = (self._token or "").encode()
        return kind.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), known)


def _host(header: str) -> str:
    """A host without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
