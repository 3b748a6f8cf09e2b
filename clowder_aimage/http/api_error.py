"""Errors of the HTTP interfaces: their statuses, codes and JSON.

``/api/`` uses ollama's form, ``/v2/`` that of the OCI distribution specification ("Error Codes"),
and every other path that of OpenAI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from clowder_aimage import errors
from clowder_aimage.engine.admission import (
    BusyError,
    CallerBusyError,
    ComputeDeadlineError,
    DeadlineError,
    DiedError,
    StoppedError,
)
from clowder_aimage.errors import (
    AImageError,
    NoSpaceError,
    NotFoundError,
    StoreBusyError,
    StoreError,
    UsageError,
)

if TYPE_CHECKING:
    from clowder_aimage.http.local_request import Request

# Seconds, unless a better value is known
RETRY_AFTER = 5
OPENAI, OLLAMA, OCI = "openai", "ollama", "oci"
# Says that a request would fail again, to OpenAI's SDKs and to the workers of a fleet
NO_RETRY = ("X-Should-Retry", "false")
# The form of errors outside of the interfaces
INTERFACE = web.AppKey("interface", str)
# Return the advice on an error in terms of the options of this server
ADVICE: web.AppKey[Callable[[AImageError], str | None]] = web.AppKey("advice")
# The first matching class determines the status and the code (OpenAI, "Error codes")
_STATUS: tuple[tuple[type[AImageError], int, str], ...] = (
    (CallerBusyError, 429, "too_many_requests"),
    (BusyError, 503, "overloaded"),
    (StoreBusyError, 503, "store_busy"),
    (StoppedError, 503, "unavailable"),
    (DeadlineError, 504, "deadline_exceeded"),
    (NotFoundError, 404, "model_not_found"),
    (errors.TooLargeError, 413, "too_large"),
    (UsageError, 400, "invalid_value"),
    (errors.ForbiddenError, 403, "input_not_allowed"),
    (errors.NoPictureError, 422, "no_picture"),
    (errors.ChatTemplateError, 422, "invalid_chat_template"),
    (errors.UnrunnableError, 422, "model_not_supported"),
    (errors.UnauthorizedError, 502, "registry_unauthorized"),
    (errors.VerificationError, 502, "verification_failed"),
    (errors.SignatureError, 403, "signature_required"),
    (errors.LicenseError, 403, "license_refused"),
    (errors.FormatError, 500, "invalid_content"),
    (NoSpaceError, 507, "insufficient_storage"),
    (StoreError, 503, "store_unavailable"),
    (errors.NetworkError, 502, "registry_unreachable"),
    (errors.RegistryError, 502, "registry_failed"),
)
_OTHER = (500, "internal_error")
# Distribution specification codes of errors that were not raised by one of its routes
_OCI_CODES = {
    **dict.fromkeys((400, 408, 413), "SIZE_INVALID"),
    **dict.fromkeys((404, 405), "UNSUPPORTED"),
    401: "UNAUTHORIZED",
    403: "DENIED",
    429: "TOOMANYREQUESTS",
}


class ApiError(AImageError):
    """An error that is sent as the response to a request.

    Args:
        status: The HTTP status.
        code: The code of the interface.
        param: The name of the invalid field.
        details: Facts for the distribution API: one listed error for each of them.
        advice: The hint, the remedy and the facts of AImageError.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: tuple[object, ...] = (),
        **advice: Any,
    ) -> None:
        super().__init__(message, **advice)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})
        self.details = details


def find_interface(request: Request) -> str:
    """Return the interface of the response: OPENAI, OLLAMA or OCI."""
    if request.path.startswith("/v2/"):
        return OCI
    return OLLAMA if request.path.startswith("/api/") else request.app.get(INTERFACE, OPENAI)


def convert_error(error: AImageError, interface: str = OPENAI) -> ApiError:
    """Return the response to an error of a lower layer.

    The store's messages contain local paths, so they are only logged.
    """
    if isinstance(error, ApiError):
        return error
    if interface == OCI and not isinstance(error, BusyError | StoppedError):
        return _build_oci_error(error)
    status, code = _find_status(error)
    # Hints of internal errors are for the operator, not for clients
    is_shown = error.hint and (status < 500 or status == 502)
    message = f"{error.message}; {error.hint}" if is_shown else error.message
    if isinstance(error, StoreError):
        is_busy = isinstance(error, StoreBusyError)
        message = "the store is in use" if is_busy else "cannot access the store"
    headers = dict([NO_RETRY]) if isinstance(error, ComputeDeadlineError | DiedError) else {}
    if status in (429, 503):
        headers["Retry-After"] = str(getattr(error, "retry_after", RETRY_AFTER))
    return ApiError(status, message, code=code, headers=headers)


def convert_registry_error(error: AImageError) -> AImageError:
    """Return the error of a pull or a push in the form sent to the client.

    The status is 502 if the registry or its content is at fault.
    """
    worker_errors = (
        *(ApiError, BusyError, DeadlineError, StoppedError, UsageError, NotFoundError),
        errors.PolicyError,
    )
    if isinstance(error, (*worker_errors, StoreError, NoSpaceError)):
        return error
    if isinstance(error, errors.AccessError | errors.ContentError):
        message = f"{error.message}; {error.hint}" if error.hint else error.message
        status, code = _find_status(error)
        return ApiError(502, message, code="registry_failed" if (status, code) == _OTHER else code)
    return error


def build_response(request: Request, error: ApiError) -> web.Response:
    """Return the response in the form of the requested interface."""
    text = (request.app.get(ADVICE) or _get_hint)(error)
    if text:
        error.message = f"{error.message}; {text}"
    form = {OCI: _build_oci_body, OLLAMA: _build_ollama_body, OPENAI: _build_openai_body}[
        find_interface(request)
    ]
    return web.json_response(form(error), status=error.status, headers=error.headers)


def _get_hint(error: AImageError) -> str | None:
    return error.hint


def _build_oci_body(error: ApiError) -> dict[str, object]:
    code = error.code if error.code and error.code.isupper() else None
    code = code or _OCI_CODES.get(error.status, "UNKNOWN")
    entry: dict[str, object] = {"code": code, "message": error.message}
    return {"errors": [entry | {"detail": detail} for detail in error.details] or [entry]}


def _build_ollama_body(error: ApiError) -> dict[str, object]:
    return {"error": error.message, **({"code": error.code} if error.code else {})}


def _build_openai_body(error: ApiError) -> dict[str, object]:
    facts = {"type": _find_type(error.status), "param": error.param, "code": error.code}
    return {"error": {"message": error.message, **facts}}


def _build_oci_error(error: AImageError) -> ApiError:
    if isinstance(error, NoSpaceError):
        return ApiError(507, "no space left", code="UNKNOWN")
    if isinstance(error, StoreError):
        is_busy = isinstance(error, StoreBusyError)
        message = "the store is in use" if is_busy else "cannot access the store"
        headers = {"Retry-After": str(RETRY_AFTER)}
        return ApiError(503, message, code="UNKNOWN", headers=headers)
    if isinstance(error, errors.PolicyError):
        return ApiError(403, error.message, code="DENIED")
    is_damaged = isinstance(error, errors.ContentError)
    message = "the stored content is damaged" if is_damaged else "unknown error"
    return ApiError(500, message, code="UNKNOWN")


def _find_status(error: AImageError) -> tuple[int, str]:
    matches = ((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    return next(matches, _OTHER)


def _find_type(status: int) -> str:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {401: "authentication_error", 403: "permission_error"}.get(status, kind)
