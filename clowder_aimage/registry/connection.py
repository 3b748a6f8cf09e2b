"""How to reach a registry, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Connection:
    """Options of a connection, and the places that outside state comes from.

    ``docker_config`` is the directory of docker's ``config.json``. ``trusted_realms`` are hosts
    that may be given a registry's credentials although they are not that registry.
    """

    plain_http: bool = False
    insecure: bool = False
    ca_file: Path | None = None
    docker_config: Path = field(default_factory=lambda: Path.home() / ".docker")
    trusted_realms: frozenset[str] = frozenset()
    pool_size: int = 8
    user_agent: str = "aimage"
