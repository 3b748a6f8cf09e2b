"""save: write artifacts of a layout to one tar, with the same bytes for the same content."""

from __future__ import annotations

import io
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.content import CopyPlan, Lease, OnEvent, copy, plan_copy
from clowder_aimage.content.atomic_file import open_atomic
from clowder_aimage.content.copy_option import ignore
from clowder_aimage.content.file_system import measure_space, set_mode
from clowder_aimage.content.open_directory import open_special, resolve
from clowder_aimage.content.tar_store import TarStream, TarTarget, is_tar, open_archive, write_error
from clowder_aimage.content.verified_reader import check_size
from clowder_aimage.content.volume import MAX_WRITTEN, VolumeReader, open_volumes
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NoSpaceError,
    NotFoundError,
    PolicyError,
    StoreError,
    UsageError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import require_complete
from clowder_aimage.layout.lock import translate_store_errors
from clowder_aimage.layout.stored_aimage import lease_manifest, read_aimage
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference, mediatype
from clowder_aimage.oci.manifest import encode, parse_document
from clowder_aimage.trust.collection import iter_carried

_MAX_LIST = 256 * 1024 * 1024
# Bytes by which a tar is told from a text
_FRONT = 512
# Hex digits of a digest
_SHA256 = 64
# A digest in a text, or the name of a blob's file.
_DIGEST = re.compile(rb"(?<![0-9a-f])([0-9a-f]{128}|[0-9a-f]{64})(?![0-9a-f])")


@dataclass(frozen=True, slots=True)
class SaveResult:
    """An archive of ``size`` bytes, with its ``digest`` if that was requested.

    ``absent`` are manifests of indexes that the store does not have, ``left_out`` the blobs that
    the receiver has.
    """

    size: int
    digest: Digest | None
    names: tuple[tuple[Reference, Descriptor], ...]
    absent: tuple[Descriptor, ...]
    left_out: tuple[Descriptor, ...] = ()


def save(
    layout: ImageLayout,
    references: Sequence[Reference],
    target: Path | BinaryIO,
    *,
    is_hashed: bool = False,
    known: Collection[Digest] = (),
    volume: int | None = None,
    on_event: OnEvent = ignore,
) -> SaveResult:
    """Write the artifacts ``references`` as an OCI image layout in a tar.

    Each blob is written once, and verified as it is read. Manifests of an index that are not in the
    layout are left out, as are blobs that the receiver has: those in ``known``. With ``volume`` the
    archive is written to files of at most that many bytes beside ``target``, a path.

    Names are sorted. ``target`` is an unbuffered stream, or the path of a file that is created when
    the archive is complete. With ``is_hashed`` the digest of the archive is also returned.

    Raises:
        UsageError: two manifests would have one name.
        NotFoundError: a name, or content that it needs, is not in the layout.
        VerificationError, FormatError: content differs from its digest, or is malformed.
        NoSpaceError: the archive does not fit.
        StoreError: the layout cannot be read, or the archive cannot be written.
    """
    with layout.lease() as lease:
        names = _resolve(layout, references, lease)
        planned = [(item, _plan(layout, *item, lease)) for item in names]
        for item in _list_carried(layout, names, lease):
            # What is named as a signature may be something else, which the policy refuses.
            with suppress(PolicyError):
                planned.append((item, _plan(layout, *item, lease)))
        pairs = sorted(planned, key=lambda pair: str(pair[0][0]))
        names, plans = [name for name, _ in pairs], [plan for _, plan in pairs]
        documents = {
            content.digest: (content, document)
            for plan in plans
            for content, document in reversed(plan.documents)
        }
        entries = [_encode_entry(name, *documents[root.digest]) for name, root in names]
        head = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX}
        index = encode(head | {"manifests": entries})
        plan = _merge(plans, documents, index)
        sent = tuple(blob for blob in plan.blobs if blob.digest not in known)
        left_out = tuple(blob for blob in plan.blobs if blob.digest in known)
        plan = replace(plan, blobs=sent)
        archive = TarTarget(index, plan)
        with (
            _open_output(target, archive.size, volume) as (file, name),
            translate_store_errors(layout.root),
        ):
            archive.open_file(file, name, is_hashed=is_hashed)
            copy(layout, names[0][0], archive, on_event=on_event, plan=plan)
    for _, root in names:
        layout.use(root)
    return SaveResult(archive.size, archive.digest, tuple(names), plan.absent, left_out)


def read_known(path: Path) -> set[Digest]:
    """Return the digests of the blobs in an archive, or those in a text.

    A text has any number of digests, such as the names of files in ``blobs/sha256``, and may come
    from a pipe.

    Raises:
        UsageError: it is an archive in a pipe.
        NotFoundError: the file does not exist.
        FormatError: it has no digest, or is a damaged archive.
        StoreError: it cannot be read.
    """
    with open_archive(path) as (file, name):
        if isinstance(file, VolumeReader):
            return _list_blobs(file, name)
        reader = io.BufferedReader(file)
        data = reader.read(_FRONT)
        if is_tar(data):
            if not file.seekable():
                raise UsageError(
                    f"{path} is an archive in a pipe", hint="write it to a file, and name that"
                )
            file.seek(0)
            return _list_blobs(file, name)
        data += reader.read(_MAX_LIST)
    names = {match.decode() for match in _DIGEST.findall(data)}
    if found := {Digest("sha256" if len(text) == _SHA256 else "sha512", text) for text in names}:
        return found
    raise FormatError(f"{path} has no digests", remedy="known_list")


def _list_blobs(file: io.FileIO | VolumeReader, name: str) -> set[Digest]:
    """Return the digests of the blobs in an archive. Raises FormatError, StoreError."""
    paths = [member.name for member in TarStream(file, name).iter_members()]
    return {Digest(*rest) for first, *rest in paths if first == "blobs" and len(rest) == 2}


