"""load: store an OCI image layout from a tar in a layout, verifying each blob."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clowder_aimage.content import CopyPlan, copy, plan_copy
from clowder_aimage.content.fetch import check_space
from clowder_aimage.content.gate import Gate, find_gate, unchecked
from clowder_aimage.content.graph import (
    UNKNOWN,
    is_document,
    list_successors,
    parse_content,
    read_document,
)
from clowder_aimage.content.store import Lease, build_bytes_body
from clowder_aimage.content.tar_store import TarMember, TarStream, open_archive
from clowder_aimage.content.verified_reader import check_size, read_all, verify
from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import (
    ContentError,
    FormatError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.entry_name import find_entry_name
from clowder_aimage.layout.stored_aimage import inflate_copied
from clowder_aimage.oci import (
    MAX_MANIFEST_SIZE,
    Descriptor,
    Digest,
    Index,
    Reference,
    mediatype,
)
from clowder_aimage.oci.descriptor import MAX_SIZE
from clowder_aimage.trust.bundle import MEDIA_TYPE
from clowder_aimage.trust.lineage import adopt_statement

_MAX_LAYOUT_FILE = 4096  # bytes of oci-layout
# Each name is a separate durable write.
_MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The names that were set, and the counts of newly stored and existing blobs.

    ``unnamed`` are entries without a name, as text; ``problem`` is the reason for missing names.
    """

    names: tuple[tuple[Reference, Descriptor], ...]
    unnamed: tuple[str, ...]
    blobs: int
    skipped: int
    problem: ContentError | None


def load(
    layout: ImageLayout,
    archive: Path | io.FileIO,
    name: Reference | None = None,
    *,
    on_plan: Callable[[int], None] = lambda _: None,
    on_read: Callable[[int], None] = lambda _: None,
) -> LoadResult:
    """Store the content of an archive, and set its names if their content is complete.

    ``archive`` is a path, also of a list of volumes, or an unbuffered stream. It is read once.
    ``name`` replaces the names in the archive. ``on_plan`` is called with the number of bytes to
    read, once it is known, ``on_read`` with the number of bytes read.

    Raises:
        UsageError: no entry has a name, or several manifests would get the same name.
        NotFoundError: the archive does not exist, or one of its volumes.
        FormatError: it is not a layout in a tar, or has members that a layout cannot have.
        VerificationError: a blob differs from its digest; it was not stored.
        NoSpaceError: the content does not fit.
        StoreError: the archive cannot be read, or the layout cannot be written.
    """
    with open_archive(archive) as (file, file_name):
        tar = TarStream(file, file_name, on_read)
        if tar.size:
            on_plan(tar.size)
        with layout.lease() as lease, layout.begin_batch():
            gate = find_gate()
            loader = _Loader(layout, lease, tar, name, None if tar.size else on_plan, gate)
            # Content of the archive has no name yet; the gate decides before it gets one.
            with unchecked():
                return loader.run()


