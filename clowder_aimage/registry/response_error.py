"""What a registry's answer means (distribution-spec, "Error Codes")."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import HTTPError

from clowder_aimage.errors import (
    AImageError,
    ManifestRefusedError,
    NotFoundError,
    RegistryError,
    UnauthorizedError,
    VerificationError,
)
from clowder_aimage.registry.retry import LONGEST_PAUSE, BrokenOffError, retry_after

_MAX_ERROR_BODY = 64 * 1024
_PATIENCE = 3600.0  # seconds that whoever tries again later may be asked to wait
_PROXY_PROJECT = "proxy project"  # Harbor: one that only keeps what it fetched elsewhere
_NO_PROJECT = "create the project in the registry first, or check its name"
_HINTS = (  # what a registry's words mean for the user: Harbor's, by its documentation
    (r"project \S+ not found", _NO_PROJECT),
    (_PROXY_PROJECT, "push to another project: this one only keeps what it fetched elsewhere"),
    (r"will exceed the configured upper limit|quota", "the project's storage quota is used up"),
    (r"read.only mode", "whoever administers the registry let it take nothing for now"),
    (r"immutable", "push under another tag: this one may not be changed there"),
    (r"due to configured policy|POLICYVIOLATION", "ask who administers the project's policy"),
)


def read_capped(response: requests.Response, limit: int) -> bytes:
    """The body of an answer that must be small, as it came over the wire.

    Raises:
        VerificationError: it is larger than ``limit`` bytes, or comes compressed, which we never
            ask for and which could unpack to anything.
        BrokenOffError: it broke off.
    """
    try:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            host = _host(response)
            raise VerificationError(f"{host} sent a {encoding[:20]} body we did not ask for")
        data = bytearray()
        while chunk := response.raw.read(min(limit + 1 - len(data), 1 << 16)):
            data += chunk
            if len(data) > limit:
                raise VerificationError(f"{_host(response)} sent more than {limit} bytes")
        return bytes(data)
    except (OSError, requests.RequestException, HTTPError) as error:
        raise BrokenOffError(f"the answer of {_host(response)} broke off: {error}") from error
    finally:
        response.close()


def finish(response: requests.Response) -> None:
    """Be done with an answer: read what little is left, so that its connection can be used again.

    Closing it unread would close the connection too.
    """
    try:
        response.raw.read(_MAX_ERROR_BODY)
        ended = not response.raw.read(1)
    except (OSError, HTTPError):
        ended = False
    if ended:
        response.raw.release_conn()
    else:
        response.close()


@dataclass(frozen=True, slots=True)
class ResponseFailure:
    """What an error answer says: the status, and the first error in its body."""

    host: str
    status: int
    code: str
    message: str
    detail: str
    retry_after: float = 0.0

    @classmethod
    def of(cls, response: requests.Response) -> ResponseFailure:
        """Read an error answer, whatever its body is."""
        host, status = _host(response), response.status_code
        # in seconds; a date is for the session alone, which has a clock
        after = retry_after(response.headers.get("Retry-After", ""), math.inf, _PATIENCE)
        try:
            errors = json.loads(read_capped(response, _MAX_ERROR_BODY))["errors"]
            # distribution 2.8 puts UNKNOWN before the reason when a layer has urls
            error = next((e for e in errors if e.get("code") != "UNKNOWN"), errors[0])
            detail = error.get("detail") or ""
            text = detail if isinstance(detail, str) else json.dumps(detail)
            code, message = str(error.get("code", "")), str(error.get("message", ""))
            return cls(host, status, code[:60], message[:300], text[:500], after)
        except (
            ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, AImageError
        ):  # fmt: skip
            return cls(host, status, "", "", "", after)

    @property
    def said(self) -> str:
        return f"{self.status} {self.code} {self.message}".strip()

    @property
    def is_too_large(self) -> bool:
        return self.status == 413 or "too large" in self.detail.lower()

    @property
    def refuses_kind(self) -> bool:
        """Whether it is the kind of manifest that is refused, and another dialect may pass.

        Gathered from distribution, Harbor, zot, Quay, ECR and Artifactory: see docs/registries.md.
        """
        if self.is_too_large or self.code in ("MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN"):
            return False
        if _PROXY_PROJECT in self.message:
            return False
        if self.status == 400:
            return self.code == "MANIFEST_INVALID"
        if self.status == 403:
            return self.code == "DENIED" and "manifest class" in f"{self.message} {self.detail}"
        if self.status == 405:
            return self.code == "UNSUPPORTED"
        return self.status in (406, 415)


def failure(response: requests.Response, what: str) -> AImageError:
    """The error to raise for an answer that is not the one hoped for; ``what`` was asked."""
    return error_for(ResponseFailure.of(response), what)


def manifest_failure(response: requests.Response, what: str) -> AImageError:
    """The same for a manifest that was not taken: for its kind, its size, or another reason."""
    found = ResponseFailure.of(response)
    fields: dict[str, Any] = {"status": found.status, "code": found.code, "detail": found.detail}
    if found.refuses_kind:
        return ManifestRefusedError(
            f"{found.host} refuses this kind of manifest ({found.said})",
            hint="leave --no-fallback out, or push with --dialect container",
            **fields,
        )
    if found.is_too_large:
        return RegistryError(
            f"{found.host} finds the manifest of {what} too large ({found.said} {found.detail})",
            hint="registries take manifests of up to 4 MiB: pack the model into fewer layers",
            **fields,
        )
    return error_for(found, what)


def error_for(found: ResponseFailure, what: str) -> AImageError:
    """The error to raise for what a registry said to ``what``."""
    known = next((hint for pattern, hint in _HINTS if re.search(pattern, found.said)), None)
    if found.status == 401:
        return UnauthorizedError(
            f"{found.host} refuses {what} without (other) credentials ({found.said})",
            hint=known or f"log in with: aimage login {found.host}",
        )
    if found.status == 403 and known in (None, _NO_PROJECT):  # else not for want of a right
        return UnauthorizedError(
            f"{found.host} does not allow {what} ({found.said})",
            hint=known or "the account may lack the right, or the repository may not exist",
        )
    if found.status == 404:
        return NotFoundError(
            f"{found.host} {'knows nothing of' if what.startswith('the ') else 'has no'} {what} "
            f"({found.said})",
            hint=known or "check the name and the tag for typing errors",
        )
    if known is None and found.retry_after > LONGEST_PAUSE:
        known = f"it wants to be left alone for {found.retry_after:.0f} seconds: try again then"
    return RegistryError(
        f"{found.host} answered {found.said} to {what}",
        hint=known,
        status=found.status,
        code=found.code,
        detail=found.detail,
        retry_after=found.retry_after,
    )


def _host(response: requests.Response) -> str:
    return urlsplit(response.url).netloc.rpartition("@")[2] or "the registry"
