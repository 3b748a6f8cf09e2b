"""The distribution client (OCI distribution-spec 1.1). Importing this imports requests."""

from clowder_aimage.registry.connection import Connection
from clowder_aimage.registry.credential import login, logout
from clowder_aimage.registry.ladder import Ladder
from clowder_aimage.registry.mount import Holders, Origins
from clowder_aimage.registry.repository import Repository

__all__ = ["Connection", "Holders", "Ladder", "Origins", "Repository", "login", "logout"]
