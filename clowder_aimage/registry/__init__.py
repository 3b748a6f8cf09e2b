"""The distribution client (OCI distribution-spec 1.1); importing it imports urllib3."""

from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.host_settings import DialectCache
from clowder_aimage.registry.listing import is_generated, list_repositories
from clowder_aimage.registry.mount import MountHolders, MountOrigins
from clowder_aimage.registry.referrers import UnlistedReferrerError
from clowder_aimage.registry.repository import Repository

__all__ = [
    "ClientOptions",
    "DialectCache",
    "MountHolders",
    "MountOrigins",
    "Repository",
    "UnlistedReferrerError",
    "is_generated",
    "list_repositories",
]