@dataclass(slots=True)
class _Loader:
    """The loading of one archive. ``on_plan`` is called if its size is not known in advance."""

    layout: ImageLayout
    lease: Lease
    tar: TarStream
    name: Reference | None
    on_plan: Callable[[int], None] | None
    gate: Gate | None
    # The files of the archive that are not blobs.
    files: dict[str, bytes] = field(default_factory=dict)
    roots: list[Descriptor] = field(default_factory=list)
    # Of derivations: they get no name
    statements: list[Descriptor] = field(default_factory=list)
    names: dict[Reference, Descriptor] = field(default_factory=dict)
    # The content that the documents list.
    expected: dict[Digest, Descriptor] = field(default_factory=dict)
    documents: set[Digest] = field(default_factory=set)
    visited: set[Digest] = field(default_factory=set)
    stored: set[Digest] = field(default_factory=set)
    is_planned: bool = False

    def run(self) -> LoadResult:
        for member in self.tar.iter_members():
            self._read_member(member)
        if not self.roots:
            raise FormatError(
                f"{self.tar.name} is not an OCI image layout: it has no index.json",
                remedy="docker_archive",
            )
        names, problems = self._set_names()
        problem = VerificationError(
            f"{self.tar.name} is incomplete: {'; '.join(problems[:20])}",
            hint="the blobs that were read are kept; complete artifacts are named",
        )
        # The counts are of blobs. Manifests and indexes are not counted.
        stored = self.stored - self.documents
        skipped = self.visited - self.documents - stored
        known = {*self.names.values(), *self.statements}
        unnamed = [_describe(root) for root in self.roots if root not in known]
        return LoadResult(
            tuple(names), tuple(unnamed), len(stored), len(skipped), problem if problems else None
        )

    def _read_member(self, member: TarMember) -> None:
        """Store a member that belongs to a layout; skip other files."""
        if not member.name or member.name[-1].startswith("._"):
            # tar on macOS adds such files for extended attributes.
            return
        if member.name == ("oci-layout",):
            _check_version(self._read_small(member, _MAX_LAYOUT_FILE), self.tar.name)
        elif member.name == ("index.json",):
            self._read_index(self._read_small(member, MAX_MANIFEST_SIZE))
        elif member.name[0] == "blobs":
            self._read_blob(self._digest(member), member)

    def _read_small(self, member: TarMember, limit: int) -> bytes:
        """Read a small file. Raises FormatError if it is large, or differs from an earlier one."""
        (name,) = member.name
        if member.size > limit:
            raise FormatError(f"{name} in {self.tar.name} has {member.size} bytes, over {limit}")
        with member.open() as file:
            data = file.read(member.size)
        if self.files.setdefault(name, data) != data:
            raise FormatError(f"{self.tar.name} contains {name} twice, with different content")
        return data

    def _read_index(self, data: bytes) -> None:
        self.roots = _parse_entries(data, self.tar.name)
        self.statements = [root for root in self.roots if _is_statement(root)]
        others = [root for root in self.roots if not _is_statement(root)]
        if not others:
            raise FormatError(f"{self.tar.name} has only statements of derivations")
        self.names = _choose_names(others, self.name, self.tar.name)
        self._expect(self.roots)

    def _expect(self, contents: Iterable[Descriptor]) -> None:
        for content in contents:
            check_size(self.expected.setdefault(content.digest, content), content.size)

    def _digest(self, member: TarMember) -> Digest:
        try:
            _, algorithm, encoded = member.name
            return Digest(algorithm, encoded)
        except (ValueError, FormatError):
            name = "/".join(member.name)[:200]
            raise FormatError(f"{self.tar.name} contains {name!r}, an invalid blob path") from None

    def _read_blob(self, digest: Digest, member: TarMember) -> None:
        content = self.expected.get(digest) or Descriptor(UNKNOWN, digest, member.size)
        limit = MAX_MANIFEST_SIZE if is_document(content) else MAX_SIZE
        if member.size > limit:
            raise FormatError(f"{digest} in {self.tar.name} has {member.size} bytes, over {limit}")
        try:
            check_size(content, member.size)
            raw = self._store(content, member)
        except VerificationError as error:
            raise VerificationError(
                f"{self.tar.name} is damaged: {error.message}", hint="copy or save it again"
            ) from None
        if is_document(content):
            document = parse_content(raw, content) if raw else read_document(self.layout, content)
            self._expect(list_successors(document))

    def _store(self, content: Descriptor, member: TarMember) -> bytes | None:
        """Store a blob, or verify a repeated one; return a new document's bytes.

        Raises VerificationError.
        """
        if content.digest in self.visited:
            verify(member.open(), content)
            return None
        self.visited.add(content.digest)
        # The lease protects the blob until a name needs it.
        self.lease.add(content.digest)
        if self.layout.exists(content):
            return None
        self._check_space(content)
        self.stored.add(content.digest)
        # Read from the archive: a read from the layout would end the group commit.
        if is_document(content):
            raw = read_all(member.open(), content)
            self.layout.push(content, build_bytes_body(raw))
            return raw
        self.layout.push(content, lambda _=0: member.open())
        return None

    def _check_space(self, content: Descriptor) -> None:
        """Raise NoSpaceError if the remaining content, as far as it is known, does not fit."""
        incoming = [content]
        if content.digest in self.expected and not is_document(content) and not self.is_planned:
            self.is_planned = True
            expected = self.expected.values()
            incoming = [blob for blob in expected if not self.layout.exists(blob)]
            if self.on_plan is not None:
                self.on_plan(sum(blob.size for blob in expected))
        check_space(incoming, self.layout)

    def _set_names(self) -> tuple[list[tuple[Reference, Descriptor]], list[str]]:
        """Set the names whose content is complete; return them, and the problems of others."""
        set_names, problems = [], []
        own = dict[Digest, list[Reference]]()
        for entry in self.roots:
            own.setdefault(entry.digest, []).extend(_list_own_names(entry))
        # Signatures first: they admit others.
        order = sorted(self.names.items(), key=lambda item: not _is_signature(*item))
        for reference, root in order:
            try:
                self.lease.add(root.digest)
                missing, plan = self._plan(root)
                if plan is None or missing:
                    remainder = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                    problems.append(f"{reference} is missing {missing[0].digest}{remainder}")
                    continue
                origins = own[root.digest]
                if self.gate is not None:
                    self.gate.admit_named(self.layout, root, [reference, *origins])
                # For a policy that comes later, too
                others = [str(name) for name in origins if name.name != reference.name]
                self.layout.add_origins(root.digest, others)
                copy(self.layout, reference, self.layout, plan=plan)
                inflate_copied(self.layout, *plan.documents[-1])
            except ContentError as error:
                problems.append(f"{reference}: {error.message}")
            else:
                set_names.append((reference, root))
        for root in self.statements:
            try:
                self.documents.add(root.digest)
                adopt_statement(self.layout, root)
            except (ContentError, NotFoundError) as error:
                problems.append(f"{_describe(root)}: {error.message}")
        return set_names, problems

    def _plan(self, root: Descriptor) -> tuple[list[Descriptor], CopyPlan | None]:
        """Plan the naming of ``root``, and return its missing content."""
        if not self.layout.exists(root):
            return [root], None
        plan = plan_copy(self.layout, root, is_sparse=True)
        self.documents |= {content.digest for content, _ in plan.documents}
        self.lease.add(*plan.digests)
        if plan.absent and all(isinstance(document, Index) for _, document in plan.documents):
            # An index may lack manifests, but not all of them.
            return list(plan.absent), plan
        return plan.list_missing(self.layout), plan


