"""A registry's response, and the errors for unexpected ones (distribution-spec, "Error Codes")."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from clowder_aimage.content.timed_response import OverdueError, TimedResponse
from clowder_aimage.errors import (
    AImageError,
    ManifestRefusedError,
    NetworkError,
    NotFoundError,
    RegistryError,
    UnauthorizedError,
    VerificationError,
)
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Reference, mediatype, read_json
from clowder_aimage.registry.content_coding import BodyDecoder, is_supported, parse_coding
from clowder_aimage.registry.credential_trace import CredentialTrace
from clowder_aimage.registry.overload import OVERLOAD_STATUS
from clowder_aimage.registry.retry import BrokenOffError, IntermediaryError
from clowder_aimage.registry.trace import parse_body_size, redact_url

# Bytes of a body that is read only to keep its connection.
_MAX_IGNORED_SIZE = 64 * 1024
_IGNORED_TIME = 5.0  # seconds for it
# The least bytes per second of a document.
RATE = 64 * 1024
# Bytes of a chunked blob that arrive within the connection's timeout.
_CHUNKED = 64 * 1024
_MAX_ERROR_BODY = 64 * 1024
# Seconds, for a caller that tries again later. The message has the time that was sent.
_MAX_RETRY_AFTER = 3600.0
# Harbor's word for a read-only cache of another registry.
_PROXY_PROJECT = "proxy project"
# Messages of registries whose tags cannot be moved.
_IMMUTABLE = r"(?i)immutab|overwrit"
_UNDELETABLE = "the tag is immutable: a rule of the registry forbids its deletion"
# Words of services that limit requests by 403.
_LIMITED = re.compile(r"rate.?limit|too.?many.?requests", re.IGNORECASE)
# The message of DENIED in the specification, for an account without permission.
_DENIED = "requested access to the resource is denied"
_NO_PROJECT = "create the project in the registry first, or check its name"
_NO_REPOSITORY = "the repository may have to be created in the registry first; check its name"
_NO_BLOB = (
    "the registry has the manifest, but not this blob: its operator may restore it, or somebody "
    "who has the model may push it again"
)
_CHECK_NAME = "check the spelling of the name and the tag"
_NO_PERMISSION = "the account may lack permission, or the repository may not exist"
# A media type, or a word for one: in the body of a refusal, any part of the manifest may be meant.
_TYPE = re.compile(
    rb"application(?:/|\\/|%2F)vnd\.|media[ _-]?type|artifact[ _-]?type|config[ _-]?type",
    re.IGNORECASE,
)
# Answers to a manifest that do not refuse its kind, though they may name its descriptors.
_OTHER_CODES = frozenset(
    {
        *("MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "DIGEST_INVALID", "SIZE_INVALID"),
        *("NAME_INVALID", "NAME_UNKNOWN", "TAG_INVALID", "UNAUTHORIZED", "TOOMANYREQUESTS"),
        *("QUOTAEXCEEDED", "PROJECTPOLICYVIOLATION", "MANIFEST_UNKNOWN", "PRECONDITION"),
    }
)
_OTHER_STATUS = frozenset({401, 408, 429, 502, 503, 504, 507})
_EXPECTS_HTTPS = re.compile(r"HTTP request (?:was sent )?to (?:an )?HTTPS", re.IGNORECASE)
_MAX_LINE = 200  # characters
# Hints by patterns of messages: Harbor's, by its documentation.
_HINTS = (
    (r"project \S+ not found", _NO_PROJECT),
    (_PROXY_PROJECT, "push to another project; this one is a cache of another registry"),
    (r"will exceed the configured upper limit|quota", "the project exceeds its storage quota"),
    (r"read.only mode", "the registry is in read-only mode"),
    (_IMMUTABLE, "push another tag; this one is immutable"),
    (r"due to configured policy|POLICYVIOLATION", "a policy of the project denied it"),
    # Google Artifact Registry: GOOGLE_MANIFEST_DANGLING_TAG.
    (r"still referenced by .*tag", "delete its tags first"),
)


class OversizeError(VerificationError):
    """A body is larger than its limit."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class RegistryResponse:
    """Status, headers and the unread body of a response from ``url``.

    ``credentials`` is the record of those for the request.
    """

    status_code: int
    url: str
    headers: Mapping[str, str]
    raw: urllib3.BaseHTTPResponse
    is_redirected: bool = False
    method: str = "GET"
    credentials: CredentialTrace | None = None
    decoder: BodyDecoder | None = None
    # The words that name the proxy, which may have answered in place of the registry.
    way: str = ""
    # The seconds that the registry asks to wait, by the clock of the session.
    retry_after: float = 0.0

    @property
    def is_open(self) -> bool:
        """True while the body arrives."""
        return self.raw.connection is not None and not self.raw.closed

    @property
    def host(self) -> str:
        """The host and port of the sender."""
        return urlsplit(self.url).netloc.rpartition("@")[2] or "the registry"

    @property
    def is_success(self) -> bool:
        """True for a status of success (2xx); web pages, which no registry sends, are excluded."""
        return 200 <= self.status_code < 300 and not self.is_page

    @property
    def is_page(self) -> bool:
        """True for a web page."""
        return self.media_type == "text/html"

    @property
    def media_type(self) -> str:
        """The type of the body without parameters, in lower case (RFC 9110, 8.3.1)."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def coding(self) -> str:
        """The compression of the body; an empty text for none."""
        return parse_coding(self.headers)

    @property
    def is_text(self) -> bool:
        """True for a text, such as a message of a proxy."""
        return self.media_type.startswith("text/")

    @property
    def size(self) -> int | None:
        """The size of the content, as declared; None if the body is compressed."""
        return None if self.coding else parse_body_size(self.headers)

    def decode(self) -> None:
        """Let the body be read decompressed, if it is compressed. Raises VerificationError."""
        coding = self.coding
        if coding and not is_supported(coding):
            self.close()
            raise VerificationError(
                f"{self.host} sent an unexpected {coding[:20]} body",
                hint="no request accepts compressed bodies: a proxy in front of the registry "
                "should not compress them",
            )
        if coding and self.decoder is None:
            self.decoder = BodyDecoder(self._receive)

    def read(self, limit: int, rate: int = RATE) -> bytes:
        """Read the whole body, at most ``limit`` bytes, and close.

        The time for it is the connection's timeout and the time for ``limit`` bytes at ``rate``.
        A compressed body is decompressed. Raises BrokenOffError, NetworkError if it takes longer,
        OversizeError if it is larger, or VerificationError for an unknown compression.
        """
        try:
            self.decode()
            source = BodyDecoder(self.raw.read) if self.coding else self.raw
            data, body = bytearray(), self._body
            if isinstance(body, TimedResponse):
                body.allow(body.timeout + limit / rate)
            while block := source.read(min(limit + 1 - len(data), 1 << 16)):
                data += block
                if len(data) > limit:
                    raise OversizeError(f"the response of {self.host} exceeds {limit} bytes")
            return bytes(data)
        except (OSError, HTTPError, ValueError) as error:
            if is_overdue(error):
                raise build_timeout_error(self.host) from error
            message = f"the response of {self.host} ended early{_describe_ending(error)}"
            raise BrokenOffError(message) from error
        finally:
            self.raw.close()

    def readinto(self, view: memoryview) -> int:
        """Read from the socket into ``view``, avoiding the copy in urllib3's own method.

        After the connection's timeout, return the bytes that arrived; after ``decode``, they are
        decompressed. Raises OSError, ValueError, HTTPError or http.client.HTTPException.
        """
        if self.decoder is None:
            return self._receive_into(view)
        data = self.decoder.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _receive(self, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self._receive_into(memoryview(buffer))])

    def _receive_into(self, view: memoryview) -> int:
        body = self._body
        if isinstance(body, TimedResponse):
            view = view[:_CHUNKED] if body.chunked else view
            body.allow(body.timeout, is_partial=not body.chunked)
        return int(body.readinto(view))

    @property
    def _body(self) -> Any:
        """The response of http.client, as kept by transport.py, or that of urllib3."""
        body = getattr(self.raw.connection, "response", None)
        return body if isinstance(body, TimedResponse) else self.raw

    def release(self) -> None:
        """Return the connection to the pool if the body was read to its end, else close it."""
        if self._body.isclosed():
            self.raw.release_conn()
        else:
            self.raw.close()

    def finish(self) -> None:
        """Read a short remainder of the body, so that the connection can be used again."""
        with contextlib.suppress(OSError, HTTPError):
            if isinstance(body := self._body, TimedResponse):
                body.allow(_IGNORED_TIME)
            self.raw.read(_MAX_IGNORED_SIZE)
            if not self.raw.read(1):
                self.raw.release_conn()
                return
        self.raw.close()

    def close(self) -> None:
        """Close the connection."""
        self.raw.close()


def _describe_ending(error: Exception) -> str:
    """Return the offset at the end of a broken body, or the error."""
    cause = error.__cause__
    if not isinstance(cause, http.client.IncompleteRead):
        return f": {error}"
    # It is a number in urllib3's subclass.
    partial: Any = cause.partial
    count = partial if isinstance(partial, int) else len(partial)
    return f", after {count} bytes" + (f" of {count + cause.expected}" if cause.expected else "")


def is_overdue(error: BaseException) -> bool:
    """Return True if ``error`` was caused by the deadline of a response."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OverdueError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def build_timeout_error(host: str) -> NetworkError:
    """Return the error for a response that did not arrive in time; it is not transient."""
    return NetworkError(
        f"{host} does not answer in time",
        hint="its response arrives too slowly; try again later",
    )


