"""Errors as clients of each interface read them, and the status that each goes with."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from clowder_aimage.errors import (
    AImageError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UnauthorizedError,
    UsageError,
)
from clowder_aimage.worker.engine import BusyError, DeadlineError, StoppedError

RETRY_AFTER = 5  # seconds, where nothing better is known
# The first kind that fits says the status and OpenAI's word ("Error codes")
_STATUS: tuple[tuple[type[AImageError], int, str], ...] = (
    (BusyError, 503, "overloaded"),
    (StoppedError, 503, "unavailable"),
    (DeadlineError, 504, "deadline_exceeded"),
    (NotFoundError, 404, "model_not_found"),
    (UsageError, 400, "invalid_value"),
    (UnauthorizedError, 502, "registry_unauthorized"),
    (NoSpaceError, 507, "insufficient_storage"),
)


class ApiError(AImageError):
    """A request that is answered with an error. ``param`` is the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})


def api_error(error: AImageError) -> ApiError:
    """What is said of an error that a lower floor raised.

    Messages of the store hold paths of this machine: they are for the log.
    """
    if isinstance(error, ApiError):
        return error
    status, code = next(
        ((status, code) for kind, status, code in _STATUS if isinstance(error, kind)),
        (500, "internal_error"),
    )
    message = f"{error.message}; {error.hint}" if error.hint and status < 500 else error.message
    if isinstance(error, StoreError):
        message = "the store cannot be used"
    headers = {}
    if status == 503:
        headers["Retry-After"] = str(getattr(error, "retry_after", RETRY_AFTER))
    return ApiError(status, message, code=code, headers=headers)


def response(request: web.Request, error: ApiError) -> web.Response:
    """The error in the words of the interface that was asked (OpenAI's, but for ollama's)."""
    if request.path.startswith("/api/"):
        return web.json_response(
            {"error": error.message}, status=error.status, headers=error.headers
        )
    fault = {
        "message": error.message,
        "type": _kind(error.status),
        "param": error.param,
        "code": error.code,
    }
    return web.json_response({"error": fault}, status=error.status, headers=error.headers)


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    return "invalid_request_error" if status < 500 else "server_error"
