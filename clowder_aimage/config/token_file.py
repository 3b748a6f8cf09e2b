"""Files of tokens: a scope and a token in each line, for servers and for their clients."""

from __future__ import annotations

import stat
from collections.abc import Collection
from pathlib import Path

from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.errors import UsageError

ADMIN, INFER, NODE, READ, WRITE = "admin", "infer", "node", "read", "write"
# The scopes that tokens of a worker, a node or a gateway may have, and those of a registry
WORKER_SCOPES = (ADMIN, INFER, NODE)
REGISTRY_SCOPES = (READ, WRITE, ADMIN)
MIN_TOKEN = 16  # characters
_ALL = {*WORKER_SCOPES, *REGISTRY_SCOPES}


def read_tokens(path: Path, scopes: Collection[str] = WORKER_SCOPES) -> dict[str, str]:
    """Return the tokens in a file with the scope of each.

    Raises UsageError if there is none, and as ``parse_tokens``.
    """
    tokens = parse_tokens(path, scopes)
    if not tokens:
        raise UsageError(f"no token in {path}", hint=_describe_format(scopes))
    return tokens


def parse_tokens(path: Path, scopes: Collection[str] = WORKER_SCOPES) -> dict[str, str]:
    """Return the tokens in a file, or none, with the scope of each, which is one of ``scopes``.

    A line is ``SCOPE TOKEN``. Empty lines and lines that begin with ``#`` are skipped. Raises
    UsageError, which names the line and contains no part of it.
    """
    tokens: dict[str, str] = {}
    for number, line in enumerate(_read_lines(path), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if fault := _find_fault(words, scopes):
            message = f"invalid token in line {number} of {path}: {fault}"
            raise UsageError(message, hint=_describe_format(scopes))
        scope, token = words
        if tokens.setdefault(token, scope) != scope:
            raise UsageError(f"the token in line {number} of {path} has two scopes")
    return tokens


def read_client_token(path: Path) -> str:
    """Return the first token in a file of any server. Raises UsageError."""
    return next(iter(read_tokens(path, sorted(_ALL))))


def _find_fault(words: list[str], scopes: Collection[str]) -> str | None:
    """Return the fault of a line, without any of its words, as they may be secret."""
    before, colon, _ = words[0].partition(":")
    if colon and before.lower() in _ALL:
        return "a space separates the scope and the token, not ':'"
    if len(words) == 1:
        return "it has no scope, or no token"
    if len(words) > 2:
        return "it has more than a scope and a token"
    scope, token = words
    if scope not in scopes:
        return f"this server has no scope {scope!r}" if scope in _ALL else "its scope is unknown"
    return None if _is_token(token) else "the token is too short, or has characters beyond ASCII"


def _describe_format(scopes: Collection[str]) -> str:
    lines = [f"'{scope} TOKEN'" for scope in scopes]
    return (
        f"expected lines {', '.join(lines[:-1])} or {lines[-1]}, with a token of {MIN_TOKEN} or "
        "more letters and digits, for example from: openssl rand -hex 32"
    )


def _read_lines(path: Path) -> list[str]:
    try:
        if path.stat().st_mode & stat.S_IROTH:
            import logging

            log = logging.getLogger("aimage.http")
            log.warning("all users can read the file of tokens", extra={"path": str(path)})
        return recode_file(path.read_bytes()).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not text"
        raise UsageError(f"cannot read the tokens in {path}: {reason}") from None


def _is_token(text: str) -> bool:
    return len(text) >= MIN_TOKEN and text.isascii() and text.isprintable()
