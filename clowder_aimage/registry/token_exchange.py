"""The exchange of credentials for tokens, by oras-py's backend over the connections of a session.

oras-py makes the request and reads the token. ``registry/auth.py`` chooses the credentials, since
oras-py sends them to any realm. Requests are sent once, without redirects, with deadlines, and
responses are bounded. Identity tokens are exchanged here: oras-py does not have them.

Sources: distribution, "Token Authentication Specification" and "OAuth2 Token Authentication".
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import requests
from oras.auth import get_auth_backend
from oras.auth.utils import authHeader

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import read_json
from clowder_aimage.registry.docker_config import Credential
from clowder_aimage.registry.response import RegistryResponse, build_response_error
from clowder_aimage.registry.retry import TRANSIENT_STATUS

_MAX_TOKEN_RESPONSE = 1024 * 1024
# Its messages could contain secrets.
logging.getLogger("oras").setLevel(logging.CRITICAL + 1)
# Headers that oras-py adds, and that no service needs.
_OWN_HEADERS = ("Service", "User-Agent")
# Sends a method, URL, headers and body, and returns the response, without redirects.
SendOnce = Callable[[str, str, Mapping[str, str], Any], RegistryResponse]


class TokenExchange(requests.Session):
    """An exchange, with the status of the response and, after a 200, its fields."""

    def __init__(self, send: SendOnce) -> None:
        super().__init__()
        self.headers.clear()
        # .netrc has credentials of other programs.
        self.trust_env = False
        self.status, self.fields = 0, dict[str, Any]()
        self._send = send

    def send(self, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        """Send a request. Raises AImageError, also for a transient status."""
        headers = {key: text for key, text in request.headers.items() if key not in _OWN_HEADERS}
        sent = self._send(request.method or "GET", request.url or "", headers, request.body)
        if sent.status_code in TRANSIENT_STATUS:
            raise build_response_error(sent, "a request for a token")
        raw = sent.read(_MAX_TOKEN_RESPONSE)
        self.status, self.fields = (
            sent.status_code,
            _parse_object(raw) if sent.status_code == 200 else {},
        )
        response = requests.Response()
        response.status_code = self.status
        response.raw = io.BytesIO(json.dumps(self.fields).encode())
        return response

    def request_token(
        self, realm: str, service: str | None, scopes: Sequence[str], credential: Credential
    ) -> object:
        """Return a token of the service ``realm``. Raises ValueError if ``realm`` is not a URL."""
        if credential.identity_token:
            return self._refresh(realm, service, scopes, credential.identity_token)
        backend = get_auth_backend(session=self)
        if credential.basic:
            backend.set_basic_auth(*credential.pair)
        return backend.request_token(
            authHeader({"realm": realm, "service": service or None, "scope": list(scopes)})
        )

    def _refresh(
        self, realm: str, service: str | None, scopes: Sequence[str], identity_token: str
    ) -> object:
        """Request a token for an identity token, by POST, so that no URL contains it."""
        form = {
            "grant_type": "refresh_token",
            "service": service or "",
            "client_id": "aimage",
            "scope": " ".join(scopes),
            "refresh_token": identity_token,
        }
        self.post(realm, data=form)
        return self.fields.get("access_token") or self.fields.get("token")


def _parse_object(raw: bytes) -> dict[str, Any]:
    """Return a JSON object, an empty one for other content."""
    with contextlib.suppress(FormatError):
        value = read_json(raw, "it")
        if isinstance(value, dict):
            return value
    return {}
