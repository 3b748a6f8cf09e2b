"""The caller of a request: an opaque name of its token, by which clients are told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clowder_aimage.http.local_request import Request

# The owner of what is stored at a server without tokens
ANYONE = ""


def compute_name(text: str) -> str:
    """Return the name of a token or an address, from which it cannot be computed."""
    # Bytes of a header that are not UTF-8 are halves of surrogate pairs
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def identify_owner(request: Request) -> str:
    """Return the owner of the files of a request: its token's, or ANYONE without tokens."""
    owner: str = request.get("owner", ANYONE)
    return owner


def identify_caller(request: Request) -> str:
    """Return the name of a client: of its token, else of its address."""
    if "caller" in request:
        return str(request["caller"])
    return identify_owner(request) or compute_name(f"@{getattr(request, 'remote', '')}")


def find_owner_scope(tokens: Mapping[str, str], owner: str, scope: str) -> str | None:
    """Return the scope that an owner has now, or None if its token is not valid any more.

    At a server without tokens it is ``scope``.
    """
    if not tokens:
        return scope
    scopes = (scope for token, scope in tokens.items() if compute_name(token) == owner)
    return next(scopes, None)
