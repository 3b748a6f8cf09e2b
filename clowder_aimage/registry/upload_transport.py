"""Requests of uploads outside of the registry's own origin, such as to a storage service.

They have connections of their own: one that a redirect has opened to an internal address is never
used for an upload.
"""

from __future__ import annotations

import threading

from clowder_aimage.errors import RegistryError
from clowder_aimage.registry.client_options import ClientOptions, open_pools
from clowder_aimage.registry.reach import UploadBoundary
from clowder_aimage.registry.transport import Transport


class UploadTransport:
    """The sender of uploads that ``registry``, at ``host``, leads elsewhere."""

    def __init__(self, connection: ClientOptions, host: str, registry: str) -> None:
        self._connection, self._host, self._registry = connection, host, registry
        trusted = connection.find_host_settings(registry).trusted_hosts
        self._boundary = UploadBoundary(registry, trusted)
        self._transport: Transport | None = None
        self._lock = threading.Lock()

    def check(self, scheme: str, host: str, port: int) -> None:
        """Check an origin before it is connected.

        Raises OutsideError if its name is internal, or RegistryError if it has no TLS.
        """
        self._boundary.check_origin(host, port)
        if scheme != "https" and host not in self._boundary.trusted:
            raise RegistryError(
                f"{self._registry} sends uploads to {host}:{port} without TLS",
                hint=f"the registry may be configured with another host or port than its own; if"
                f" that is intended, add {host} to trustedHosts of the registry in the"
                " configuration",
            )

    def open(self) -> Transport:
        """Return the transport; its connections are checked with the boundary of uploads."""
        with self._lock:
            if self._transport is None:
                pools = open_pools(self._connection, self._host, self._boundary)
                self._transport = Transport(
                    pools,
                    self._registry,
                    has_answered=True,
                    on_exchange=self._connection.on_exchange,
                )
            return self._transport

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            if self._transport is not None:
                self._transport.close()
