"""What every request passes: who it means, whether it may write, and errors as JSON."""

from __future__ import annotations

import hmac
import logging

from aiohttp import ClientError, web
from aiohttp.typedefs import Handler, Middleware

from clowder_aimage.distribution.distribution_error import DistributionError, api_error
from clowder_aimage.errors import AImageError
from clowder_aimage.http.request_header import host_name, origin_host, shown_token

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

_log = logging.getLogger(__name__)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a route raises into the specification's JSON ("Error Codes")."""
    try:
        return await handler(request)
    except AImageError as error:
        failure = api_error(error)
        if failure.status >= 500:
            _log.error("%s %s: %s", request.method, request.path, error)
        return failure.response()
    except web.HTTPException as error:
        return _of_framework(error).response()
    except ConnectionError:
        raise  # the client is gone, or must be told by a broken connection
    except ClientError as error:  # aiohttp's word for a request body that is not valid HTTP
        message = f"the request's body broke off: {error}"
        return DistributionError("SIZE_INVALID", message=message).response()
    except Exception:
        _log.exception("%s %s", request.method, request.path)
        return DistributionError("UNKNOWN").response()


async def common_headers(_: web.Request, response: web.StreamResponse) -> None:
    """What every answer says, blobs and errors alike; a browser must not guess at content."""
    response.headers["Docker-Distribution-API-Version"] = "registry/2.0"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Server"] = "aimage"  # whoever asks need not hear what it is made of


def _of_framework(error: web.HTTPException) -> DistributionError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers = {"Allow": ", ".join(sorted(error.allowed_methods))}
        return DistributionError("UNSUPPORTED", headers=headers)
    return DistributionError("UNSUPPORTED", message="no such endpoint", status=error.status)


def check_host(allowed: frozenset[str] | None) -> Middleware:
    """Refuse requests that a web page in a browser could have been led to send.

    DNS rebinding: the ``Host`` must be one of ``allowed`` (None: any). Cross-site requests: an
    ``Origin``, which only browsers send, must be the host itself.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if allowed is not None and host_name(host) not in allowed:
            raise DistributionError(
                "DENIED", {"host": host[:300]}, message="this host is not served here"
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin_host(origin) != host:
            raise DistributionError(
                "DENIED", {"origin": origin[:300]}, message="cross-site request"
            )
        return await handler(request)

    return middleware


def check_token(token: str) -> Middleware:
    """Let nobody pass who does not know ``token``: as a bearer token, or as the password of any
    user (RFC 6750, RFC 7617), which is what other tools can be told.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = shown_token(request.headers.get("Authorization", ""))
        if not hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode()):
            headers = {"WWW-Authenticate": 'Basic realm="aimage registry", charset="UTF-8"'}
            raise DistributionError("UNAUTHORIZED", headers=headers)
        return await handler(request)

    return middleware


def refuse_writes(message: str) -> Middleware:
    """405 UNSUPPORTED, with the reason, for whatever is not a read."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            raise DistributionError("UNSUPPORTED", message=message, headers={"Allow": "GET, HEAD"})
        return await handler(request)

    return middleware
