"""The settings that sign pictures: ``picture.signing`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SigningSettings:
    """The certificates and the key of a signer of pictures.

    chain: a file of certificates in PEM, that of the signer first. key: a file of its private key
    in PEM; or command: a program that signs its standard input, which keeps the key elsewhere.
    timestamp: the URL of a time stamp server (RFC 3161); needs_timestamp: refuse a picture without
    its time stamp.
    """

    chain: str
    key: str | None = None
    command: tuple[str, ...] = ()
    timestamp: str | None = None
    needs_timestamp: bool = False

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> SigningSettings:
        """Return the settings that ``dataclasses.asdict`` has made of some."""
        return cls(**{**fields, "command": tuple(fields["command"])})


def parse_signing(document: Mapping[str, Any], file: Path | None) -> SigningSettings | None:
    """Return the settings in a configuration, which its schema has checked; None without.

    Paths are relative to the directory of the configuration's ``file``.
    """
    section = document.get("picture", {}).get("signing")
    if section is None:
        return None
    directory = file.parent if file is not None else Path()

    def resolve(name: str) -> str | None:
        path = section.get(name)
        return None if path is None else str((directory / Path(path).expanduser()).absolute())

    return SigningSettings(
        chain=resolve("chain") or "",
        key=resolve("key"),
        command=tuple(section.get("command", ())),
        timestamp=section.get("timestamp"),
        needs_timestamp=bool(section.get("requireTimestamp")),
    )
