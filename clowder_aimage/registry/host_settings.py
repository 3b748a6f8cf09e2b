"""Local settings for single registries: configuration, ``certs.d``, refused dialects."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import write_file
from clowder_aimage.content.unit import parse_size
from clowder_aimage.document.optional_file import read_optional
from clowder_aimage.document.schema import read_configuration
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Reference, read_json

# The entry of "registries" that names the default registry.
DEFAULT = "default"
# Seconds. Afterwards the usual order is tried again: registries are upgraded.
_LIFE = 30 * 24 * 3600.0
_MIN_CHUNK = 1024 * 1024  # bytes
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The configuration of one host (schemas/config.schema.json).

    ``mirrors`` are hosts, or hosts with a path that is prepended to the repository. ``plain_http``
    is None if not configured. ``connections`` is the number of simultaneous ones, ``limit`` the
    bytes per second of a pull, ``chunk_size`` the bytes of a blob in one request; each is 0 if not
    configured. ``trusted_hosts`` are internal hosts that the registry may lead to.
    """

    mirrors: tuple[str, ...] = ()
    trust_tags: bool = False
    plain_http: bool | None = None
    insecure: bool = False
    ca_file: Path | None = None
    connections: int = 0
    limit: int = 0
    chunk_size: int = 0
    trusted_hosts: frozenset[str] = frozenset()


def read_settings(
    path: Path | None, *, is_optional: bool = False
) -> tuple[dict[str, HostSettings], str]:
    """Return a configuration's settings by host, and its default registry.

    They are empty without a file. Raises UsageError. ``is_optional``: see read_configuration.
    """
    directory = path.parent if path else Path()

    def parse(document: dict[str, Any]) -> tuple[dict[str, HostSettings], str]:
        registries = dict(document.get("registries", {}))
        default: str = registries.pop(DEFAULT, "")
        if default and Reference.parse(f"{default}/x").registry is None:
            raise ValueError(f"registries.{DEFAULT}: {default} is not a host, or HOST/PATH")
        hosts = {host: _parse_settings(directory, entry) for host, entry in registries.items()}
        return hosts, default

    return read_configuration(path, parse, is_optional=is_optional)


def _parse_settings(directory: Path, entry: dict[str, Any]) -> HostSettings:
    ca_file = entry.get("caFile")
    return HostSettings(
        mirrors=tuple(entry.get("mirrors", ())),
        trust_tags=entry.get("trustTags", False),
        plain_http=entry.get("plainHttp"),
        insecure=entry.get("insecure", False),
        ca_file=directory / ca_file if ca_file else None,
        connections=entry.get("jobs", 0),
        trusted_hosts=frozenset(host.lower() for host in entry.get("trustedHosts", ())),
        limit=parse_rate(entry["limitRate"]) if "limitRate" in entry else 0,
        chunk_size=_chunk_size(entry["chunkSize"]) if "chunkSize" in entry else 0,
    )


def _chunk_size(value: int | str) -> int:
    size = value if isinstance(value, int) else parse_size(value)
    if size < _MIN_CHUNK:
        raise ValueError(f"chunkSize {value!r} is smaller than 1 MiB")
    return size


def parse_rate(text: str) -> int:
    """Parse bytes per second: 500k, 20M, 1.5G (powers of 1000), KiB, MiB, GiB (of 1024).

    Raises ValueError: it is not a rate, or less than a byte per second.
    """
    try:
        count = parse_size(text.lower().removesuffix("/s"))
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"invalid rate {text!r}: expected a value such as 500k, 20M or 1.5GiB")
    return count


def list_certificates(directories: tuple[Path, ...], host: str) -> list[Path]:
    """Return the files for ``host`` (with its port) in the first directory that has any.

    Sources: docker, "Verify repository client with certificates"; containers-certs.d(5).
    A ``*.crt`` is an authority; ``x.cert`` and ``x.key`` are a client's.
    """
    for directory in directories:
        # It may be missing, or not readable by this user.
        with contextlib.suppress(OSError):
            if files := sorted((directory / host).iterdir()):
                return files
    return []


class DialectCache:
    """A file with the dialects that hosts refused, so that a push does not try them first.

    An unreadable file counts as absent; write errors (or a missing ``path``) are ignored. Of two
    concurrent writers, the last one wins.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock

    def list_refused(self, host: str) -> frozenset[str]:
        """Return the dialects that ``host`` refused within the last 30 days."""
        return frozenset(self._read().get(host, {}))

    def record(self, host: str, refused: Collection[str], accepted: str) -> None:
        """Store that ``host`` refused some dialects, and then accepted another."""
        hosts = self._read()
        old = hosts.get(host, {})
        if not refused and accepted not in old:
            return
        timestamp = int(self._clock())
        new = {name: refused_at for name, refused_at in old.items() if name != accepted}
        self._write(hosts | {host: new | dict.fromkeys(refused, timestamp)})

    def remove(self, host: str) -> None:
        """Remove the entry of ``host``."""
        hosts = self._read()
        if hosts.pop(host, None) is not None:
            self._write(hosts)

    def _read(self) -> dict[str, dict[str, float]]:
        """Return the refused dialects with their times by host."""
        return read_optional(self._path, self._parse) or {}

    def _parse(self, raw: bytes) -> dict[str, dict[str, float]]:
        hosts = read_json(raw, "it")
        try:
            return {
                host: self._drop_old(entry["refused"])
                for host, entry in hosts["registries"].items()
            }
        except _DAMAGED:
            raise FormatError("it is not a list of refused dialects") from None

    def _drop_old(self, refused: dict[str, Any]) -> dict[str, float]:
        timestamp = self._clock()
        return {
            name: refused_at
            for name, refused_at in refused.items()
            if 0 <= timestamp - refused_at < _LIFE
        }

    def _write(self, refusals: dict[str, dict[str, float]]) -> None:
        if self._path is None:
            return
        hosts = {host: {"refused": entry} for host, entry in refusals.items() if entry}
        data = json.dumps({"registries": hosts}, indent=1) + "\n"
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, data.encode(), durable=False)
