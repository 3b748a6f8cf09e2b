"""pull: an artifact from a registry into a store."""

from __future__ import annotations

from clowder_aimage.content import ContentStore, CopyPlan, OnEvent, Rate, copy, plan_copy
from clowder_aimage.content.copy import DEFAULT_CONCURRENCY
from clowder_aimage.content.event import ignore
from clowder_aimage.errors import FormatError
from clowder_aimage.layout.aimage import inflate, read_aimage
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import Connection, Repository


def pull(
    reference: Reference,
    store: ContentStore,
    connection: Connection,
    *,
    jobs: int = DEFAULT_CONCURRENCY,
    on_event: OnEvent = ignore,
    rate: Rate | None = None,
) -> Descriptor:
    """Fetch what ``reference`` names, byte for byte, and name it the same in ``store``.

    Raises:
        UsageError: the reference has no registry host.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: it cannot be had.
        VerificationError, FormatError: it is not what it claims to be.
        StoreError, NoSpaceError: it cannot be kept.
    """
    with Repository(reference, connection) as repository:
        descriptor = copy(
            repository, reference, store, concurrency=jobs, on_event=on_event, rate=rate
        )
    try:
        stored = read_aimage(store, reference)
    except FormatError:
        return descriptor  # another kind of artifact: kept as it is
    inflate(store, stored)
    return descriptor


def plan_pull(reference: Reference, connection: Connection) -> CopyPlan:
    """What a pull would move: only manifests are fetched. Raises as ``pull`` does."""
    with Repository(reference, connection) as repository:
        return plan_copy(repository, reference)
