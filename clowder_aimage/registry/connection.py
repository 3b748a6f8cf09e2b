"""How to reach a registry, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
DOCKER_HUB_KEY = "https://index.docker.io/v1/"


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


def config_key(registry: str) -> str:
    """What docker's config calls a registry: its host, but for Docker Hub."""
    return DOCKER_HUB_KEY if registry in DOCKER_HUB else registry
