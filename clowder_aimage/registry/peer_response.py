"""What another node answers, read with mistrust: bounded, and held against what it was asked."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import re
from dataclasses import dataclass
from typing import Any

from clowder_aimage.errors import FormatError, NetworkError, VerificationError
from clowder_aimage.oci.strict_json import read_json

# What a node may have done that none does by mistake alone
REDIRECT, CREDENTIALS, SIZE = "redirect", "credentials", "wrong size"
DIGEST, BYTES, NONSENSE, LATE = "wrong digest", "wrong bytes", "nonsense", "late"
REASONS = (REDIRECT, CREDENTIALS, SIZE, DIGEST, BYTES, NONSENSE, LATE)
# Why a node gives no range, in the words of its answer
NO_PART, NOT_HERE, UNKNOWN, ELSEWHERE = "no_part", "not_here", "unknown", "elsewhere"

ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")
_LARGEST = 16 * 1024  # bytes of an answer that is not a range
_MOST_HOLDERS = 16


class SilentError(NetworkError):
    """A node that did not answer, or whose answer broke off."""


class LateError(SilentError):
    """A node whose answer did not end in the time it had."""


class LiarError(VerificationError):
    """A node that answered what no honest one does; ``reason`` is one of REASONS."""

    def __init__(self, place: PeerAddress, reason: str, what: str) -> None:
        super().__init__(f"the neighbour {place} {what}")
        self.reason = reason


@dataclass(frozen=True, slots=True, order=True)
class PeerAddress:
    """Where a node listens."""

    host: str
    port: int
    is_secure: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_secure else 'http'}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Got:
    """A range, and its SHA-256, which the node has told and which is true."""

    data: bytearray
    digest: bytes


@dataclass(frozen=True, slots=True)
class Busy:
    """Not now: ``come`` bytes have come to the node so far, or others (``holders``, by id) have
    the range, whose SHA-256 is ``digest``."""

    holders: tuple[str, ...] = ()
    digest: bytes | None = None
    come: int = 0


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Not from this node, as others (``holders``, by id) have it from the registry, or soon will;
    they answer for it themselves."""

    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Without:
    """Not from this node; ``code`` says why."""

    code: str


def document(place: PeerAddress, response: http.client.HTTPResponse) -> dict[str, Any]:
    """What an answer that is not a range says; nothing where it is no JSON.

    Raises:
        LiarError: it redirects, wants other credentials, or goes on and on.
    """
    if 300 <= response.status < 400:
        raise LiarError(place, REDIRECT, "sends us elsewhere")
    if response.status in (401, 403, 407):
        raise LiarError(place, CREDENTIALS, "wants credentials that we do not have")
    raw = response.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise LiarError(place, NONSENSE, "says more than there is to say")
    if response.length:
        raise SilentError(f"the answer of the neighbour {place} broke off")
    try:
        value = read_json(raw, "the answer")
    except FormatError:
        value = None
    return value if isinstance(value, dict) else {}


def refusal(status: int, said: dict[str, Any]) -> Busy | Elsewhere | Without:
    """What an answer means that brings no range."""
    code, holders = said.get("code"), said.get("holders")
    named = [one for one in holders if isinstance(one, str)] if isinstance(holders, list) else []
    ids = tuple(one for one in named[:_MOST_HOLDERS] if ID.fullmatch(one))
    if status == 404 and code == ELSEWHERE:
        return Elsewhere(ids)
    if status != 503 or code != "busy":
        return Without(code if isinstance(code, str) and len(code) < 40 else "failed")
    digest, come = said.get("digest"), said.get("come")
    found = re.fullmatch(r"sha256:([0-9a-f]{64})", digest) if isinstance(digest, str) else None
    return Busy(
        ids if found else (),
        bytes.fromhex(found[1]) if found else None,
        come if type(come) is int and come >= 0 else 0,
    )


def body(
    place: PeerAddress, response: http.client.HTTPResponse, length: int, word: bytes | None
) -> Got:
    """The range, read in full, and found to be what it is said to be (RFC 9530, Content-Digest).

    Raises:
        LiarError: it is not.
    """
    headers = response.headers
    lengths = headers.get_all("Content-Length", [])
    coded = headers.get("Transfer-Encoding") or headers.get("Content-Encoding")
    if lengths != [str(length)] or coded:
        raise LiarError(place, SIZE, f"sends another length than {length} bytes")
    told = content_digest(headers.get_all("Content-Digest", []))
    if told is None or (word is not None and not hmac.compare_digest(told, word)):
        raise LiarError(place, DIGEST, "does not tell the digest of what it sends")
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        count = response.readinto(view[at:])
        if not count:
            raise SilentError(f"the answer of the neighbour {place} ended after {at} bytes")
        at += count
    response.read(1)  # nothing is left: the connection may serve again
    if hashlib.sha256(data).digest() != told:
        raise LiarError(place, DIGEST, "sends something else than it says")
    return Got(data, told)


def content_digest(values: list[str]) -> bytes | None:
    """The SHA-256 that Content-Digest headers tell; None where they tell none, or several
    (RFC 9530, 2)."""
    found = _DIGEST.fullmatch(values[0].strip()) if len(values) == 1 else None
    if found is None:
        return None
    try:
        return base64.b64decode(found[1], validate=True)
    except binascii.Error:
        return None


def content_digest_header(digest: bytes) -> str:
    """The same, to be sent."""
    return f"sha-256=:{base64.b64encode(digest).decode()}:"