@dataclass(frozen=True, slots=True)
class ResponseFailure:
    """The status of an error response, and the first error in its body.

    ``line`` is the first line of a body in another format, without the tags of HTML; ``server`` is
    the header of that name. ``names_type`` is true if the body names a media type, in any format.
    """

    host: str
    status: int
    code: str
    message: str
    detail: str
    retry_after: float = 0.0
    line: str = ""
    server: str = ""
    method: str = "GET"
    names_type: bool = False
    credentials: CredentialTrace | None = None
    way: str = ""

    @classmethod
    def of_head(cls, response: RegistryResponse) -> ResponseFailure:
        """Describe an error response without its body."""
        host, status, trace = response.host, response.status_code, response.credentials
        return cls(host, status, "", "", "", method=response.method, credentials=trace)

    @classmethod
    def of(cls, response: RegistryResponse) -> ResponseFailure:
        """Read an error response with any body."""
        host, status, trace = response.host, response.status_code, response.credentials
        after = response.retry_after
        line, method, names_type = "", response.method, False
        try:
            body = response.read(_MAX_ERROR_BODY)
            # The body of a redirect's target may contain a signed URL.
            line = "" if response.is_redirected else _extract_first_line(body)
            if 300 <= status < 400 and (location := response.headers.get("Location")):
                line = f"a redirect to {redact_url(location)[:_MAX_LINE]}"
            names_type = _TYPE.search(body) is not None
            errors = read_json(body, "it")["errors"]
            # Distribution 2.8 puts UNKNOWN before the reason when a layer has urls.
            error = next((e for e in errors if e.get("code") != "UNKNOWN"), errors[0])
            detail = error.get("detail") or ""
            text = detail if isinstance(detail, str) else json.dumps(detail)
            code, message = str(error.get("code", "")), str(error.get("message", ""))
            line, server = "", ""
            fields = (code[:60], message[:300], text[:500])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, AImageError):
            fields, server = ("", "", ""), response.headers.get("Server", "")
        return cls(
            host, status, *fields, after, line, server, method, names_type, trace, response.way
        )

    @property
    def text(self) -> str:
        """Status, code and message in one line."""
        return f"{self.status} {self.code} {self.message}".strip()

    @property
    def suffix(self) -> str:
        """The end of a message: the proxy, if any, and the first line of the body."""
        return self.way + (f": {self.line}" if self.line else "")

    def build_advice(self, *, remedy: str = "", hint: str | None = None) -> dict[str, Any]:
        """Return a remedy or else a hint, with the attempts with credentials."""
        if self.credentials is None:
            return {"remedy": remedy, "hint": hint, "registry": self.host}
        return self.credentials.build_advice(remedy=remedy, hint=hint)

    @property
    def is_overload(self) -> bool:
        """True if the registry limits requests, or has too many."""
        is_limited = self.status == 403 and _LIMITED.search(f"{self.text} {self.line}") is not None
        return self.status in OVERLOAD_STATUS or self.retry_after > 0 or is_limited

    @property
    def is_too_large(self) -> bool:
        """True if the request's body was too large."""
        return self.status == 413 or "too large" in self.detail.lower()

    @property
    def hint(self) -> str | None:
        """The advice for a known message."""
        if self.method == "DELETE" and re.search(_IMMUTABLE, self.text):
            return _UNDELETABLE
        return next((text for pattern, text in _HINTS if re.search(pattern, self.text)), None)

    @property
    def has_other_reason(self) -> bool:
        """True if the reason for refusing a manifest is known, and is not its kind."""
        is_known = self.code in _OTHER_CODES or self.status in _OTHER_STATUS
        return is_known or self.hint is not None or _DENIED in self.message

    @property
    def is_missing(self) -> bool:
        """Return True if the content, or the repository to write to, does not exist."""
        is_write = self.method in ("PUT", "PATCH")
        is_named = self.code == "NAME_UNKNOWN" or self.hint is not None
        return self.status == 404 and (is_named or not is_write)

    @property
    def refuses_kind(self) -> bool:
        """True if this kind of manifest is refused, but another dialect may be accepted.

        By distribution, Harbor, zot, Quay, ECR and Artifactory: see docs/registries.md. Others
        answer with any status, and name a media type that they do not accept.
        """
        if self.status < 400 or self.is_too_large or self.has_other_reason:
            return False
        if self.status in (406, 415, 422) or self.names_type:
            return True
        if self.status == 403:
            return self.code == "DENIED" and "manifest class" in f"{self.message} {self.detail}"
        return self.code in ("MANIFEST_INVALID", "UNSUPPORTED")


