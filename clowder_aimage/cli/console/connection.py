"""Options of a connection that are for one command only: secrets, addresses, a trace."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.output import (
    clean_line,
    clean_lines,
    format_event,
    format_size,
    wants_json,
)
from clowder_aimage.cli.console.remedy import REMEDIES
from clowder_aimage.errors import UsageError

if TYPE_CHECKING:
    from clowder_aimage.registry.credential_trace import CredentialEvent
    from clowder_aimage.registry.trace import RequestTrace

# A token of RFC 9110, 5.6.2.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Headers with an option of their own, and those that belong to the transport.
_RESERVED = {"authorization": "--username", "host": "--resolve"}
_INTERNAL = frozenset(
    """accept-encoding connection content-length cookie keep-alive proxy-authorization range te
    trailer transfer-encoding upgrade user-agent""".split()
)


def build_options(
    registries: Sequence[str | None],
    *,
    username: str | None,
    password: str | None,
    password_stdin: bool,
    headers: Sequence[str],
    resolve: Sequence[str],
    cert_file: str | None,
    key_file: str | None,
    verbose: int,
) -> dict[str, Any]:
    """Return the fields of ClientOptions for the options of one command. Raises UsageError."""
    secrets = {"--username": username, "--header": headers, "--cert-file": cert_file}
    stated = [option for option, value in secrets.items() if value]
    if stated and len(set(registries)) > 1:
        raise UsageError(
            f"{stated[0]} is for one registry, and the names are in {len(set(registries))}",
            hint="store the credentials of each: aimage login HOST",
        )
    if key_file and not cert_file:
        raise UsageError("--key-file requires --cert-file")
    if password_stdin and password is not None:
        raise UsageError("--password cannot be combined with --password-stdin")
    if password_stdin:
        password = sys.stdin.readline().rstrip("\r\n")
    fields: dict[str, Any] = {
        "basic_auth": _encode_basic_auth(username, password),
        "headers": dict(_parse_header(text) for text in headers),
        "addresses": dict(_parse_address(text) for text in resolve),
        "on_credential": CredentialPrinter(is_verbose=bool(verbose)),
    }
    if cert_file:
        fields["client_certificate"] = (Path(cert_file), Path(key_file) if key_file else None)
    if verbose:
        fields["on_exchange"] = Tracer(with_headers=verbose > 1)
    return fields


def _encode_basic_auth(username: str | None, password: str | None) -> str | None:
    if not username and password is None:
        return None
    if not username or not password:
        missing = "--password-stdin" if username else "--username"
        raise UsageError(f"a username and a password require each other: add {missing}")
    from clowder_aimage.registry.docker_config import encode_basic

    return encode_basic(username, password)


def _parse_header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or _NAME.fullmatch(name) is None:
        raise UsageError(f"invalid header {text[:60]!r}", hint="use NAME: VALUE")
    lower = name.lower()
    if lower in _RESERVED or lower in _INTERNAL:
        hint = f"use {_RESERVED[lower]}" if lower in _RESERVED else None
        raise UsageError(f"the header {name} cannot be set", hint=hint)
    value = value.strip()
    if not value.isprintable() or not value.isascii():
        raise UsageError(f"the value of the header {name} has characters other than ASCII")
    return name, value


def _parse_address(text: str) -> tuple[tuple[str, int], str]:
    host, _, target = text.partition(":")
    port, _, address = target.partition(":")
    if not host or not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"invalid address {text[:60]!r}",
            hint="use HOST:PORT:ADDRESS, such as registry.example.com:443:192.0.2.7",
        )
    return (host.lower(), int(port)), address.strip("[]")


class Tracer:
    """Prints a line for each request to stderr, with ``--json`` as an event. Thread-safe."""

    def __init__(self, *, with_headers: bool) -> None:
        self._with_headers = with_headers
        # Read here, in the main thread: click's context is not in others.
        self._as_json = wants_json()
        self._lock = threading.Lock()

    def __call__(self, exchange: RequestTrace) -> None:
        lines = self._format_event(exchange) if self._as_json else self._format_lines(exchange)
        with self._lock:
            sys.stderr.write(clean_lines(lines) + "\n")
            sys.stderr.flush()

    def _format_event(self, exchange: RequestTrace) -> str:
        headers = {
            "request": dict(exchange.request_headers),
            "response": dict(exchange.response_headers),
        }
        return format_event(
            "request",
            method=exchange.method,
            url=exchange.url,
            status=exchange.status,
            seconds=round(exchange.seconds, 4),
            sent=exchange.sent,
            received=exchange.received,
            **({"error": exchange.error} if exchange.error else {}),
            **({"headers": headers} if self._with_headers else {}),
        )

    def _format_lines(self, exchange: RequestTrace) -> str:
        status = str(exchange.status) if exchange.status else exchange.error
        parts = [exchange.method, exchange.url, status, f"{1000 * exchange.seconds:.0f} ms"]
        if exchange.sent:
            parts.append(f"{format_size(exchange.sent)} sent")
        if exchange.received:
            parts.append(format_size(exchange.received))
        lines = [" ".join(parts)]
        if self._with_headers:
            lines += [f"  > {name}: {value}" for name, value in exchange.request_headers.items()]
            lines += [f"  < {name}: {value}" for name, value in exchange.response_headers.items()]
        return "\n".join(lines)


class CredentialPrinter:
    """Prints warnings about credentials to stderr, each once; with ``-v`` all steps. Thread-safe.

    With ``--json`` they are events.
    """

    def __init__(self, *, is_verbose: bool) -> None:
        self._is_verbose, self._as_json = is_verbose, wants_json()
        self._lock = threading.Lock()
        self._printed: set[CredentialEvent] = set()

    def __call__(self, event: CredentialEvent) -> None:
        with self._lock:
            is_wanted = event.is_warning or self._is_verbose
            if is_wanted and event not in self._printed:
                self._printed.add(event)
                sys.stderr.write(f"{self._format(event)}\n")
                sys.stderr.flush()

    def _format(self, event: CredentialEvent) -> str:
        advice = REMEDIES[event.remedy].format(registry=event.registry) if event.remedy else ""
        if self._as_json:
            level = "warning" if event.is_warning else "credentials"
            fields = {"registry": event.registry, "place": event.place, "message": event.result}
            return format_event(level, **fields, **({"hint": advice} if advice else {}))
        prefix = "warning: " if event.is_warning else ""
        text = f"{prefix}credentials of {event.registry}: {event.place}: {event.result}"
        return "\n  ".join(clean_line(line) for line in (text, advice) if line)
