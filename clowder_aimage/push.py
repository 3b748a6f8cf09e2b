"""push: an artifact from a store to a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from clowder_aimage.content import ContentStore, OnEvent, Overlay, Source, copy
from clowder_aimage.content.copy import DEFAULT_CONCURRENCY
from clowder_aimage.content.event import ignore
from clowder_aimage.dialect import DIALECTS, Dialect
from clowder_aimage.errors import FormatError, ManifestRefusedError, UsageError
from clowder_aimage.layout.aimage import Stored, inflate, read_aimage
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import Connection, Holders, Origins, Repository

OnFallback = Callable[[str, ManifestRefusedError], None]


def push(
    store: ContentStore,
    reference: Reference,
    connection: Connection,
    *,
    dialect: str | None = None,
    fallback: bool = True,
    jobs: int = DEFAULT_CONCURRENCY,
    on_event: OnEvent = ignore,
    on_fallback: OnFallback = lambda name, error: None,
) -> Descriptor:
    """Send what ``reference`` names in ``store`` to the registry in the name.

    A manifest goes as it is, or rewritten in ``dialect``. Where the registry refuses that kind of
    manifest, the next dialect is tried, unless ``fallback`` is off or the push is by digest; the
    blobs are there already and the local tag stays what it was. What another repository of the
    registry holds, by the names in ``store``, is mounted from there.

    Returns:
        the descriptor of what the registry holds now.

    Raises:
        UsageError: the reference has no registry host, or asks for a rewrite by digest.
        ManifestRefusedError: no dialect is left to try.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: it cannot be sent.
        VerificationError: our copy is damaged.
    """
    if reference.digest is not None and dialect is not None:
        raise UsageError(
            f"{reference} names a manifest by its digest, which another dialect would change",
            hint="push by tag to rewrite it",
        )
    may_fall_back = fallback and reference.digest is None
    refused: ManifestRefusedError | None = None
    with Repository(
        reference, connection, Origins(Holders(store, reference), on_event)
    ) as repository:
        for name, source in _attempts(store, reference, dialect):
            if refused is not None:
                on_fallback(name, refused)
            try:
                return copy(source, reference, repository, concurrency=jobs, on_event=on_event)
            except ManifestRefusedError as error:
                refused = error
                if not may_fall_back:
                    break
    assert refused is not None  # noqa: S101 - there is at least one attempt
    raise refused


def _attempts(
    store: ContentStore, reference: Reference, dialect: str | None
) -> Iterator[tuple[str, Source]]:
    """The manifest to send first, then its rewritings, each as a source to copy from."""
    try:
        stored = read_aimage(store, reference)
    except FormatError:
        if dialect is not None:
            raise
        yield "as it is", store
        return
    inflate(store, stored)
    first = DIALECTS[dialect or stored.dialect.name]
    names = list(DIALECTS)
    for name in names[names.index(first.name) :]:
        try:
            source = _rewritten(store, stored, DIALECTS[name])
        except FormatError:
            if name == first.name:
                raise
            continue  # wordier than registries take: no rung of this ladder
        yield name, source


def _rewritten(store: ContentStore, stored: Stored, dialect: Dialect) -> Source:
    """A view of the store in which ``stored`` is written in ``dialect``."""
    if dialect.name == stored.dialect.name:
        return store
    manifest, config = dialect.write(stored.aimage)
    documents = {manifest.digest: manifest.raw, manifest.config.digest: config}
    return Overlay(store, manifest.descriptor, documents)
