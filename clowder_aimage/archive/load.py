"""load: an OCI image layout in a tar into a layout, blob by blob, each verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from clowder_aimage.archive.name import ArchiveNames, check_layout, choose, read_entries
from clowder_aimage.archive.tape import Member, Tape, TapeSource
from clowder_aimage.archive.tree import DOCUMENTS, add, lacking, read_document, read_tree
from clowder_aimage.content.fetch import check_space
from clowder_aimage.content.store import Lease
from clowder_aimage.content.verified_reader import verify
from clowder_aimage.errors import (
    ContentError,
    FormatError,
    NotFoundError,
    StoreError,
    UsageError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.index import MAX_INDEX_SIZE
from clowder_aimage.layout.stored_aimage import inflate, read_aimage
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Digest, Manifest, Reference
from clowder_aimage.oci.descriptor import MAX_SIZE

_MAX_LAYOUT_FILE = 4096  # bytes of oci-layout
_UNKNOWN = "application/octet-stream"  # of a blob that nothing has named yet


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What got which name; entries without one, in words; how many blobs were taken in and how
    many were there; and why names were not given, where some were not."""

    names: tuple[tuple[Reference, Descriptor], ...]
    unnamed: tuple[str, ...]
    blobs: int
    skipped: int
    problem: ContentError | None


def load(
    layout: ImageLayout,
    archive: Path | BinaryIO,
    wanted: Reference | None = None,
    *,
    on_plan: Callable[[int], None] = lambda size: None,
    on_read: Callable[[int], None] = lambda count: None,
) -> LoadResult:
    """Take in what the archive has, a file or an unbuffered stream, and give it its names, or the
    one that is ``wanted``. A name is given when all that it needs is there; blobs that are there
    already are passed over.

    ``on_plan`` hears how many bytes there are, once that is known, ``on_read`` how many were read.

    Raises:
        UsageError: no entry has a name, or several have and one is wanted.
        NotFoundError: there is no such archive.
        FormatError: it is no layout in a tar, or has in it what no layout has.
        VerificationError: a blob is not what it is called; it was not taken in.
        NoSpaceError: it would not fit.
        StoreError: the archive cannot be read, or the layout not written.
    """
    with _opened(archive) as (file, name):
        source = TapeSource(file, name, on_read)
        if source.size:
            on_plan(source.size)
        tape = Tape(source)
        with layout.lease() as lease, layout.batch():
            return _Load(layout, lease, tape, wanted, None if source.size else on_plan).run()


@contextmanager
def _opened(archive: Path | BinaryIO) -> Iterator[tuple[BinaryIO, str]]:
    """The archive as an unbuffered stream, and what errors call it."""
    if not isinstance(archive, Path):
        yield archive, "the archive on stdin"
        return
    try:
        file = archive.open("rb", buffering=0)
    except FileNotFoundError:
        raise NotFoundError(f"there is no archive {archive}") from None
    except IsADirectoryError:
        raise UsageError(
            f"{archive} is a directory", hint="a layout in a directory is used with --store"
        ) from None
    except OSError as error:
        raise StoreError(f"cannot read {archive}: {error.strerror or error}") from error
    with file:
        yield cast(BinaryIO, file), str(archive)


