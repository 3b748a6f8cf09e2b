"""The connection pools of a session: one for each origin, direct or through a proxy."""

from __future__ import annotations

import os
import ssl
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3

from clowder_aimage.oci import Reference
from clowder_aimage.registry.connection import Addresses, set_pools
from clowder_aimage.registry.proxy import find_proxy
from clowder_aimage.registry.reach import Boundary

MAX_CONNECTIONS = 64
# Bytes of one write of a request's body; urllib3's default is 16 KiB.
_BLOCK_SIZE = 1024 * 1024
_ORIGINS = 4
# The authorities for all programs with requests or curl in them.
_BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class ConnectionPools(AbstractContextManager["ConnectionPools"]):
    """Pools whose connections have deadlines, and are checked with ``boundary``. Thread-safe.

    ``verify`` is False if certificates are not verified, or a file or directory of the only
    authorities. ``ca_bundle`` replaces the default ones, unless the environment names others.
    """

    def __init__(self, boundary: Boundary, addresses: Addresses, *, user_agent: str) -> None:
        self.boundary, self.user_agent = boundary, user_agent
        self.verify: bool | str = True
        self.ca_bundle: str | None = None
        self._addresses = addresses
        self._own: tuple[str, ssl.SSLContext] | None = None
        self._managers: dict[tuple[str, bool], Any] = {}
        self._lock = threading.Lock()

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_context(self, host: str, context: ssl.SSLContext) -> None:
        """Use a TLS context for the origin at ``host``, and for no other one."""
        self._own = f"https://{host}/".lower(), context

    def find_proxy(self, url: str) -> str:
        """Return the URL of the proxy for a request to ``url``, or "" for a direct connection.

        Without variables of the environment, macOS may have one in the settings of the system.
        Raises UsageError: a variable does not name a proxy.
        """
        proxy, parts = find_proxy(url, os.environ), urlsplit(url)
        has_settings = sys.platform.startswith("darwin")
        if proxy or not has_settings or Reference(parts.netloc, "x").is_loopback:
            return proxy
        from urllib.request import getproxies, proxy_bypass

        is_direct = proxy_bypass(parts.hostname or "")
        return "" if is_direct else getproxies().get(parts.scheme, "")

    def get(self, url: str, proxy: str) -> Any:
        """Return the pool of a URL's origin. Raises OSError, or urllib3's HTTPError for no URL."""
        parts = urllib3.util.parse_url(url)
        is_own = self._own is not None and url.lower().startswith(self._own[0])
        has_tls = parts.scheme == "https" or proxy.startswith("https:")
        options = self._build_tls_options() if has_tls else {}
        manager = self._get_manager(proxy, is_own)
        return manager.connection_from_host(parts.host, parts.port, parts.scheme, options)

    def _build_tls_options(self) -> dict[str, str]:
        if self.verify is False:
            return {"cert_reqs": "CERT_NONE"}
        path = Path(self._find_bundle())
        if not path.exists():
            raise OSError(f"{path}, a file of certificate authorities, does not exist")
        kind = "ca_cert_dir" if path.is_dir() else "ca_certs"
        return {"cert_reqs": "CERT_REQUIRED", kind: str(path)}

    def _find_bundle(self) -> str:
        """Return the file or directory of the authorities to trust."""
        if isinstance(self.verify, str):
            return self.verify
        for bundle in (*map(os.getenv, _BUNDLES), self.ca_bundle):
            if bundle:
                return bundle
        import certifi

        return certifi.where()

    def _get_manager(self, proxy: str, is_own: bool) -> Any:
        with self._lock:
            if (proxy, is_own) not in self._managers:
                self._managers[proxy, is_own] = self._open_manager(proxy, is_own)
            return self._managers[proxy, is_own]

    def _open_manager(self, proxy: str, is_own: bool) -> Any:
        options: dict[str, Any] = {"num_pools": _ORIGINS, "maxsize": MAX_CONNECTIONS}
        options["blocksize"] = _BLOCK_SIZE
        if is_own and self._own is not None:
            options["ssl_context"] = self._own[1]
        if not proxy:
            direct = urllib3.PoolManager(**options)
            set_pools(direct, self._addresses, self.boundary)
            return direct
        parts = urlsplit(proxy)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        manager: Any
        if parts.scheme.startswith("socks"):
            from urllib3.contrib.socks import SOCKSProxyManager

            manager = SOCKSProxyManager(proxy, user, password, **options)
        else:
            basic = f"{user}:{password}" if user else None
            headers = urllib3.make_headers(proxy_basic_auth=basic)
            manager = urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
        # The proxy is an address that the user has named.
        set_pools(manager, self._addresses)
        return manager

    def close(self) -> None:
        """Close all connections: urllib3 leaves idle ones to the garbage collector."""
        with self._lock:
            managers = list(self._managers.values())
        for manager in managers:
            for key in list(manager.pools.keys()):
                manager.pools[key].close()
