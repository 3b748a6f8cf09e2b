"""pull: an artifact from a registry into a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from clowder_aimage.content import (
    ContentStore,
    CopyPlan,
    OnEvent,
    Overlay,
    Rate,
    Source,
    copy,
    plan_copy,
    read_all,
)
from clowder_aimage.content.copy_option import ignore
from clowder_aimage.content.fetch import check_space
from clowder_aimage.content.gate import find_gate
from clowder_aimage.content.parts import PartsSource
from clowder_aimage.content.platform import ANY, ManifestSelector, select
from clowder_aimage.content.telemetry import start_span
from clowder_aimage.dialect import AImage, Layer, detect
from clowder_aimage.dialect.mountable import may_be_mountable, read_origin
from clowder_aimage.dialect.packing import is_known_late
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import AImageError, FormatError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import (
    MAX_CONFIG_SIZE,
    StoredAImage,
    inflate_copied,
    interpret,
)
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference
from clowder_aimage.registry import ClientOptions, Repository

Begin = Callable[[StoredAImage], Sequence[str]]


@dataclass(frozen=True, slots=True)
class PullOptions:
    """Options of a pull.

    ``selector`` selects the manifest of an index; with None the index is fetched as a whole.
    ``layers`` selects layers of an AImage; None fetches all. A dry run fetches manifests only, and
    with ``layers`` the config. ``rate`` limits the speed, overriding the client's options for the
    registry. ``wrap`` adds a source of nearer blobs in front of the registry.

    ``begin`` lets a caller use the AImage before the end. It is called with the leased AImage
    before its blobs are fetched, unless they must be inflated first, and returns the components in
    the order of their use. The blobs are then fetched in that order, after the files.
    """

    selector: ManifestSelector | None = ANY
    layers: LayerSelection | None = None
    is_dry_run: bool = False
    on_event: OnEvent = ignore
    rate: Rate | None = None
    wrap: Callable[[Source], Source] | None = None
    begin: Begin | None = None


@dataclass(frozen=True, slots=True)
class PullResult:
    """A pulled manifest: its name in the store, and its missing blobs."""

    name: Reference
    plan: CopyPlan
    missing: tuple[Descriptor, ...] = ()

    @property
    def root(self) -> Descriptor:
        return self.plan.root


_ALL = PullOptions()


def pull(
    reference: Reference,
    store: ContentStore,
    connection: ClientOptions,
    options: PullOptions = _ALL,
) -> PullResult:
    """Fetch the artifact ``reference`` unchanged, and give it the same name in ``store``.

    Of a mountable image the AImage is fetched that it was made of.

    The name is marked as partial while left-out blobs are missing; another part may be added later,
    and a pull of all layers completes it.

    Raises:
        UsageError: the reference has no registry host, several manifests of an index match, or
            layers are selected of an artifact that is not an AImage.
        NotFoundError: the artifact, a manifest of the index or a selected layer does not exist.
        UnauthorizedError, NetworkError, RegistryError: it cannot be read from the registry.
        VerificationError, FormatError: the bytes differ from their descriptors.
        StoreError, NoSpaceError: it cannot be stored.
    """
    with (
        start_span("pull", reference=str(reference)),
        Repository(reference, connection) as repository,
    ):
        source = options.wrap(repository) if options.wrap else repository
        with start_span("resolve"):
            root = source.resolve(reference)
        with start_span("manifest"):
            selected = select(source, root, reference, options.selector)
            whole = connection.expand(reference)
            source, root, document = _open_image(repository, source, store, whole, *selected)
            plan = plan_copy(source, root, document)
        if options.layers is not None:
            source, plan = _select_layers(source, plan, reference, options.layers, store)
        early: StoredAImage | None = None
        if options.begin is not None and not plan.left_out:
            source, early = _read_early(source, plan, store)
        name = resolve_stored_name(reference, plan.root)
        if options.is_dry_run:
            return PullResult(name, plan, tuple(plan.list_missing_left_out(store)))
        # Checked before the lease: that would write into an empty store.
        check_space(plan.list_missing(store), store)
        limit = connection.limit(reference.registry)
        with store.lease(*plan.digests), start_span("blobs", count=len(plan.digests)):
            if isinstance(store, ImageLayout) and (origin := connection.expand(name)) != name:
                # The name in the store lacks the registry, for which a rule may be.
                store.add_origins(plan.root.digest, [str(origin)])
            if (gate := find_gate()) is not None:
                # A process that loads the AImage meanwhile asks by this.
                gate.record(store, plan.root, name)
            if options.begin is not None and early is not None:
                plan = plan.order_blobs(_order_of_use(early.aimage, options.begin(early)))
            copy(
                source,
                reference,
                store,
                name,
                concurrency=connection.compute_connections(reference.registry),
                max_concurrency=connection.compute_max_connections(reference.registry),
                on_event=options.on_event,
                rate=options.rate or (Rate(limit) if limit else None),
                plan=plan,
            )
            missing = _tag_partial(store, plan, name) if plan.left_out else []
            inflate_copied(store, *plan.documents[-1])
    return PullResult(name, plan, tuple(missing))


def resolve_changed(
    reference: Reference, connection: ClientOptions, previous: Digest | None
) -> tuple[Descriptor, Descriptor] | None:
    """Return the manifest or index of ``reference``, and the manifest that a pull would fetch.

    Return None if ``reference`` still refers to ``previous``. No blob is fetched. Raises as the
    resolution in ``pull``.
    """
    with Repository(reference, connection) as repository:
        root = repository.resolve_changed(reference, previous)
        if root is None:
            return None
        return root, find_pulled(repository, connection.expand(reference), root)


def find_pulled(repository: Repository, reference: Reference, root: Descriptor) -> Descriptor:
    """Return the manifest that a pull of the manifest or index ``root`` would store.

    ``reference`` has its registry. No blob is fetched but the config of an image. Raises as the
    resolution in ``pull``.
    """
    selected = select(repository, root, reference, ANY)
    return _open_image(repository, repository, repository, reference, *selected)[1]


def resolve_stored_name(reference: Reference, descriptor: Descriptor) -> Reference:
    """Return the name of a pulled manifest; for an index, the digest is that of its child."""
    return replace(reference, digest=descriptor.digest) if reference.digest else reference


def _open_image(
    repository: Repository,
    source: Source,
    store: Source,
    reference: Reference,
    root: Descriptor,
    document: Manifest | Index,
) -> tuple[Source, Descriptor, Manifest | Index]:
    """Return the manifest of the AImage in a mountable image, and the source of its content.

    Other documents are returned as they are. The policy decides about both.
    """
    if not isinstance(document, Manifest) or not may_be_mountable(document):
        return source, root, document
    config = _read_config(source, document, store)
    if (origin := read_origin(document, config)) is None:
        return Overlay(source, root, {document.config.digest: config}), root, document
    manifest = origin.manifest
    parts = PartsSource(source, origin.blobs)
    if (gate := find_gate()) is not None:
        # Its config is a part of the image, too.
        gate.admit_remote(repository, reference, manifest.descriptor, manifest.raw, parts)
    return parts, manifest.descriptor, manifest


def _select_layers(
    source: Source,
    plan: CopyPlan,
    reference: Reference,
    layers: LayerSelection,
    store: Source,
) -> tuple[Source, CopyPlan]:
    """Return the plan for the selected layers, and a source that has the config in memory."""
    try:
        overlay, stored = _read_aimage(source, plan, store)
    except FormatError as error:
        raise UsageError(
            f"cannot select components or layers of {reference}: {error.message}",
            remedy="no_layers",
        ) from None
    names = layers.list_names(stored.aimage, reference)
    selected = {
        blob.digest
        for blob, layer in zip(stored.manifest.layers, stored.aimage.layers, strict=True)
        if layer.name in names
    }
    return overlay, plan.select(selected | {stored.manifest.config.digest})


def _read_aimage(source: Source, plan: CopyPlan, store: Source) -> tuple[Source, StoredAImage]:
    """Return the AImage of a plan, and a source that has its config in memory.

    Raises FormatError if it is not an AImage.
    """
    root, manifest = plan.documents[-1]
    if not isinstance(manifest, Manifest):
        raise FormatError("it is an index")
    # Other artifacts are refused before a config is fetched.
    detect(manifest)
    config = _read_config(source, manifest, store)
    overlay = Overlay(source, root, {manifest.config.digest: config})
    return overlay, interpret(overlay, root, manifest)


def _read_config(source: Source, manifest: Manifest, store: Source) -> bytes:
    """Return the config of a manifest, from the store if that has it."""
    holder = store if store is not source and store.exists(manifest.config) else source
    return read_all(holder.open(manifest.config), manifest.config, MAX_CONFIG_SIZE)


def _read_early(
    source: Source, plan: CopyPlan, store: Source
) -> tuple[Source, StoredAImage | None]:
    """Return the AImage if its blobs can be used as they arrive, and the source for its pull."""
    try:
        overlay, stored = _read_aimage(source, plan, store)
    except AImageError:
        # The pull reports errors, after other origins were tried.
        return source, None
    layers = zip(stored.manifest.layers, stored.aimage.layers, strict=True)
    is_packed = any(blob.digest != layer.descriptor.digest for blob, layer in layers)
    return overlay, None if is_packed or is_known_late(stored.aimage) else stored


def _order_of_use(aimage: AImage, components: Sequence[str]) -> list[Digest]:
    """Return the digests of the layers in the order of use: files, then the components."""
    order = ["", *components]

    def rank(layer: Layer) -> int:
        owner = layer.component if layer.is_tensor or layer.is_shard else ""
        return order.index(owner) if owner in order else len(order)

    return [layer.descriptor.digest for layer in sorted(aimage.layers, key=rank)]


def _tag_partial(store: ContentStore, plan: CopyPlan, name: Reference) -> list[Descriptor]:
    """Tag the fetched content, marked as partial if blobs are missing, and return those."""
    # The check is repeated after the tag: two pulls of different layers may end together.
    missing = plan.list_missing_left_out(store)
    store.tag(plan.root, name, is_partial=bool(missing))
    if missing and not (missing := plan.list_missing_left_out(store)):
        # Another process has completed it in the meantime.
        store.tag(plan.root, name)
    return missing
