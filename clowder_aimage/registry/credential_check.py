"""Prove that a registry accepts credentials, and that it does not accept any others.

A registry whose content may be read by all does not ask for credentials at ``/v2/``, and some token
services issue tokens to anyone. Then a response of success says nothing about a password.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from clowder_aimage.errors import AccessError, NotFoundError, RegistryError, UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.session import Session
from clowder_aimage.registry.upload import check_permission

# A repository that should not exist.
_REPOSITORY = "aimage-login"


class _Verdict(enum.Enum):
    UNASKED = enum.auto()
    REFUSED = enum.auto()
    ACCEPTED = enum.auto()
    # The same request without the credentials was refused.
    REQUIRED = enum.auto()


def check_credentials(registry: str, basic: str, connection: ClientOptions) -> None:
    """Return if ``registry`` requires and accepts the credentials ``basic`` (base64).

    Those that are accepted where none are required are compared with made-up ones. Raises
    UnauthorizedError: they are refused, withheld, or not checked by the registry.
    """
    report, is_ignored = connection.on_credential, False
    # A warning would repeat the error.
    connection = replace(
        connection, on_credential=lambda event: report(replace(event, is_warning=False))
    )
    for send in _REQUESTS:
        verdict = _try_request(send, registry, basic, connection)
        if verdict is _Verdict.REFUSED:
            raise UnauthorizedError(
                f"login failed: {registry} rejected the username or password", registry=registry
            )
        if verdict is _Verdict.REQUIRED:
            return
        if verdict is _Verdict.ACCEPTED:
            silent = replace(connection, on_credential=lambda _: None)
            if _try_request(send, registry, _make_up(), silent) is _Verdict.REFUSED:
                return
            is_ignored = True
    reason = "accepts any username and password" if is_ignored else "does not ask for credentials"
    raise UnauthorizedError(
        f"login failed: {registry} {reason}: these could not be checked, and are not stored",
        hint="content that requires no credentials can be used without them",
    )


def _make_up() -> str:
    return base64.b64encode(f"{_REPOSITORY}:{secrets.token_hex(16)}".encode()).decode()


def _try_request(
    send: Callable[[Session], object], registry: str, basic: str, connection: ClientOptions
) -> _Verdict:
    """Send a request with credentials if the registry asks for them, and judge the response."""
    reference = Reference(registry, _REPOSITORY)
    with Session(reference, connection, basic_auth=basic) as session:
        trace = session.credentials
        try:
            send(session)
        except AccessError as error:
            if not (trace.is_withheld or trace.is_refused):
                raise _explain_error(error, session) from None
        if trace.is_withheld:
            raise _build_error("the password was not sent to its token service", session)
        if trace.is_refused:
            return _Verdict.REFUSED
        if not trace.is_sent:
            return _Verdict.UNASKED
        is_required = send is not _send_basic and not trace.is_issued
        return _Verdict.REQUIRED if is_required else _Verdict.ACCEPTED


def _explain_error(error: AccessError, session: Session) -> AccessError:
    """Return the error of a request that says nothing about the password."""
    if not isinstance(error, UnauthorizedError):
        return error
    prefix = "" if session.credentials.is_sent else "the password was not sent: "
    return _build_error(prefix + error.facts.get("reason", str(error)), session)


def _build_error(reason: str, session: Session) -> UnauthorizedError:
    advice = session.credentials.build_advice()
    return UnauthorizedError(f"login failed: {reason}", **advice)


def _list_catalog(session: Session) -> None:
    session.request("GET", session.catalog).finish()


def _begin_upload(session: Session) -> None:
    """Begin an upload, and cancel it; ignore the responses."""
    with contextlib.suppress(NotFoundError, RegistryError):
        check_permission(session)


_send_basic = partial(Session.ping, with_basic=True)
_REQUESTS: tuple[Callable[[Session], object], ...] = (
    Session.ping,
    _send_basic,
    _list_catalog,
    _begin_upload,
)