def _extract_first_line(body: bytes) -> str:
    """Return the first line of text in a body, without the tags of HTML."""
    text = re.sub(r"<[^<>]*>", "", body.decode(errors="replace")).strip()
    return "".join(filter(str.isprintable, text.partition("\n")[0]))[:_MAX_LINE].strip()


def read_document(response: RegistryResponse, resource: str) -> bytes:
    """Read a JSON document, such as a manifest or a list.

    Raises IntermediaryError for other content, and the error of an unexpected status.
    """
    # 203: a proxy may have changed it. Digests are compared anyway.
    if response.status_code not in (200, 203):
        raise build_response_error(response, resource)
    raw = response.read(MAX_MANIFEST_SIZE)
    if raw.lstrip().startswith((b"{", b"[", b"null")):
        return raw
    line = "" if response.is_redirected else _extract_first_line(raw)
    page = ResponseFailure(
        response.host,
        response.status_code,
        *("", "", ""),
        line=line or "no JSON document",
        way=response.way,
    )
    raise build_failure_error(page, resource)


def read_media_type(response: RegistryResponse) -> str:
    """Return the media type of a manifest or an index; "" if the header has another one.

    It is a hint: documents state their own type.
    """
    media_type = response.media_type
    return media_type if media_type in mediatype.DOCUMENTS else ""


