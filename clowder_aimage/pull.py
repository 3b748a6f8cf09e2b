"""pull: an artifact from a registry into a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from typing import BinaryIO

from clowder_aimage.content import (
    ContentStore,
    CopyPlan,
    OnEvent,
    Rate,
    Source,
    copy,
    plan_copy,
    read_all,
)
from clowder_aimage.content.copy_event import ignore
from clowder_aimage.content.platform import ANY, ManifestSelector, PinnedSource, Platform, find
from clowder_aimage.dialect import detect
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import MAX_CONFIG_SIZE, inflate, read_aimage
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference
from clowder_aimage.registry import ClientOptions, Repository

Near = Callable[[Source], Source]


def _itself(source: Source) -> Source:
    return source


@dataclass(frozen=True, slots=True)
class PartialPull:
    """What a partial pull has named, and the blobs of it that are not in the store."""

    root: Descriptor
    missing: tuple[Descriptor, ...]


def pull(
    reference: Reference,
    store: ContentStore,
    connection: ClientOptions,
    *,
    wish: ManifestSelector | None = ANY,
    on_event: OnEvent = ignore,
    rate: Rate | None = None,
    is_named: bool = True,
    near: Near = _itself,
) -> Descriptor:
    """Fetch what ``reference`` names, byte for byte, and name it the same in ``store``.

    Of an index, the one manifest that ``wish`` or this machine's platform chooses is fetched; the
    whole index where ``wish`` is None. ``stored_name`` is what the store calls it then. Without a
    ``rate``, the one that ``connection`` knows for the registry counts. What is not to be named
    (``is_named``) is only fetched. ``near`` puts something between us and the registry: it may know
    a nearer place for blobs.

    Raises:
        UsageError: the reference has no registry host, or several manifests of an index fit.
        NotFoundError: it is not there, or no manifest of an index fits.
        UnauthorizedError, NetworkError, RegistryError: it cannot be had.
        VerificationError, FormatError: it is not what it claims to be.
        StoreError, NoSpaceError: it cannot be kept.
    """
    with Repository(reference, connection) as repository:
        source = _meant(near(repository), reference, wish)
        name = stored_name(reference, source.root)
        copy(
            source,
            reference,
            store,
            name,
            concurrency=connection.jobs(reference.registry),
            on_event=on_event,
            rate=rate or _rate(connection, reference),
            is_named=is_named,
        )
    if is_named:
        _inflate(store, name)
    return source.root


def pull_part(
    reference: Reference,
    layout: ImageLayout,
    connection: ClientOptions,
    selection: LayerSelection,
    *,
    wish: ManifestSelector = ANY,
    on_event: OnEvent = ignore,
    rate: Rate | None = None,
    near: Near = _itself,
) -> PartialPull:
    """Fetch of the AImage ``reference`` what ``selection`` chooses, and its config; name it.

    The name is marked as partial while blobs of it are missing: another part may be added later,
    and ``pull`` completes it.

    Raises:
        UsageError: it is no AImage; and as ``pull`` does.
        NotFoundError: something that was asked for is not in it. Nothing was fetched.
        Whatever else ``pull`` raises.
    """
    with Repository(reference, connection) as repository:
        meant = _meant(near(repository), reference, wish)
        plan, config = _plan_part(meant, reference, selection, layout)
        name = stored_name(reference, meant.root)
        with layout.lease(*plan.digests):
            copy(
                config,
                reference,
                layout,
                concurrency=connection.jobs(reference.registry),
                on_event=on_event,
                rate=rate or _rate(connection, reference),
                is_named=False,
                plan=plan,
            )
            missing = _name(layout, plan, name)
    _inflate(layout, name)
    return PartialPull(plan.root, tuple(missing))


def plan_pull(
    reference: Reference,
    connection: ClientOptions,
    *,
    wish: ManifestSelector | None = ANY,
    part: tuple[LayerSelection, ContentStore] | None = None,
) -> CopyPlan:
    """What a pull would move: only manifests are fetched, and for a ``part`` the config, where the
    store lacks it. Raises as ``pull`` and ``pull_part`` do."""
    with Repository(reference, connection) as repository:
        meant = _meant(repository, reference, wish)
        if part is None:
            return plan_copy(meant, reference)
        return _plan_part(meant, reference, *part)[0]


def look(
    reference: Reference, connection: ClientOptions, known: Digest | None
) -> tuple[Descriptor, Descriptor] | None:
    """What ``reference`` means now: the manifest or index it names, and the manifest that a pull
    would take of it; None where it still names ``known``. No blob is asked for.

    Raises:
        whatever resolving raises in ``pull``.
    """
    with Repository(reference, connection) as repository:
        found = repository.resolve_changed(reference, known)
        if found is None:
            return None
        return found, _meant(PinnedSource(repository, found), reference, ANY).root


def stored_name(reference: Reference, descriptor: Descriptor) -> Reference:
    """What the store calls a pulled manifest: the digest of an index is not that of its child."""
    if reference.digest is None:
        return reference
    return replace(reference, digest=descriptor.digest)


def _meant(source: Source, reference: Reference, wish: ManifestSelector | None) -> PinnedSource:
    if wish is None:
        return PinnedSource(source, source.resolve(reference))
    machine = os.uname()
    return find(source, reference, wish, Platform.of(machine.sysname, machine.machine))


class _Known(PinnedSource):
    """A source of which one blob was read already, and need not be fetched again."""

    def __init__(self, source: PinnedSource, content: Descriptor, data: bytes) -> None:
        super().__init__(source, source.root)
        self._content = content
        self._data = data

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> BinaryIO:
        if content.digest != self._content.digest:
            return super().open(content, offset, length)
        return BytesIO(self._data[offset : None if length is None else offset + length])


def _plan_part(
    source: PinnedSource, reference: Reference, selection: LayerSelection, store: ContentStore
) -> tuple[CopyPlan, PinnedSource]:
    """What is to be moved of an AImage, and the source that still knows its config."""
    plan = plan_copy(source, reference)
    _, manifest = plan.documents[-1]
    try:
        if not isinstance(manifest, Manifest):
            raise FormatError(f"{reference} is an index")
        dialect = detect(manifest)
        near: Source = store if store.exists(manifest.config) else source
        config = read_all(near.open(manifest.config), manifest.config, MAX_CONFIG_SIZE)
        aimage = dialect.read(manifest, config)
    except FormatError as error:
        raise UsageError(
            f"{reference} has no components or layers to choose: {error.message}",
            hint="leave --component and --include out to fetch all of it",
        ) from None
    names = selection.names(aimage, reference)
    wanted = {
        blob.digest
        for blob, layer in zip(manifest.layers, aimage.layers, strict=True)
        if layer.name in names
    }
    known = _Known(source, manifest.config, config)
    return plan.part(wanted | {manifest.config.digest}), known


def _name(layout: ImageLayout, plan: CopyPlan, name: Reference) -> list[Descriptor]:
    """Name what came, and mark it where blobs are missing. Returns those."""
    missing = plan.missing_left_out(layout)
    layout.tag(plan.root, name, is_partial=bool(missing))
    if missing and not (missing := plan.missing_left_out(layout)):
        layout.tag(plan.root, name)  # another process has completed it meanwhile
    return missing


def _inflate(store: ContentStore, name: Reference) -> None:
    try:
        stored = read_aimage(store, name)
    except FormatError:
        return  # another kind of artifact: kept as it is
    inflate(store, stored)


def _rate(connection: ClientOptions, reference: Reference) -> Rate | None:
    limit = connection.limit(reference.registry)
    return Rate(limit) if limit else None
