"""Errors as clients of each interface read them, and the status that each goes with."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from clowder_aimage.engine.engine_error import BusyError, DeadlineError, StoppedError
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    ContentError,
    FormatError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    RegistryError,
    StoreError,
    UnauthorizedError,
    UsageError,
    VerificationError,
)

RETRY_AFTER = 5  # seconds, where nothing better is known
# The first kind that fits says the status and OpenAI's word ("Error codes")
_STATUS: tuple[tuple[type[AImageError], int, str], ...] = (
    (BusyError, 503, "overloaded"),
    (StoppedError, 503, "unavailable"),
    (DeadlineError, 504, "deadline_exceeded"),
    (NotFoundError, 404, "model_not_found"),
    (UsageError, 400, "invalid_value"),
    (UnauthorizedError, 502, "registry_unauthorized"),
    (VerificationError, 502, "verification_failed"),
    (FormatError, 500, "invalid_content"),
    (NoSpaceError, 507, "insufficient_storage"),
    (NetworkError, 502, "registry_unreachable"),
    (RegistryError, 502, "registry_failed"),
)
_OTHER = (500, "internal_error")


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
    status, code = _known(error)
    is_told = error.hint and (status < 500 or status == 502)
    message = f"{error.message}; {error.hint}" if is_told else error.message
    if isinstance(error, StoreError):
        message = "the store cannot be used"
    headers = {}
    if status == 503:
        headers["Retry-After"] = str(getattr(error, "retry_after", RETRY_AFTER))
    return ApiError(status, message, code=code, headers=headers)


def registry_error(error: AImageError) -> AImageError:
    """Return the error of a pull or a push as the client gets it.

    The status is 502 if the registry, or the content it sent, is at fault.
    """
    own = (ApiError, BusyError, DeadlineError, StoppedError, UsageError, NotFoundError)
    if isinstance(error, (*own, StoreError, NoSpaceError)):
        return error
    if isinstance(error, AccessError | ContentError):
        message = f"{error.message}; {error.hint}" if error.hint else error.message
        status, code = _known(error)
        return ApiError(502, message, code="registry_failed" if (status, code) == _OTHER else code)
    return error


def response(request: web.Request, error: ApiError) -> web.Response:
    """The error in the words of the interface that was asked (OpenAI's, but for ollama's)."""
    if request.path.startswith("/api/"):
        said = {"error": error.message} | ({"code": error.code} if error.code else {})
        return web.json_response(said, status=error.status, headers=error.headers)
    fault = {
        "message": error.message,
        "type": _kind(error.status),
        "param": error.param,
        "code": error.code,
    }
    return web.json_response({"error": fault}, status=error.status, headers=error.headers)


def _known(error: AImageError) -> tuple[int, str]:
    """The status and the word of an error of a lower floor."""
    found = ((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    return next(found, _OTHER)


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    return "invalid_request_error" if status < 500 else "server_error"