def build_manifest_error(response: RegistryResponse, resource: str) -> AImageError:
    """Return the error for a refused manifest: for its kind, its size, or another reason."""
    refusal = ResponseFailure.of(response)
    fields: dict[str, Any] = {
        "status": refusal.status,
        "code": refusal.code,
        "detail": refusal.detail,
    }
    if refusal.refuses_kind:
        return ManifestRefusedError(
            f"{refusal.host} rejected this type of manifest ({refusal.text}){refusal.suffix}",
            **fields,
        )
    if refusal.is_too_large:
        return RegistryError(
            f"{refusal.host} refused {resource} as too large ({refusal.text} {refusal.detail})"
            f"{refusal.suffix}",
            hint="registries accept manifests of up to 4 MiB; pack the model into fewer layers",
            **fields,
        )
    error = build_failure_error(refusal, resource)
    if not refusal.has_other_reason and error.hint in (None, _NO_PERMISSION):
        # The reason may be the kind of the manifest.
        error.facts["manifest"] = resource
    return error


def build_deletion_error(
    response: RegistryResponse, reference: Reference, digest: str
) -> AImageError:
    """Return the error for a refused deletion. Many registries do not support deletion of tags."""
    refusal = ResponseFailure.of(response)
    is_tag = reference.digest is None
    is_unsupported = refusal.status in (405, 501) or refusal.code == "UNSUPPORTED"
    if not is_unsupported and not (is_tag and refusal.status in (400, 404)):
        return build_failure_error(refusal, f"the deletion of {reference}")
    fields: dict[str, Any] = {
        "status": refusal.status,
        "code": refusal.code,
        "detail": refusal.detail,
    }
    if is_tag:
        fields |= {"remedy": "delete_manifest", "name": reference.name, "digest": digest}
    return RegistryError(
        f"{refusal.host} does not support the deletion of {'tags' if is_tag else 'manifests'} "
        f"({refusal.text}){refusal.suffix}",
        hint="deletion may have to be enabled in the registry's configuration",
        **fields,
    )