def _is_signature(reference: Reference, root: Descriptor) -> bool:
    is_tagged = (reference.tag or "").endswith(".sig")
    return is_tagged or root.extra.get("artifactType") == MEDIA_TYPE


def _is_statement(root: Descriptor) -> bool:
    return root.extra.get("artifactType") == mediatype.AIMAGE_DERIVATION


def _list_own_names(root: Descriptor) -> list[Reference]:
    """Return the name of an entry in the archive, if it is one."""
    with suppress(UsageError):
        if text := find_entry_name(root.annotations):
            return [Reference.parse(text)]
    return []


def _check_version(raw: bytes, archive: str) -> None:
    with suppress(FormatError, LookupError, TypeError):
        if read_json(raw, "oci-layout")["imageLayoutVersion"] == "1.0.0":
            return
    raise FormatError(f"unsupported oci-layout in {archive}: expected version 1.0.0")


def _parse_entries(raw: bytes, archive: str) -> list[Descriptor]:
    """Parse the entries of index.json, at least one. Raises FormatError."""
    entries: Any = None
    with suppress(FormatError, LookupError, TypeError):
        entries = read_json(raw, "index.json")["manifests"]
    if not isinstance(entries, list):
        raise FormatError(f"index.json of {archive} is not an OCI index")
    if not 0 < len(entries) <= _MAX_ENTRIES:
        raise FormatError(
            f"index.json of {archive} lists {len(entries)} manifests, expected 1 to {_MAX_ENTRIES}"
        )
    return [Descriptor.from_json(entry, f"index.json of {archive}") for entry in entries]


def _choose_names(
    entries: list[Descriptor], name: Reference | None, archive: str
) -> dict[Reference, Descriptor]:
    """Return the names to set: ``name``, or those of the entries. Raises ContentError.

    The signatures of what gets another name follow it.
    """
    if name is not None:
        signatures = {moved: entry for entry in entries if (moved := _move(entry, name))}
        entries = [entry for entry in entries if entry not in signatures.values()] or entries
        if len({entry.digest for entry in entries}) > 1:
            raise UsageError(
                f"{archive} has {len(entries)} entries, but only one name was given: "
                + ", ".join(map(_describe, entries[:20])),
                remedy="load_without_as",
            )
        return {name: entries[0]} | signatures
    names: dict[Reference, Descriptor] = {}
    for entry in entries:
        reference = _parse_reference(entry)
        if reference and names.setdefault(reference, entry).digest != entry.digest:
            raise FormatError(
                f"{archive} has two manifests with the name {reference}: "
                f"{names[reference].digest}, {entry.digest}"
            )
    if not names:
        raise UsageError(
            f"{archive} has no name for {', '.join(map(_describe, entries[:20]))}", remedy="load_as"
        )
    return names


def _move(entry: Descriptor, name: Reference) -> Reference | None:
    """Return the name of a signature in the repository of ``name``; None for other content."""
    reference = _parse_reference(entry)
    if reference is None or not _is_signature(reference, entry):
        return None
    return replace(reference, registry=name.registry, repository=name.repository)


def _parse_reference(entry: Descriptor) -> Reference | None:
    """Return the name of an entry, or None if it has no valid one. Raises FormatError."""
    try:
        reference = Reference.parse(find_entry_name(entry.annotations))
    except UsageError:
        return None
    if reference.digest not in (None, entry.digest):
        raise FormatError(f"the name {reference} of {entry.digest} contains another digest")
    return reference


def _describe(entry: Descriptor) -> str:
    """Return the digest of an entry, and its name if it has one."""
    name = find_entry_name(entry.annotations)
    return f"{entry.digest} ({name[:100]!r})" if name else str(entry.digest)
