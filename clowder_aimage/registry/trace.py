"""Exchanges with registries for a trace, without secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

# Parameters of queries and headers that hold no secrets: only their values are shown.
_PARAMETERS = frozenset(
    {"artifactType", "account", "client_id", "digest", "from", "last", "mount", "n", "ns"}
    | {"scope", "service"}
)
_HEADERS = frozenset(
    """accept accept-encoding accept-ranges age allow cache-control connection content-encoding
    content-length content-range content-type date docker-content-digest
    docker-distribution-api-version docker-upload-uuid etag expires host if-range keep-alive
    last-modified oci-filters-applied oci-subject range ratelimit-limit ratelimit-remaining
    ratelimit-reset retry-after server strict-transport-security transfer-encoding user-agent vary
    via www-authenticate x-content-type-options x-request-id""".split()
)
_HIDDEN = "..."


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A request and the head of its response. URLs and headers are without secrets.

    ``status`` is 0 without a response; ``error`` is then the reason. ``seconds`` is the time until
    the head arrived. ``sent`` and ``received`` are the sizes of the bodies in bytes, as declared;
    None if unknown.
    """

    method: str
    url: str
    status: int
    seconds: float
    sent: int | None = None
    received: int | None = None
    error: str = ""
    request_headers: Mapping[str, str] = field(default_factory=dict)
    response_headers: Mapping[str, str] = field(default_factory=dict)


OnTrace = Callable[[RequestTrace], None]


def redact_url(url: str) -> str:
    """Return a URL without a user, and without the values of most parameters of its query."""
    parts = urlsplit(url)
    query = re.sub(
        r"([^&=]*)=([^&]*)",
        lambda match: match[0] if match[1] in _PARAMETERS else f"{match[1]}={_HIDDEN}",
        parts.query,
    )
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query))


def redact_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers with the values of those that hold no secrets; of credentials, the scheme."""
    return {name: _redact_value(name.lower(), value) for name, value in headers.items()}


def _redact_value(name: str, value: str) -> str:
    if name in _HEADERS:
        return value
    if name == "location":
        return redact_url(value)
    if name == "link":
        return re.sub(r"<([^>]*)>", lambda match: f"<{redact_url(match[1])}>", value)
    if name == "authorization":
        return f"{value.partition(' ')[0]} {_HIDDEN}"
    return _HIDDEN


def parse_body_size(headers: Mapping[str, str]) -> int | None:
    """Return the declared size of a body in bytes."""
    value = headers.get("Content-Length", "")
    return int(value) if re.fullmatch(r"[0-9]{1,18}", value) else None
