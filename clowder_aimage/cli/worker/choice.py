"""The choice of the worker: a named one, the default one if it has the same AImages, or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.option import get_settings, parse_reference
from clowder_aimage.cli.console.output import remark, wants_value
from clowder_aimage.cli.console.worker_connection import (
    connect_worker,
    create_client,
    list_local_options,
    list_models,
    refuse_options,
)
from clowder_aimage.cli.worker.remote import RemoteWorker
from clowder_aimage.config.user_directory import read_worker_host
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient

# Seconds to wait for a default worker that may not be running.
_PROBE = 0.3


def find_named_worker(
    served: Collection[str], *, is_local: bool, is_remote: bool
) -> WorkerClient | None:
    """Return the worker that AIMAGE_HOST names, or the default one with --remote, if it is used.

    ``served`` are the options that a worker serves too. Raises UsageError for others, and as
    ``worker``.
    """
    if not is_remote and (is_local or not read_worker_host()):
        return None
    correction = "omit --remote" if is_remote else "use --local"
    refuse_options(f"omit it, or {correction} to generate in this process", exclude=served)
    return connect_worker()


def choose_worker(
    reference: Reference,
    client: WorkerClient | None,
    used_models: Iterable[str],
    served: Collection[str],
    *,
    is_local: bool,
) -> RemoteWorker | None:
    """Return the worker that generates; None for this process.

    It is the one of ``client``, else the default one if it has the same AImages as this store:
    ``reference``, and ``used_models`` that are used with it.
    """
    if client is not None:
        return RemoteWorker(client, reference, f"worker at {client.endpoint}")
    if is_local or list_local_options(*served):
        return None
    default = find_default_worker(reference, map(parse_reference, used_models))
    if default is None:
        return None
    client, has_same = default
    if has_same or _prefers_worker():
        label = f"worker at {client.endpoint}; --local generates in this process"
        return RemoteWorker(client, reference, label)
    if not wants_value():
        remark(f"a worker is running at {client.endpoint}; --remote generates there")
    return None


def find_default_worker(
    reference: Reference, adapters: Iterable[Reference] = ()
) -> tuple[WorkerClient, bool] | None:
    """Return a client of the default worker, and True if it has the same AImages as this store.

    These are ``reference`` and the adapters. None if no worker answers there, it cannot have the
    AImage or reports an error, or AIMAGE_HOST is set to an empty text.
    """
    if "AIMAGE_HOST" in os.environ:
        return None
    with contextlib.suppress(AImageError):
        client = create_client(None)
        if not client.is_worker(_PROBE):
            return None
        listed = list_models(client, "/api/tags")
        is_same = _match_models(listed, reference)
        is_listed = bool(is_same) and reference.digest is None
        if any(is_same) or is_listed or reference.registry is not None:
            return client, any(is_same) and all(
                any(_match_models(listed, adapter)) for adapter in adapters
            )
    return None


def _match_models(listed: Iterable[Mapping[str, Any]], reference: Reference) -> list[bool]:
    """Return True for each listed model of a name unless this store has another one."""
    digest = reference.digest
    with contextlib.suppress(NotFoundError):
        digest = digest or get_settings().layout.resolve(reference).digest
    return [
        digest is None or model["digest"] == str(digest)
        for model in listed
        if reference.digest or model["name"] == str(reference)
    ]


def _prefers_worker() -> bool:
    """Return True if the configuration prefers the default worker. Raises UsageError."""
    from clowder_aimage.config.user_directory import read_user_configuration

    return bool(read_user_configuration(lambda it: it.get("run", {}).get("remote")))