class _Load:
    """One archive on its way in. ``on_plan`` is for one whose size nobody knows before."""

    def __init__(
        self,
        layout: ImageLayout,
        lease: Lease,
        tape: Tape,
        wanted: Reference | None,
        on_plan: Callable[[int], None] | None,
    ) -> None:
        self._layout = layout
        self._lease = lease
        self._tape = tape
        self._wanted = wanted
        self._on_plan = on_plan
        self._files: dict[str, bytes] = {}  # the small ones beside the blobs
        self._names: ArchiveNames | None = None
        self._expected: dict[Digest, Descriptor] = {}  # what the documents so far have named
        self._documents: set[Digest] = set()
        self._seen: set[Digest] = set()
        self._taken: set[Digest] = set()
        self._is_planned = False

    def run(self) -> LoadResult:
        for member in self._tape.members():
            self._take(member)
        if self._names is None:
            raise FormatError(
                f"{self._tape.name} is no OCI image layout: it has no index.json",
                hint="what older dockers save can be turned into one: "
                "skopeo copy docker-archive:FILE oci-archive:NEW:NAME",
            )
        return self._name(self._names)

    # -- members

    def _take(self, member: Member) -> None:
        """Take in what belongs to a layout; pass over what other tools put beside it."""
        if not member.name or member.name[-1].startswith("._"):
            return  # what macOS's tar adds to each file
        if member.name == ("oci-layout",):
            check_layout(self._small(member, _MAX_LAYOUT_FILE), self._tape.name)
        elif member.name == ("index.json",):
            self._read_index(self._small(member, MAX_INDEX_SIZE))
        elif member.name[0] == "blobs":
            self._blob(self._digest(member), member)

    def _small(self, member: Member, limit: int) -> bytes:
        """All of a small file. Raises FormatError where it is large, or came before, otherwise."""
        (name,) = member.name
        if member.size > limit:
            raise FormatError(f"{name} in {self._tape.name} has {member.size} bytes, over {limit}")
        with member.open() as file:
            data = file.read(member.size)
        if self._files.setdefault(name, data) != data:
            raise FormatError(f"{self._tape.name} has {name} twice, and not the same")
        return data

    def _read_index(self, data: bytes) -> None:
        entries = read_entries(data, self._tape.name)
        self._names = choose(entries, self._wanted, self._tape.name)
        for entry in entries:
            add(self._expected, entry)

    def _digest(self, member: Member) -> Digest:
        try:
            _, algorithm, encoded = member.name
            return Digest(algorithm, encoded)
        except (ValueError, FormatError):
            name = "/".join(member.name)
            raise FormatError(
                f"{self._tape.name} has {name[:200]!r}: no blob is called so"
            ) from None

    def _blob(self, digest: Digest, member: Member) -> None:
        content = self._content(digest, member.size)
        try:
            if digest in self._seen:
                verify(member.open(), content)
                return
            self._seen.add(digest)
            self._lease.add(digest)  # until it is named
            if not self._layout.exists(content):
                self._push(content, member)
        except VerificationError as error:
            raise VerificationError(
                f"{self._tape.name} is damaged: {error.message}", hint="copy or save it again"
            ) from None
        if content.media_type in DOCUMENTS:
            self._learn(content)

    def _learn(self, content: Descriptor) -> None:
        """Note what a manifest or an index says of what is to come."""
        document = read_document(self._layout, content)
        for child in document.children:
            if isinstance(document, Manifest):  # a layer is a blob whatever it calls itself
                child = replace(child, media_type=_UNKNOWN)
            add(self._expected, child)

    def _content(self, digest: Digest, size: int) -> Descriptor:
        """What a blob of that size should be. Raises where it cannot be that."""
        content = self._expected.get(digest) or Descriptor(_UNKNOWN, digest, size)
        limit = MAX_MANIFEST_SIZE if content.media_type in DOCUMENTS else MAX_SIZE
        if size > limit:
            raise FormatError(f"{digest} in {self._tape.name} has {size} bytes, over {limit}")
        if content.size != size:
            raise VerificationError(
                f"{digest} in {self._tape.name} has {size} bytes instead of the {content.size} "
                "that its descriptor promises"
            )
        return content

    def _push(self, content: Descriptor, member: Member) -> None:
        def body(_: int = 0, /) -> BinaryIO:
            return member.open()

        self._check_space(content)
        self._layout.push(content, body)
        self._taken.add(content.digest)

    def _check_space(self, content: Descriptor) -> None:
        """Raise NoSpaceError where what comes would not fit: all of it, once that is known."""
        coming = [content]
        is_named = content.digest in self._expected and content.media_type not in DOCUMENTS
        if is_named and not self._is_planned:
            self._is_planned = True
            coming = lacking(self._layout, self._expected)
            if self._on_plan is not None:
                self._on_plan(sum(each.size for each in self._expected.values()))
        check_space(coming, self._layout)

    # -- names

    def _name(self, names: ArchiveNames) -> LoadResult:
        """Give the names of which all is there."""
        given, problems = [], []
        for reference, root in names.named.items():
            try:
                if lacks := self._lacks(root):
                    more = f" and {len(lacks) - 1} more" if len(lacks) > 1 else ""
                    problems.append(f"{reference} lacks {lacks[0].digest}{more}")
                    continue
                self._layout.tag(root, reference)
                self._inflate(reference)
            except ContentError as error:
                problems.append(f"{reference}: {error.message}")
            else:
                given.append((reference, root))
        problem = None
        if problems:
            problem = VerificationError(
                f"{self._tape.name} is not complete: {'; '.join(problems[:20])}",
                hint="what is there of it is kept; names were given to what is whole",
            )
        taken = self._taken - self._documents
        skipped = self._seen - self._documents - taken
        return LoadResult(tuple(given), names.unnamed, len(taken), len(skipped), problem)

    def _lacks(self, root: Descriptor) -> list[Descriptor]:
        """What ``root`` needs and is not there. Of an index, manifests may have been left out."""
        self._lease.add(root.digest)
        if not self._layout.exists(root):
            return [root]
        tree = read_tree(self._layout, root)
        self._documents |= tree.documents.keys()
        self._lease.add(*tree.digests)
        return list(tree.absent.values()) if tree.is_hollow else lacking(self._layout, tree.blobs)

    def _inflate(self, reference: Reference) -> None:
        """Unpack blobs that another tool has compressed, where it is an AImage."""
        try:
            stored = read_aimage(self._layout, reference)
        except FormatError:
            return  # another kind of artifact: kept as it is
        inflate(self._layout, stored)
