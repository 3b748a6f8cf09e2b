"""What the headers of a request say of who asks: for the registry, and for the worker."""

from __future__ import annotations

import base64
from urllib.parse import urlsplit


def host_name(host: str) -> str | None:
    """The name in a ``Host`` header, without its port; None where there is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def origin_host(origin: str) -> str | None:
    """The host and port in an ``Origin`` header; None where it is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def shown_token(authorization: str) -> str:
    """The token in an ``Authorization`` header, as a bearer token or as a password; empty where
    there is none (RFC 6750, RFC 7617)."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
