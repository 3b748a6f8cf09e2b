"""What files on this machine say about single registries: our own config, and ``certs.d``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage import schema
from clowder_aimage.content.unit import parse_size
from clowder_aimage.errors import FormatError, UsageError


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What our config file says about one host (schemas/config.schema.json).

    ``mirrors`` are hosts, or hosts with a path that goes in front of the repository there.
    ``jobs`` is how many connections it may see at once, ``limit`` how many bytes a second a pull
    may take, ``chunk_size`` how many bytes of a blob one request to it may carry; 0 where nothing
    is said.
    """

    mirrors: tuple[str, ...] = ()
    trust_tags: bool = False
    plain_http: bool = False
    insecure: bool = False
    ca_file: Path | None = None
    jobs: int = 0
    limit: int = 0
    chunk_size: int = 0


def read_settings(path: Path) -> dict[str, HostSettings]:
    """What a config file says about registries, by host; nothing where there is no file.

    Raises:
        UsageError: it cannot be read, or is not what its schema describes.
    """
    try:
        document = json.loads(path.read_bytes())
        schema.validate("config", document)
        registries = document.get("registries", {})
        return {host: _settings(path.parent, entry) for host, entry in registries.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError, FormatError) as error:
        raise UsageError(
            f"cannot use the configuration {path}: {error}", hint="see schemas/config.schema.json"
        ) from None


def _settings(directory: Path, entry: dict[str, Any]) -> HostSettings:
    named = entry.get("caFile")
    return HostSettings(
        mirrors=tuple(entry.get("mirrors", ())),
        trust_tags=entry.get("trustTags", False),
        plain_http=entry.get("plainHttp", False),
        insecure=entry.get("insecure", False),
        ca_file=directory / named if named else None,
        jobs=entry.get("jobs", 0),
        limit=parse_rate(entry["limitRate"]) if "limitRate" in entry else 0,
        chunk_size=entry.get("chunkSize", 0),
    )


def parse_rate(text: str) -> int:
    """Bytes per second: 500k, 20M, 1.5G in powers of 1000, KiB, MiB, GiB in powers of 1024.

    Raises:
        ValueError: it is no rate, or none that anything would move at.
    """
    try:
        count = parse_size(text.lower().removesuffix("/s"))
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"{text!r} is not a rate such as 500k, 20M or 1.5GiB")
    return count


@dataclass(frozen=True, slots=True)
class Certificates:
    """What ``certs.d`` has for one host: authorities, and pairs of certificate and key."""

    authorities: tuple[Path, ...] = ()
    pairs: tuple[tuple[Path, Path], ...] = ()


def certificates(directories: tuple[Path, ...], host: str) -> Certificates:
    """What the first of the ``directories`` that knows ``host`` (with its port) has for it.

    Sources: docker, "Verify repository client with certificates"; containers-certs.d(5).
    A ``*.crt`` is an authority; ``x.cert`` and ``x.key`` are a client's.
    """
    for directory in directories:
        try:
            found = sorted((directory / host).iterdir())
        except OSError:  # not there, or not for this user
            continue
        if found:
            return Certificates(
                tuple(path for path in found if path.suffix == ".crt"),
                tuple((path, path.with_suffix(".key")) for path in found if path.suffix == ".cert"),
            )
    return Certificates()