def build_response_error(response: RegistryResponse, resource: str) -> AImageError:
    """Return the error for an unexpected response; ``resource`` names the request's object."""
    return build_failure_error(ResponseFailure.of(response), resource)


def build_failure_error(refusal: ResponseFailure, resource: str) -> AImageError:
    """Return the error for an unexpected response that was read."""
    hint = refusal.hint
    if "AirTunes/" in refusal.server:
        return RegistryError(
            f"{refusal.host} is the AirPlay receiver of macOS, not a registry ({refusal.text})",
            hint="use another port, or turn off the AirPlay receiver in the system settings",
            status=refusal.status,
        )
    if refusal.status == 401:
        return UnauthorizedError(
            f"{refusal.host} requires valid credentials for {resource} ({refusal.text})"
            f"{refusal.suffix}",
            reason=refusal.text,
            **refusal.build_advice(remedy="" if hint else "login", hint=hint),
        )
    # With another hint, the account has access.
    if refusal.status == 403 and hint in (None, _NO_PROJECT) and not refusal.is_overload:
        return UnauthorizedError(
            f"{refusal.host} denied access to {resource} ({refusal.text}){refusal.suffix}",
            reason=refusal.text,
            **refusal.build_advice(hint=hint or _NO_PERMISSION),
        )
    if refusal.is_missing:
        return NotFoundError(
            f"{resource} not found at {refusal.host} ({refusal.text}){refusal.suffix}",
            **refusal.build_advice(hint=hint or _choose_missing_hint(refusal, resource)),
        )
    if refusal.status < 400:
        return IntermediaryError(
            f"{refusal.host} answered {refusal.status} "
            f"{http.client.responses.get(refusal.status, '')} for {resource}{refusal.suffix}",
            hint="a proxy or load balancer may have answered in place of the registry",
            status=refusal.status,
        )
    if refusal.is_overload:
        hint = _describe_overload(refusal)
    expects_https = refusal.status == 400 and _EXPECTS_HTTPS.search(refusal.line) is not None
    code = refusal.code or http.client.responses.get(refusal.status, "")
    reason = f": {refusal.message}" if refusal.message else ""
    return RegistryError(
        f"{refusal.host} answered {refusal.status} {code} for {resource}{reason}{refusal.suffix}",
        hint="the registry expects HTTPS" if expects_https else hint,
        remedy="https" if expects_https else "",
        status=refusal.status,
        code=refusal.code,
        detail=refusal.detail,
        retry_after=min(refusal.retry_after, _MAX_RETRY_AFTER),
    )


def _choose_missing_hint(refusal: ResponseFailure, resource: str) -> str:
    """Return the advice for a 404 without a known message."""
    if refusal.method not in ("GET", "HEAD", "DELETE"):
        return _NO_REPOSITORY
    return _NO_BLOB if resource.startswith("blob ") else _CHECK_NAME


def _describe_overload(refusal: ResponseFailure) -> str:
    """Return advice for a refusal of a registry that limits requests, or has too many."""
    count, unit = refusal.retry_after, "seconds"
    for size, larger in ((60, "minutes"), (60, "hours"), (24, "days")):
        if count < 2 * size:
            break
        count, unit = count / size, larger
    when = f"in {math.ceil(count)} {unit}" if count else "later"
    if refusal.status in (403, 429):
        return f"the registry limits requests; try again {when}, or with another account"
    return f"the registry is overloaded; try again {when}"
