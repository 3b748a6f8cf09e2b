"""Options of a connection to a registry, and the connection pools with these options."""

from __future__ import annotations

import contextlib
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3
import urllib3.exceptions
import urllib3.util.ssl_

from clowder_aimage.errors import StoreError, UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.connection import Addresses
from clowder_aimage.registry.connection_pool import ConnectionPools
from clowder_aimage.registry.credential_helper import HelperQueries, Query
from clowder_aimage.registry.credential_trace import OnCredential, WarningLog
from clowder_aimage.registry.host_settings import HostSettings, list_certificates
from clowder_aimage.registry.pace import PATIENCE, Paces
from clowder_aimage.registry.reach import Boundary, Reach
from clowder_aimage.registry.trace import OnTrace

DEFAULT_CONNECTIONS = 8
# For the chunks of large blobs, if each connection is slow.
DEFAULT_MAX_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of a connection, and the locations of files and credentials.

    ``docker_config`` is the directory of docker's ``config.json``; ``auth_file`` is a file in the
    same format that is read before it, ``container_auth`` are files read after it, and
    ``docker_auth_config`` is such text, which precedes docker's file. ``auths`` are credentials
    from the caller in that format. They take precedence. ``query_helper`` asks credential helpers,
    and ``on_credential`` gets the places where credentials are looked for. ``trusted_realms`` are
    hosts that other registries may lead to, and that may receive their credentials. ``ca_bundle``
    replaces the default certificate authorities (set by the environment), ``cert_dirs`` are
    directories of ``certs.d``.
    ``registries`` has settings for single hosts; names without a host are in ``default_registry``
    (a host, or a host with a path that is prepended to the repository), if it is set.
    ``connections_override`` is the number of layers transferred at once; 0 for each registry's own
    setting. If ``plain_http`` is None, ``uses_http`` decides. ``basic_auth`` (base64) takes
    precedence over stored credentials, ``headers`` are added to each request to the registry, and
    ``client_certificate`` (a file of the certificate and one of its key, or one of both) is
    presented to it; mirrors get none of these. ``addresses`` are connected to instead of those of
    a host and port. ``max_reach`` is the most internal allowed reach of the registry's own address.
    ``on_exchange`` gets each request. A transfer fails if a registry refuses all requests as too
    many for ``patience`` seconds. All sessions with these options share the ``paces``.
    """

    plain_http: bool | None = None
    insecure: bool = False
    ca_file: Path | None = None
    docker_config: Path | None = None
    trusted_realms: frozenset[str] = frozenset()
    connections_override: int = 0
    user_agent: str = "aimage"
    auth_file: Path | None = None
    auths: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    docker_auth_config: str = field(default="", repr=False)
    container_auth: tuple[Path, ...] = ()
    ca_bundle: Path | None = None
    cert_dirs: tuple[Path, ...] = ()
    registries: Mapping[str, HostSettings] = field(default_factory=dict, hash=False)
    default_registry: str = ""
    basic_auth: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    client_certificate: tuple[Path, Path | None] | None = None
    addresses: Addresses = field(default_factory=dict, hash=False)
    max_reach: Reach = Reach.NOWHERE
    on_exchange: OnTrace | None = None
    query_helper: Query = field(default_factory=HelperQueries, compare=False, repr=False)
    on_credential: OnCredential = field(default_factory=WarningLog, compare=False, repr=False)
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], object] | None = None
    patience: float = PATIENCE
    paces: Paces = field(default_factory=Paces, compare=False, repr=False)

    @property
    def login_file(self) -> Path:
        """The file that ``login`` writes. Raises UsageError: this user has no home directory."""
        if self.auth_file is None and self.docker_config is None:
            raise UsageError(
                "this user has no home directory for credentials", remedy="name_docker_config"
            )
        return self.auth_files[0]

    @property
    def auth_files(self) -> tuple[Path, ...]:
        """The files with credentials in reading order; ``login`` writes the first."""
        docker = () if self.docker_config is None else (self.docker_config / "config.json",)
        preferred = () if self.auth_file is None else (self.auth_file,)
        return (*preferred, *docker, *self.container_auth)

    def expand(self, reference: Reference) -> Reference:
        """Return a reference with the default registry, if it has none."""
        if reference.registry is not None or not self.default_registry:
            return reference
        host, _, path = self.default_registry.partition("/")
        repository = f"{path}/{reference.repository}".lstrip("/")
        return replace(reference, registry=host, repository=repository)

    def find_host_settings(self, name: str | None) -> HostSettings:
        """Return the configuration of a host; None is that of the default registry."""
        host = name or self.default_registry.partition("/")[0]
        return self.registries.get(host, HostSettings())

    def build_boundary(self, host: str) -> Boundary:
        """Return the boundary of the addresses that the registry ``host`` may lead to."""
        trusted = self.trusted_realms | self.find_host_settings(host).trusted_hosts
        return Boundary(urlsplit(f"//{host}").hostname or host, trusted, max_reach=self.max_reach)

    def to(self, host: str) -> ClientOptions:
        """Return the options for one host; the command line overrides the configuration."""
        if self.plain_http is not None or self.insecure or self.ca_file is not None:
            return self
        settings = self.find_host_settings(host)
        return replace(
            self,
            plain_http=settings.plain_http,
            insecure=settings.insecure,
            ca_file=settings.ca_file,
        )

    def uses_http(self, host: str) -> bool:
        """Return True if a host is reached by HTTP.

        By default it is a loopback one without a CA or a client certificate.
        """
        options = self.to(host)
        if options.plain_http is not None:
            return options.plain_http
        has_tls = options.insecure or options.ca_file or options.client_certificate
        return Reference(host, "x").is_loopback and not has_tls

    def compute_connections(self, *hosts: str | None) -> int:
        """Return the number of layers that are transferred at once to or from ``hosts``."""
        return self._find_connections(hosts) or DEFAULT_CONNECTIONS

    def compute_max_connections(self, *hosts: str | None) -> int:
        """Return the most connections for the chunks of large layers, each of which is slow."""
        return self._find_connections(hosts) or DEFAULT_MAX_CONNECTIONS

    def _find_connections(self, hosts: Iterable[str | None]) -> int:
        """Return the number that the user or the configuration sets, or 0."""
        configured = filter(None, (self.find_host_settings(host).connections for host in hosts))
        return self.connections_override or min(configured, default=0)

    def limit(self, host: str | None) -> int:
        """Return the bytes per second of a pull from ``host``; 0 for no limit."""
        return self.find_host_settings(host).limit

    def to_mirror(self, host: str) -> ClientOptions:
        """Return the options for a mirror. The command line's do not apply to it."""
        options = replace(
            self, plain_http=None, insecure=False, ca_file=None, max_reach=Reach.NOWHERE
        )
        return replace(options, basic_auth=None, headers={}, client_certificate=None).to(host)


