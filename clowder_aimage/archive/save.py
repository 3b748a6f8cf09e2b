"""save: artifacts of a layout into one tar, that is the same for the same content."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.archive.file import Writer, whole_file
from clowder_aimage.archive.tree import (
    StoredGraph,
    add,
    blob_name,
    lacking,
    read_document,
    read_tree,
)
from clowder_aimage.content import CopyEvent, OnEvent, VerifyingReader
from clowder_aimage.content.copy_event import ignore
from clowder_aimage.content.store import Lease
from clowder_aimage.content.verified_reader import check_size
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_stored, completion, describe_missing
from clowder_aimage.layout.index import LAYOUT_FILE
from clowder_aimage.layout.lock import store_errors
from clowder_aimage.layout.stored_aimage import hold, read_aimage
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.oci.manifest import encode

_END = bytes(2 * tarfile.BLOCKSIZE)  # POSIX pax, "ustar Interchange Format": two blocks of zeros


@dataclass(frozen=True, slots=True)
class SaveResult:
    """An archive of ``size`` bytes, with its ``digest`` where that was asked for: what was named,
    and the manifests that indexes list but the store lacks."""

    size: int
    digest: Digest | None
    names: tuple[tuple[Reference, Descriptor], ...]
    left_out: tuple[Descriptor, ...]


def save(
    layout: ImageLayout,
    references: Sequence[Reference],
    target: Path | BinaryIO,
    *,
    hashed: bool = False,
    on_event: OnEvent = ignore,
) -> SaveResult:
    """Write what ``references`` name, and all that it needs, as an OCI image layout in a tar.

    Each blob is in it once, verified on its way. The names come first, then the manifests, parents
    before children, so that a reader of the stream knows what will come; all else is in the order
    of digests. Of an index, the manifests that are not in the layout are left out. ``target`` is a
    file's path, where the archive appears when it is whole, or an unbuffered stream. With
    ``hashed``, the digest of the archive itself is returned too.

    Raises:
        UsageError: a name is given twice, for two things.
        NotFoundError: a name, or something that it needs, is not in the layout.
        VerificationError, FormatError: what is there is not what its digest says, or means nothing.
        NoSpaceError: it would not fit.
        StoreError: the layout cannot be read, or the archive not written.
    """
    with layout.lease() as lease:
        archive = _Archive(layout, references, lease)
        with (
            whole_file(target, archive.size, hashed=hashed)
            if isinstance(target, Path)
            else Writer(target, "on stdout", hashed=hashed)
        ) as writer:
            archive.write(writer, on_event)
    for _, root in archive.names:
        layout.use(root)
    return SaveResult(
        archive.size, writer.digest, archive.names, tuple(archive.tree.absent.values())
    )


@dataclass(frozen=True, slots=True)
class _Member:
    """An entry: its header, and what follows it."""

    header: bytes
    content: bytes | Descriptor = b""

    @property
    def length(self) -> int:
        """The bytes of the content."""
        return self.content.size if isinstance(self.content, Descriptor) else len(self.content)

    @property
    def padding(self) -> bytes:
        return bytes(-self.length % tarfile.BLOCKSIZE)

    @property
    def size(self) -> int:
        """The bytes that it takes in the archive."""
        return len(self.header) + self.length + len(self.padding)


class _Archive:
    """What is to be written, decided from the manifests alone."""

    def __init__(self, layout: ImageLayout, references: Sequence[Reference], lease: Lease) -> None:
        self._layout = layout
        self._lease = lease
        self.names = tuple(
            sorted(self._resolve(references).items(), key=lambda named: str(named[0]))
        )
        self.tree = StoredGraph()
        for reference, root in self.names:
            self._add(reference, read_tree(layout, root))
        self._index = encode(self._index_document())
        self._members = list(self._plan())
        self.size = sum(member.size for member in self._members) + len(_END)

    def _resolve(self, references: Sequence[Reference]) -> dict[Reference, Descriptor]:
        """What the archive calls them, and what they name; a tag wins over the digest."""
        names: dict[Reference, Descriptor] = {}
        for reference in references:
            name = replace(reference, digest=None) if reference.tag else reference
            root = hold(self._layout, reference, self._lease)
            if names.setdefault(name, root).digest != root.digest:
                raise UsageError(f"{name} cannot name both {names[name].digest} and {root.digest}")
        return names

    def _add(self, reference: Reference, tree: StoredGraph) -> None:
        self._lease.add(*tree.digests)
        if tree.is_hollow:
            raise NotFoundError(
                f"no manifest of the index {reference} is in the store",
                hint=f"to fetch all of them: aimage pull --whole {reference}",
            )
        for blob in lacking(self._layout, tree.blobs):
            try:
                check_size(blob, self._layout.path(blob).stat().st_size)
            except NotFoundError:
                self._refuse_part(reference)
                raise
        for into, found in (
            (self.tree.documents, tree.documents),
            (self.tree.blobs, tree.blobs),
            (self.tree.absent, tree.absent),
        ):
            for content in found.values():
                add(into, content)

    def _refuse_part(self, reference: Reference) -> None:
        """Say what is missing of an AImage that is here in part."""
        try:
            stored = read_aimage(self._layout, reference)
        except AImageError:  # another kind of artifact, or an index
            return
        words = describe_missing(stored, check_stored(self._layout, stored))
        raise NotFoundError(
            f"{reference} is not complete: {words} of it are not in the store",
            **completion(self._layout, reference, stored.descriptor),
        ) from None

    def _index_document(self) -> dict[str, object]:
        entries = [self._entry(reference, root) for reference, root in self.names]
        return {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": entries}

    def _entry(self, reference: Reference, root: Descriptor) -> dict[str, object]:
        """An entry of index.json as the layout writes it for that name, wherever it has it from."""
        document = read_document(self._layout, root)
        entry = document.descriptor.to_json() | {"digest": str(root.digest)}
        if isinstance(document, Manifest) and document.artifact_type:
            entry["artifactType"] = document.artifact_type
        name = str(reference)
        return entry | {"annotations": {mediatype.CONTAINERD_NAME: name, mediatype.REF_NAME: name}}

    def _plan(self) -> Iterator[_Member]:
        yield _file("oci-layout", LAYOUT_FILE)
        yield _file("index.json", self._index)
        documents = list(self.tree.documents.values())
        blobs = [self.tree.blobs[digest] for digest in sorted(self._loose())]
        yield _directory("blobs")
        for algorithm in sorted({content.digest.algorithm for content in documents + blobs}):
            yield _directory(f"blobs/{algorithm}")
        for content in documents + blobs:
            yield _file(blob_name(content.digest), content)

    def _loose(self) -> set[Digest]:
        """The blobs that are no documents of their own."""
        return self.tree.blobs.keys() - self.tree.documents.keys()

    def write(self, writer: Writer, on_event: OnEvent) -> None:
        """Write all of it. Raises VerificationError where a blob is not what its digest says."""
        blobs = [self.tree.blobs[digest] for digest in self._loose()]
        whole = Descriptor.of(mediatype.OCI_INDEX, self._index)
        root = self.names[0][1] if len(self.names) == 1 else whole
        on_event(CopyEvent("plan", root, sum(blob.size for blob in blobs), len(blobs)))
        for member in self._members:
            writer.write(member.header)
            if isinstance(member.content, bytes):
                writer.write(member.content)
            elif member.content.digest in self.tree.documents:
                self._pass(writer, member.content, ignore)
            else:
                on_event(CopyEvent("start", member.content, member.content.size))
                self._pass(writer, member.content, on_event)
                on_event(CopyEvent("done", member.content, member.content.size))
            writer.write(member.padding)
        writer.write(_END)

    def _pass(self, writer: Writer, content: Descriptor, on_event: OnEvent) -> None:
        """From the layout into the archive, verified by the end."""
        with VerifyingReader(self._layout.open(content), content) as reader:
            while True:
                with store_errors(self._layout.root):
                    count = reader.readinto(writer.room)
                if not count:
                    return
                writer.filled(count)
                on_event(CopyEvent("progress", content, count))


def _file(name: str, content: bytes | Descriptor) -> _Member:
    size = content.size if isinstance(content, Descriptor) else len(content)
    return _Member(_header(name, size=size, mode=0o644), content)


def _directory(name: str) -> _Member:
    return _Member(_header(name, type=tarfile.DIRTYPE, mode=0o755))


def _header(name: str, **fields: object) -> bytes:
    """A ustar header without owner and time; with a pax header before it where a name or a size is
    too long for one."""
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT, "ascii", "strict")
