"""push: an artifact from a store, or from another registry, to a registry."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace

from clowder_aimage.content import (
    ContentStore,
    CopyPlan,
    Lease,
    OnEvent,
    Overlay,
    Source,
    copy,
    plan_copy,
)
from clowder_aimage.content.copy_option import CopyEvent, ignore
from clowder_aimage.content.gate import find_gate, unchecked
from clowder_aimage.content.graph import read_document, walk
from clowder_aimage.content.store import Reader, WrappedSource
from clowder_aimage.content.telemetry import start_span
from clowder_aimage.dialect import FALLBACK_ORDER, READABLE
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    ContentError,
    FormatError,
    ManifestRefusedError,
    ModelError,
    NotFoundError,
    RegistryError,
    UnauthorizedError,
    UsageError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import (
    check_stored,
    describe_missing,
    require_complete,
    suggest_completion,
)
from clowder_aimage.layout.stored_aimage import StoredAImage, inflate, lease_manifest, read_aimage
from clowder_aimage.oci import (
    MAX_MANIFEST_SIZE,
    Descriptor,
    Digest,
    Index,
    Manifest,
    Reference,
    mediatype,
)
from clowder_aimage.registry import (
    ClientOptions,
    DialectCache,
    MountHolders,
    MountOrigins,
    Repository,
    UnlistedReferrerError,
    is_generated,
)
from clowder_aimage.trust.collection import CARRIED, RegistryPlace, iter_carried
from clowder_aimage.trust.simple_signing import build_signature_tag

# Searches for signatures at once
_SEARCHES = 8
_log = logging.getLogger("aimage.registry")

# The form of an image that runtimes mount; not a dialect, because its blobs are others.
MOUNTABLE = "image"
OnFallback = Callable[[str, AImageError], None]
OnRemembered = Callable[[str, str], None]


def push(
    store: ContentStore,
    reference: Reference,
    connection: ClientOptions,
    *,
    dialect: str | None = None,
    fallback: bool = True,
    on_event: OnEvent = ignore,
    on_fallback: OnFallback = lambda *_: None,
    ladder: DialectCache | None = None,
    on_remembered: OnRemembered = lambda *_: None,
) -> Descriptor:
    """Push the artifact ``reference`` in ``store`` to the registry in that name.

    A manifest is pushed unchanged, or rewritten in ``dialect``; MOUNTABLE sends an image with the
    model's files instead. If the registry refuses that kind
    of manifest, the next dialect is tried, unless ``fallback`` is off or the push is by digest; the
    blobs are already uploaded, and the local tag does not change. Dialects that the registry
    refused are stored in ``ladder``, and tried last by the next push without a ``dialect``. Blobs
    that another repository of the registry has, by the names in ``store``, are mounted.

    ``on_fallback`` is called with the next dialect and the reason; ``on_remembered`` with the
    dialect that is tried first because of ``ladder``, and the dialect that it replaces.

    Returns:
        The descriptor of the manifest in the registry.

    Raises:
        UsageError: the reference has no registry host, or asks for a rewrite by digest.
        ModelError: the manifest of each dialect exceeds registries' limit; nothing was sent.
        ManifestRefusedError: no dialect is left to try.
        NotFoundError: it is not in the store, or neither the store nor the registry has a blob.
        UnauthorizedError, NetworkError, RegistryError: it cannot be sent.
        VerificationError: the copy in the store is damaged.
    """
    if reference.digest is not None and dialect is not None:
        raise UsageError(
            f"cannot push {reference} in another dialect, which would change its digest",
            hint="push by tag to rewrite it",
        )
    target = connection.expand(reference)
    host = target.registry or ""
    memory = ladder or DialectCache(None)
    origins = MountOrigins(MountHolders(store, target), on_event)
    with (
        start_span("push", reference=str(reference)),
        store.lease() as lease,
        Repository(reference, connection, origins) as repository,
    ):
        stored, stored_plan = _read(store, reference, dialect, lease)

        def send(source: Source) -> Descriptor:
            plan = stored_plan
            if source is not store:
                plan = plan_copy(source, source.resolve(reference))
            # First: once the tag exists, its signatures do, too.
            _push_signatures(store, _list_signed(plan, stored_plan, dialect), reference, repository)
            if stored is not None:
                source, plan = _order_missing_first(store, source, plan, stored, reference)
            return _copy(
                source, reference, repository, connection.compute_connections(host), on_event, plan
            )

        if stored is None:
            return send(store)
        names = [dialect or stored.dialect.name]
        if fallback and reference.digest is None:
            refused = memory.list_refused(host) if dialect is None else frozenset()
            names = _order_dialects(names[0], refused, on_remembered)

        def send_in(name: str) -> Descriptor:
            return send(_rewrite(store, stored, reference, name))

        try:
            return _descend(names, send_in, on_fallback, memory, host)
        except AccessError as error:
            advice = _choose_advice(error, reference)
            error.remedy = error.remedy or advice.pop("remedy", "")
            error.facts |= advice
            raise


def transfer(
    source: Reference,
    target: Reference,
    connection: ClientOptions,
    *,
    recursive: bool = False,
    on_event: OnEvent = ignore,
) -> Descriptor:
    """Copy the artifact ``source`` unchanged to ``target``, without storing it on disk.

    Each blob is streamed, or mounted within one registry if that is allowed. With ``recursive``
    attached artifacts are copied first, at all levels.

    Raises:
        UsageError: a name without a registry host, or a digest that is not the source's.
        ManifestRefusedError: the target's registry refuses this kind of manifest.
        UnauthorizedError, NetworkError, RegistryError: it cannot be read or pushed.
        VerificationError, FormatError: the bytes differ from their descriptors.
    """
    source, target = connection.expand(source), connection.expand(target)
    with _open_repositories(source, target, connection, on_event) as (
        source_repository,
        target_repository,
    ):
        if target.digest is not None:
            digest = source.digest or source_repository.resolve(source).digest
            if target.digest != digest:
                raise UsageError(
                    f"the source has the digest {digest}, but the target is {target}",
                    hint="omit the digest of the target",
                )
        connections = connection.compute_connections(source.registry, target.registry)
        return _transfer(
            source_repository,
            target_repository,
            [(source, target)],
            recursive,
            connections,
            on_event,
        )[0]


def transfer_tags(
    source: Reference,
    target: Reference,
    connection: ClientOptions,
    *,
    recursive: bool = False,
    on_event: OnEvent = ignore,
) -> dict[str, Descriptor]:
    """Copy all tags of the repository of ``source`` to that of ``target``; return them by name.

    The tags are in order; those of lists of referrers are not copied. Raises as ``transfer`` does.
    """
    source, target = connection.expand(source), connection.expand(target)
    with _open_repositories(source, target, connection, on_event) as (
        source_repository,
        target_repository,
    ):
        listed = frozenset(source_repository.list_tag_names())
        tags = sorted(tag for tag in listed if not is_generated(tag))
        pairs = [(replace(source, tag=tag), replace(target, tag=tag)) for tag in tags]
        connections = connection.compute_connections(source.registry, target.registry)
        roots = _transfer(
            source_repository, target_repository, pairs, recursive, connections, on_event, listed
        )
        return dict(zip(tags, roots, strict=True))


def _transfer(
    source_repository: Repository,
    target_repository: Repository,
    pairs: Sequence[tuple[Reference, Reference]],
    recursive: bool,
    connections: int,
    on_event: OnEvent,
    tags: Collection[str] | None = None,
) -> list[Descriptor]:
    """Copy each source to its target, with one plan for the events; return the roots.

    ``tags`` are those of the repository of the sources, if they are known.
    """
    plans = _plan_transfer(source_repository, pairs, recursive, tags)
    size = sum(plan.size for plan, _ in plans.values())
    count = sum(len(plan.blobs) for plan, _ in plans.values())
    if len(plans) > 1:
        on_event(CopyEvent("plan", plans[pairs[-1][1]][0].root, size, count))

    def on_copy_event(event: CopyEvent) -> None:
        # The plan of a single copy is repeated if its blobs are sent again.
        if event.kind != "plan" or len(plans) == 1:
            on_event(event)

    unlisted: list[UnlistedReferrerError] = []
    names = [reference for pair in pairs for reference in pair]
    for key, (plan, name) in plans.items():
        is_statement = _is_statement(plan)
        try:
            _copy(source_repository, name, target_repository, connections, on_copy_event, plan)
        except AccessError as error:
            if not recursive and isinstance(key, Digest):
                _leave_out(key, error, () if is_statement else names)
            elif isinstance(error, UnlistedReferrerError):
                # The attached artifact is in the registry: the others are copied, too.
                unlisted.append(error)
            elif isinstance(error, ManifestRefusedError):
                error.hint = "a copy does not rewrite manifests: pull, tag and push it instead"
                raise
            else:
                raise
    if unlisted:
        raise unlisted[0]
    return [target_repository.describe_pushed(plans[target][0].root) for _, target in pairs]


def _plan_transfer(
    source_repository: Repository,
    pairs: Sequence[tuple[Reference, Reference]],
    recursive: bool,
    tags: Collection[str] | None,
) -> dict[Digest | Reference, tuple[CopyPlan, Reference]]:
    """Return the plans and names of the copies, attached artifacts before their subjects."""
    plans: dict[Digest | Reference, tuple[CopyPlan, Reference]] = {}
    # Several tags may name one manifest.
    searched: set[Digest] = set()
    for source, target in pairs:
        plan = plan_copy(source_repository, source_repository.resolve(source))
        # Attached artifacts come first: once the tag exists, its signatures do, too.
        subjects = {content.digest: None for content, _ in plan.documents}.keys() - searched
        # One repository has them already
        if not recursive and source.canonical.name != target.canonical.name:
            searched |= subjects
            place = RegistryPlace(source_repository, source, tags)
            for subject, root in _list_signatures(place, subjects):
                copied = _plan_signature(source_repository, source, target, subject, root)
                if copied is not None:
                    plans[root.digest] = copied
        for content, _ in plan.documents if recursive else ():
            for _, _, entry in source_repository.iter_referrers(content.digest):
                # Registries may list referrers that were deleted.
                with contextlib.suppress(NotFoundError):
                    root = source_repository.resolve(source.with_digest(entry.digest))
                    plans[root.digest] = (
                        plan_copy(source_repository, root),
                        target.with_digest(root.digest),
                    )
        plans[target] = plan, target
    return plans


def _plan_signature(
    repository: Repository, source: Reference, target: Reference, subject: Digest, root: Descriptor
) -> tuple[CopyPlan, Reference] | None:
    """Return the copy of a signature and its name; None for what is none, or cannot be read."""
    is_statement = root.extra.get("artifactType") == mediatype.AIMAGE_DERIVATION
    content = Descriptor(root.media_type, root.digest, root.size)
    try:
        plan = plan_copy(repository, content)
    except (NotFoundError, ContentError):
        return None
    except AccessError as error:
        _leave_out(root.digest, error, () if is_statement else (source, target))
        return None
    if root.extra.get("artifactType") in CARRIED:
        return plan, target.with_digest(root.digest)
    _, document = plan.documents[-1]
    kinds = {child.media_type for child in document.children[1:]}
    if not isinstance(document, Manifest) or kinds != {mediatype.SIMPLE_SIGNING}:
        return None
    return plan, replace(target, tag=build_signature_tag(subject), digest=None)


def _is_statement(plan: CopyPlan) -> bool:
    return plan.documents[-1][1].artifact_type == mediatype.AIMAGE_DERIVATION


def _leave_out(artifact: Digest, error: AccessError, names: Sequence[Reference]) -> None:
    """Note that a signature, or without ``names`` a statement, is not carried.

    Raises the error if a policy demands a signature for one of the names.
    """
    gate = find_gate()
    if gate is not None and any(map(gate.demands, names)):
        raise error
    kind = "signature" if names else "statement of a derivation"
    # Some registries accept container images only.
    is_usual = not names and isinstance(error, ManifestRefusedError)
    level = logging.INFO if is_usual else logging.WARNING
    _log.log(level, "the %s %s is left out: %s", kind, artifact, error.message)


def _list_signatures(
    place: RegistryPlace, subjects: Collection[Digest]
) -> list[tuple[Digest, Descriptor]]:
    """Return the signatures of manifests: bundles, and the manifests of cosign's older form.

    Statements of derivations are copied with them. A registry that does not answer has none to
    copy; a policy then refuses the copy.
    """

    def list_carried(subject: Digest) -> Sequence[Descriptor]:
        with contextlib.suppress(AccessError, FormatError):
            return place.list_carried(subject)
        return ()

    def find_tagged(subject: Digest) -> Sequence[Descriptor]:
        with contextlib.suppress(AccessError, FormatError):
            return [tagged] if (tagged := place.find_tagged(subject)) else ()
        return ()

    # At once: most manifests have none, and each answer takes a round trip
    with ThreadPoolExecutor(_SEARCHES, "signatures") as pool:
        searches = [
            (subject, pool.submit(copy_context().run, search, subject))
            for subject in sorted(subjects, key=str)
            for search in (list_carried, find_tagged)
        ]
        return [(subject, found) for subject, search in searches for found in search.result()]


def _list_signed(plan: CopyPlan, stored: CopyPlan, dialect: str | None) -> set[Digest]:
    """Return the digests of the documents that are pushed, and of the AImage in an image."""
    plans = (plan, stored) if dialect == MOUNTABLE else (plan,)
    return {content.digest for each in plans for content, _ in each.documents}


def _push_signatures(
    store: ContentStore, digests: Collection[Digest], reference: Reference, repository: Repository
) -> None:
    """Push the signatures of these documents that the store has, and what it attached.

    A tag with signatures of the registry's own is left as it is.
    """
    if not isinstance(store, ImageLayout):
        return
    for name, content in iter_carried(store, reference, digests):
        target = replace(reference, tag=name.tag, digest=None if name.tag else content.digest)
        if name.tag is not None:
            with contextlib.suppress(NotFoundError):
                repository.resolve(target)
                continue
        try:
            with unchecked():
                attached = plan_copy(store, content)
            copy(store, name, repository, target, plan=attached)
        except NotFoundError:
            # Another program has removed it
            continue
        except UnlistedReferrerError:
            # It is in the registry.
            continue
        except AccessError as error:
            _leave_out(content.digest, error, () if _is_statement(attached) else (reference,))


def _copy(
    source: Source,
    reference: Reference,
    target: Repository,
    connections: int,
    on_event: OnEvent,
    plan: CopyPlan,
) -> Descriptor:
    """Copy ``plan``; return the root as the registry states it.

    If the registry then misses a blob that it has mounted, these blobs are uploaded.
    """

    def send() -> Descriptor:
        root = copy(
            source, reference, target, concurrency=connections, on_event=on_event, plan=plan
        )
        return target.describe_pushed(root)

    try:
        return send()
    except RegistryError as error:
        if not error.is_blob_unknown or not target.stop_mounting():
            raise
    return send()


@contextlib.contextmanager
def _open_repositories(
    source: Reference, target: Reference, connection: ClientOptions, on_event: OnEvent
) -> Iterator[tuple[Repository, Repository]]:
    """Open the repositories of a copy. Raises UsageError: a name has no host."""
    for name in (source, target):
        if name.registry is None:
            raise UsageError(
                f"copy requires two names with a registry host, and {name} has none",
                remedy="copy_from_store" if name is source else "copy_to_store",
                source=source,
                target=target,
            )
    is_near = source.registry == target.registry and source.repository != target.repository
    origins = MountOrigins(lambda _: [source.canonical.repository] if is_near else [], on_event)
    with (
        start_span("copy", source=str(source), reference=str(target)),
        Repository(source, connection) as source_repository,
        Repository(target, connection, origins) as target_repository,
    ):
        yield source_repository, target_repository


def _read(
    store: ContentStore, reference: Reference, dialect: str | None, lease: Lease
) -> tuple[StoredAImage | None, CopyPlan]:
    """Read and lease the AImage; return None for another artifact: it is pushed unchanged.

    Return the plan to copy the artifact as it is, too.
    """
    root = lease_manifest(store, reference, lease)
    _check_sizes(store, root, reference)
    plan = plan_copy(store, root)
    lease.add(*plan.digests)
    store.use(root)
    try:
        stored = read_aimage(store, reference)
    except FormatError:
        if dialect is not None:
            raise
        return None, plan
    lease.add(*(layer.descriptor.digest for layer in stored.aimage.layers))
    inflate(store, stored)
    return stored, plan


def _order_missing_first(
    store: ContentStore, source: Source, plan: CopyPlan, stored: StoredAImage, reference: Reference
) -> tuple[Source, CopyPlan]:
    """Put blobs that the store lacks first; reading them raises the error for them."""
    absent = {blob.digest for blob in plan.blobs if not source.exists(blob)}
    if not absent:
        return source, plan
    words = describe_missing(stored, check_stored(store, stored))
    error = NotFoundError(
        f"{reference} is incomplete, and its registry does not have the rest: the store is "
        f"missing {words or f'{len(absent)} of its blobs'}",
        **suggest_completion(store, reference, stored.descriptor, prefer_other=True),
    )
    return _PartialSource(source, absent, error), plan.put_first(absent)


def _build_image(store: ContentStore, stored: StoredAImage, reference: Reference) -> Source:
    # Only this form needs the exporter.
    from clowder_aimage.exporter.image import ImageSource

    require_complete(store, reference, stored)
    return ImageSource(store, stored, reference)


class _UnfitError(ModelError):
    """The AImage cannot be written in a dialect."""


class _PartialSource(WrappedSource):
    """A source without some blobs. Reads of these raise ``error``."""

    def __init__(self, source: Source, missing: Collection[Digest], error: NotFoundError) -> None:
        super().__init__(source)
        self._missing, self._error = missing, error

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        if content.digest in self._missing:
            raise self._error
        return super().open(content, offset, length)


def _check_sizes(store: ContentStore, root: Descriptor, reference: Reference) -> None:
    """Raise ModelError if a document exceeds the size limit of registries."""

    def read(content: Descriptor) -> Manifest | Index | None:
        if content.size > MAX_MANIFEST_SIZE:
            raise ModelError(
                f"the manifest {content.digest} of {reference} is too large: it has "
                f"{content.size} bytes, and registries accept at most {MAX_MANIFEST_SIZE}",
                hint="pack the model into fewer layers, such as its experts together",
            )
        return read_document(store, content) if content.media_type in mediatype.INDEXES else None

    deque(walk(read, root), maxlen=0)


def _order_dialects(
    preferred: str, refused: Collection[str], on_remembered: OnRemembered
) -> list[str]:
    """Return the ladder from ``preferred`` down, with the ``refused`` dialects at the end."""
    # Another vendor's dialect has no fallback.
    if preferred not in FALLBACK_ORDER:
        return [preferred]
    names = sorted(
        FALLBACK_ORDER[FALLBACK_ORDER.index(preferred) :], key=lambda name: name in refused
    )
    if names[0] != preferred:
        on_remembered(names[0], preferred)
    return names


def _descend(
    names: list[str],
    send: Callable[[str], Descriptor],
    on_fallback: OnFallback,
    memory: DialectCache,
    host: str,
) -> Descriptor:
    """Push in the first dialect that fits and is accepted."""
    # The first attempt uploads all blobs. Later attempts send manifests and configs only.
    refused: list[str] = []
    reasons: list[AImageError] = []
    for name in names:
        if reasons:
            on_fallback(name, reasons[-1])
        try:
            sent = send(name)
        except (ManifestRefusedError, _UnfitError) as error:
            reasons.append(error)
            refused += [name] if isinstance(error, ManifestRefusedError) else []
        except AccessError as error:
            error.facts["dialect"] = name
            raise
        else:
            memory.record(host, refused, name)
            return sent
    # If all dialects are refused, the cause is another one, and the cache would mislead.
    if len(refused) > 1:
        memory.remove(host)
    raise _choose_error(reasons, names)


def _choose_error(reasons: list[AImageError], names: list[str]) -> AImageError:
    """Return the error after the last dialect: that of the registry, if there is one."""
    refusals = [reason for reason in reasons if isinstance(reason, ManifestRefusedError)]
    if not refusals:
        return reasons[0]
    refusals[-1].facts["dialect"] = names[-1]
    if len(reasons) > 1:
        unfit = [str(reason) for reason in reasons if reason not in refusals]
        refusals[-1].hint = "; ".join(["no other dialect is left to try", *unfit])
    return refusals[-1]


def _choose_advice(error: AccessError, reference: Reference) -> dict[str, str]:
    """Return the advice to push in the most widely accepted dialect, if that may help."""
    is_refused = isinstance(error, ManifestRefusedError)
    may_be_refused = is_refused or "manifest" in error.facts
    if not may_be_refused or error.facts["dialect"] == FALLBACK_ORDER[-1]:
        return {}
    if reference.digest is not None:
        return {"remedy": "push_by_tag", "name": reference.name, "reference": str(reference)}
    if isinstance(error, UnauthorizedError):
        return {"remedy": "denied_manifest"}
    return {"remedy": "push_dialect"} if is_refused else {"remedy": "unclear_refusal"}


def _rewrite(store: ContentStore, stored: StoredAImage, reference: Reference, name: str) -> Source:
    """Return a view of the store with ``stored`` in the dialect ``name``, or as an image."""
    if name == MOUNTABLE:
        return _build_image(store, stored, reference)
    if name == stored.dialect.name:
        return store
    dialect = READABLE[name]
    try:
        manifest, config = dialect.write(stored.aimage)
    except FormatError as error:
        raise _UnfitError(
            f"cannot write the AImage in the {dialect.name} dialect: {error}", hint=error.hint
        ) from None
    return Overlay.of(manifest, config, source=store)