def open_pools(
    connection: ClientOptions, host: str, boundary: Boundary | None = None
) -> ConnectionPools:
    """Open connection pools with the options of ``connection`` for a registry at ``host``.

    ``boundary`` is by default that of the registry.
    Certificates from ``certs.d`` are presented to that origin only, not to the targets of redirects
    and uploads elsewhere. Raises StoreError for an unreadable one, and for a file of authorities
    without certificates.
    """
    boundary = boundary or connection.build_boundary(host)
    pools = ConnectionPools(boundary, connection.addresses, user_agent=connection.user_agent)
    # The caller warns: urllib3's own warning shows source paths.
    if connection.insecure:
        pools.verify = False
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    elif connection.ca_file is not None:
        pools.verify = str(connection.ca_file)
        _check_authorities(connection.ca_file)
    elif connection.ca_bundle is not None:
        pools.ca_bundle = str(connection.ca_bundle)
    context = _create_ssl_context(connection, host)
    if context is not None:
        pools.set_context(host, context)
    for name in ("urllib3.connectionpool", "urllib3.util.retry"):
        logging.getLogger(name).addFilter(_hide_queries)
    return pools


def _check_authorities(path: Path) -> None:
    # A missing file is reported by the first request.
    with contextlib.suppress(FileNotFoundError):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
        except ssl.SSLError:
            raise StoreError(
                f"{path} contains no certificate", hint="expected PEM: -----BEGIN CERTIFICATE-----"
            ) from None


def _create_ssl_context(connection: ClientOptions, host: str) -> ssl.SSLContext | None:
    files = list_certificates(connection.cert_dirs, host)
    client_files = connection.client_certificate
    if client_files is None and not any(path.suffix in (".crt", ".cert") for path in files):
        return None
    context = urllib3.util.ssl_.create_urllib3_context()
    if connection.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    uses_authorities = not connection.insecure and connection.ca_file is None
    for path in files:
        try:
            if path.suffix == ".crt" and uses_authorities:
                context.load_verify_locations(path)
            elif path.suffix == ".cert" and client_files is None:
                # An empty password prevents a prompt.
                context.load_cert_chain(path, path.with_suffix(".key"), password="")
        except (OSError, ValueError) as error:
            raise StoreError(
                f"cannot load the certificate {path}: {error}",
                hint="a client certificate x.cert requires its key in x.key, without a password",
            ) from None
    if client_files is not None:
        try:
            context.load_cert_chain(*client_files, password="")
        except (OSError, ValueError) as error:
            raise StoreError(
                f"cannot load the client certificate {client_files[0]}: {error}",
                hint="a certificate and its key are PEM files, the key without a password",
            ) from None
    return context


def _hide_queries(record: logging.LogRecord) -> bool:
    """Remove queries from urllib3's log: those of CDNs and uploads are secret."""
    record.msg, record.args = re.sub(r"\?[^\s\"]*", "?...", record.getMessage()), ()
    return True
