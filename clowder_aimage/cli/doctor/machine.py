"""The checks of this machine, by its configuration and its stores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from clowder_aimage.cli.doctor.backend import BackendCheck
from clowder_aimage.cli.doctor.clock import ClockCheck
from clowder_aimage.cli.doctor.configuration import ConfigurationCheck
from clowder_aimage.cli.doctor.credentials import CredentialsCheck
from clowder_aimage.cli.doctor.finding import Check, Level
from clowder_aimage.cli.doctor.fleet import FleetCheck, FleetSettings
from clowder_aimage.cli.doctor.hub import HubCheck
from clowder_aimage.cli.doctor.memory import MemoryCheck
from clowder_aimage.cli.doctor.port import PortCheck
from clowder_aimage.cli.doctor.program import ProgramCheck
from clowder_aimage.cli.doctor.proxy import ProxyCheck
from clowder_aimage.cli.doctor.registry import RegistryCheck
from clowder_aimage.cli.doctor.server_time import ServerTimes
from clowder_aimage.cli.doctor.store import StoreCheck
from clowder_aimage.cli.doctor.worker import WorkerCheck
from clowder_aimage.config.user_directory import (
    find_config_file,
    read_worker_host,
    read_worker_token,
)
from clowder_aimage.document.schema import read_configuration
from clowder_aimage.engine.endpoint import DEFAULT_HOST
from clowder_aimage.engine.worker_client import WorkerClient
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry.client_options import ClientOptions

DEFAULT_REGISTRY = "127.0.0.1:5005"
# Registries of names in the store that are asked.
_MAX_STORED = 8


def build_checks(
    list_stores: Callable[[], Sequence[Path]], connection: ClientOptions
) -> list[Check]:
    """Return all checks. Unreadable settings are left out here: a check reports them."""
    times = ServerTimes()
    checks: list[Check] = [
        ProgramCheck(),
        BackendCheck(),
        MemoryCheck(),
        StoreCheck(list_stores),
        ConfigurationCheck(),
        ProxyCheck(),
        CredentialsCheck(connection),
    ]
    checks += _build_registry_checks(list_stores, connection, times)
    checks.append(HubCheck(connection, times))
    checks += [
        PortCheck(DEFAULT_HOST, "aimage serve", "127.0.0.1:11435"),
        PortCheck(DEFAULT_REGISTRY, "aimage registry serve", "127.0.0.1:5006"),
        WorkerCheck(_create_client, is_expected=_expects_worker()),
    ]
    checks += _build_fleet_checks(times)
    return [*checks, ClockCheck(times)]


def _build_fleet_checks(times: ServerTimes) -> Iterator[Check]:
    with contextlib.suppress(UsageError):
        if (settings := FleetSettings.read()) is not None:
            # Importing them takes longer than a response, for which the time is limited. The
            # check reports a missing extra.
            with contextlib.suppress(ModuleNotFoundError):
                from clowder_aimage.fleet import link, worker_registry  # noqa: F401
            yield FleetCheck(settings, times)


def _create_client() -> WorkerClient:
    return WorkerClient(read_worker_host() or DEFAULT_HOST, read_worker_token())


def _expects_worker() -> bool:
    """Return True if verbs use a worker: one is named, or ``run`` uses one by default."""
    with contextlib.suppress(UsageError):
        section = read_configuration(find_config_file(), lambda document: document.get("run", {}))
        return read_worker_host() is not None or bool(section.get("remote"))
    return read_worker_host() is not None


def _build_registry_checks(
    list_stores: Callable[[], Sequence[Path]], connection: ClientOptions, times: ServerTimes
) -> Iterator[Check]:
    configured = list(_iter_configured(connection))
    stored = [host for host in _iter_stored(list_stores) if host not in configured]
    for host in dict.fromkeys(configured):
        yield RegistryCheck(host, connection, times)
    for host in list(dict.fromkeys(stored))[:_MAX_STORED]:
        yield RegistryCheck(host, connection, times, Level.WARNING)


def _iter_configured(connection: ClientOptions) -> Iterator[str]:
    if connection.default_registry:
        yield connection.default_registry.partition("/")[0]
    for host, settings in connection.registries.items():
        yield host
        yield from (mirror.partition("/")[0] for mirror in settings.mirrors)


def _iter_stored(list_stores: Callable[[], Sequence[Path]]) -> Iterator[str]:
    with contextlib.suppress(AImageError, OSError):
        for root in list_stores():
            for name, _ in ImageLayout(root).list_tags():
                # Names of other tools need not be references.
                with contextlib.suppress(UsageError):
                    if host := Reference.parse(name).registry:
                        yield host