def _resolve(
    layout: ImageLayout, references: Sequence[Reference], lease: Lease
) -> list[tuple[Reference, Descriptor]]:
    """Return the names in the archive, sorted, and their roots; a tag precedes a digest."""
    names: dict[Reference, Descriptor] = {}
    for reference in references:
        name = replace(reference, digest=None) if reference.tag else reference
        root = lease_manifest(layout, reference, lease)
        if names.setdefault(name, root).digest != root.digest:
            raise UsageError(f"{name} refers to two manifests: {names[name].digest}, {root.digest}")
    return sorted(names.items(), key=lambda entry: str(entry[0]))


def _list_carried(
    layout: ImageLayout, names: list[tuple[Reference, Descriptor]], lease: Lease
) -> list[tuple[Reference, Descriptor]]:
    """Return what travels with all manifests below these names: signatures and statements."""
    found = dict[Reference, Descriptor]()
    for name, root in names:
        documents = plan_copy(layout, root, is_sparse=True).documents
        digests = {content.digest for content, _ in documents}
        found |= dict(iter_carried(layout, name, digests))
    lease.add(*(root.digest for root in found.values()))
    return [item for item in found.items() if item[0] not in dict(names)]


def _plan(layout: ImageLayout, reference: Reference, root: Descriptor, lease: Lease) -> CopyPlan:
    """Plan the copy of one name. Raises NotFoundError if content is missing."""
    plan = plan_copy(layout, root, is_sparse=True)
    lease.add(*plan.digests)
    if plan.absent and all(isinstance(document, Index) for _, document in plan.documents):
        raise NotFoundError(
            f"no manifest of the index {reference} is in the store",
            remedy="pull_whole",
            reference=reference,
        )
    # A blob may exist with another size. That is damage, not absence.
    for blob in plan.list_missing(layout):
        try:
            check_size(blob, layout.find_path(blob).stat().st_size)
        except NotFoundError:
            _check_aimage(layout, reference)
            raise
    return plan


def _check_aimage(layout: ImageLayout, reference: Reference) -> None:
    """Raise NotFoundError with the missing components, if it is an AImage."""
    try:
        stored = read_aimage(layout, reference)
    except AImageError:
        # Other artifacts and indexes have no components.
        return
    require_complete(layout, reference, stored)


def _encode_entry(
    reference: Reference, root: Descriptor, document: Manifest | Index
) -> dict[str, object]:
    """Return an entry of index.json as the layout writes it for that name."""
    entry = document.descriptor.to_json() | {"digest": str(root.digest)}
    if isinstance(document, Manifest) and document.artifact_type:
        entry["artifactType"] = document.artifact_type
    name = str(reference)
    return entry | {"annotations": {mediatype.CONTAINERD_NAME: name, mediatype.REF_NAME: name}}


def _merge(
    plans: Sequence[CopyPlan],
    documents: dict[Digest, tuple[Descriptor, Manifest | Index]],
    index: bytes,
) -> CopyPlan:
    """Merge the plans of all names; the root of several is the index of the archive."""
    ordered = [*reversed(documents.values())]
    if len({plan.root.digest for plan in plans}) > 1:
        root = Descriptor.of(mediatype.OCI_INDEX, index)
        ordered.append((root, parse_document(index)))
    blobs = {blob.digest: blob for plan in plans for blob in plan.blobs}
    absent = {content.digest: content for plan in plans for content in plan.absent}
    return CopyPlan(tuple(ordered), tuple(blobs.values()), absent=tuple(absent.values()))


def _check_volumes(target: Path, mode: int | None, size: int, volume: int | None) -> None:
    """Raise UsageError if the archive cannot be written in volumes of this size."""
    if volume is None:
        return
    if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageError(f"volumes are files, and {target} is not one")
    if (count := -(-size // volume)) > MAX_WRITTEN:
        raise UsageError(
            f"the archive would have {count} volumes, over {MAX_WRITTEN}",
            hint=f"choose a size of at least {-(-size // MAX_WRITTEN)} bytes",
        )


@contextmanager
def _open_output(
    target: Path | BinaryIO, size: int, volume: int | None
) -> Iterator[tuple[BinaryIO, object]]:
    """Open a stream for ``size`` bytes, and return its name for errors.

    A link is followed, if it is not another user's. A file is created when it is complete; a named
    pipe or a device is written directly.
    """
    if not isinstance(target, Path):
        yield target, "on stdout"
        return
    try:
        final = resolve(target)
        mode = final.stat().st_mode if final.exists() else None
        _check_volumes(target, mode, size, volume)
        if mode is not None and stat.S_ISDIR(mode):
            hint = f"name a file in it: {target}/NAME.tar"
            raise UsageError(f"{target} is a directory", hint=hint)
        if mode is not None and not stat.S_ISREG(mode):
            with open_special(final) as pipe:
                yield pipe, target
            return
        if not final.parent.is_dir():
            raise StoreError(f"directory not found: {target.parent}")
        space = measure_space(final.parent)
        if space is not None and size > space.free:
            raise NoSpaceError(
                f"the archive requires {size / 1e6:.1f} MB, and {target.parent} has "
                f"{space.free / 1e6:.1f} MB free",
                hint="free some space, or write it to another disk",
            )

        if volume is not None:
            with open_volumes(final, volume) as volumes:
                yield volumes, target
            return

        # A replaced archive keeps its permissions.
        def keep_mode(fd: int) -> None:
            if mode is not None:
                set_mode(fd, stat.S_IMODE(mode), final)

        with open_atomic(final, prepare=keep_mode, removes_leftovers=True) as file:
            yield file, target
    except OSError as error:
        raise write_error(error, target) from error
