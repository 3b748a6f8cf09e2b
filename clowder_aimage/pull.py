"""pull: an artifact from a registry into a store."""

from __future__ import annotations

import os
from dataclasses import replace

from clowder_aimage.content import ContentStore, CopyPlan, OnEvent, Rate, copy, plan_copy
from clowder_aimage.content.choose import ANY, Platform, Rooted, Wish, find
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
    wish: Wish | None = ANY,
    on_event: OnEvent = ignore,
    rate: Rate | None = None,
    is_named: bool = True,
) -> Descriptor:
    """Fetch what ``reference`` names, byte for byte, and name it the same in ``store``.

    Of an index, the one manifest that ``wish`` or this machine's platform chooses is fetched; the
    whole index where ``wish`` is None. ``stored_name`` is what the store calls it then. Without a
    ``rate``, the one that ``connection`` knows for the registry counts. What is not to be named
    (``is_named``) is only fetched.

    Raises:
        UsageError: the reference has no registry host, or several manifests of an index fit.
        NotFoundError: it is not there, or no manifest of an index fits.
        UnauthorizedError, NetworkError, RegistryError: it cannot be had.
        VerificationError, FormatError: it is not what it claims to be.
        StoreError, NoSpaceError: it cannot be kept.
    """
    with Repository(reference, connection) as repository:
        source = _meant(repository, reference, wish)
        name = stored_name(reference, source.root)
        jobs, limit = connection.jobs(reference.registry), connection.limit(reference.registry)
        rate = rate or (Rate(limit) if limit else None)
        copy(
            source,
            reference,
            store,
            name,
            concurrency=jobs,
            on_event=on_event,
            rate=rate,
            is_named=is_named,
        )
    if not is_named:
        return source.root
    try:
        stored = read_aimage(store, name)
    except FormatError:
        return source.root  # another kind of artifact: kept as it is
    inflate(store, stored)
    return source.root


def plan_pull(reference: Reference, connection: Connection, *, wish: Wish | None = ANY) -> CopyPlan:
    """What a pull would move: only manifests are fetched. Raises as ``pull`` does."""
    with Repository(reference, connection) as repository:
        return plan_copy(_meant(repository, reference, wish), reference)


def stored_name(reference: Reference, descriptor: Descriptor) -> Reference:
    """What the store calls a pulled manifest: the digest of an index is not that of its child."""
    if reference.digest is None:
        return reference
    return replace(reference, digest=descriptor.digest)


def _meant(repository: Repository, reference: Reference, wish: Wish | None) -> Rooted:
    if wish is None:
        return Rooted(repository, repository.resolve(reference))
    machine = os.uname()
    return find(repository, reference, wish, Platform.of(machine.sysname, machine.machine))
