"""Credentials that a caller gives for one pull."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field, replace
from pathlib import PosixPath
from typing import Any

from clowder_aimage.oci import Reference
from clowder_aimage.registry import Connection


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller gave for one pull: an entry of docker's config file ("Configuration files",
    ``auth`` or ``registrytoken``). It is in memory as long as the pull, and in no log."""

    entry: tuple[str, str] = field(repr=False)


class _Told(PosixPath):
    """A config file of docker's form that is in memory alone: ``auth_file`` of a connection."""

    said: str

    def read_text(self, *_: Any, **__: Any) -> str:
        return self.said


def connection_with(
    connection: Connection, reference: Reference, credentials: Credentials | None
) -> Connection:
    """The connection of one pull: with credentials of its own, they count before all others, for
    the one repository."""
    if credentials is None:
        return connection
    told = _Told(f"credentials-{secrets.token_hex(8)}")  # no two are equal
    name, value = credentials.entry
    told.said = json.dumps({"auths": {reference.name: {name: value}}})
    return replace(connection, auth_file=told)
