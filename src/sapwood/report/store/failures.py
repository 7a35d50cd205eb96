"""What is answered when something went wrong."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sapwood.errors import (
    BadName,
    ConfigError,
    Denied,
    Gone,
    ModelExists,
    ModelNotFound,
    SapwoodError,
)
from sapwood.report.store.changes import Conflict
from sapwood.report.store.jobs import Cancelled
from sapwood.report.store.plain import Json

__all__ = ["HANDLERS"]

log = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (ModelNotFound, 404),
    (BadName, 400),
    (ConfigError, 400),
    (Denied, 403),
    (Conflict, 409),
    (ModelExists, 409),
    (Gone, 410),
    (SapwoodError, 500),
)


async def _refused(request: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    if status == 500:
        log.warning("%s: %s", request.url.path, error)
    return Json({"error": str(error)}, status_code=status)


async def _cancelled(request: Request, error: Exception) -> Response:
    return Json({"error": "this was cancelled"}, status_code=503)


async def _failed(request: Request, error: Exception) -> Response:
    return Json({"error": f"{type(error).__name__}; see the server's log"}, status_code=500)


HANDLERS: Any = {SapwoodError: _refused, Cancelled: _cancelled, Exception: _failed}
"""By the kind of error; what is no error of ours is also raised again, for the server's log."""
