"""The image layout as a content store."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.content.buffer import CHUNK_SIZE, new_buffer
from clowder_aimage.content.copy_option import CopyOptions
from clowder_aimage.content.fetch import fetch_blobs
from clowder_aimage.content.file_system import Space, measure_space
from clowder_aimage.content.gate import find_gate, unchecked
from clowder_aimage.content.graph import list_documents
from clowder_aimage.content.open_directory import resolve
from clowder_aimage.content.store import (
    UNKNOWN_SIZE,
    Body,
    ContentStore,
    IngestBusyError,
    Source,
    StoredFile,
)
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NotFoundError,
    StoreError,
    VerificationError,
)
from clowder_aimage.layout.entry_name import (
    get_name,
    is_named,
    is_same_name,
    list_spellings,
)
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.layout.fingerprint import compute_fingerprint
from clowder_aimage.layout.group_commit import GroupCommit
from clowder_aimage.layout.index import edit_index, write_index, write_pending
from clowder_aimage.layout.index_file import find_entries, iter_index, read_index
from clowder_aimage.layout.ingest import (
    FileIngest,
    LinkedBlob,
    build_blob_path,
    ingest_size,
    is_file,
    link_blob,
)
from clowder_aimage.layout.ingest_directory import IngestDirectory
from clowder_aimage.layout.lease import COLLECTION, FileLease
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    hold_lock,
    make_directory,
    open_regular,
    read_settled,
    sanitize_time,
    touch,
    translate_store_errors,
)
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.layout.origin import add_origins, list_origins
from clowder_aimage.layout.repository_record import RepositoryRecords
from clowder_aimage.layout.summary import keep_summary
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype, parse_document
from clowder_aimage.oci.manifest import is_unspecific

# The private directory of manifests that lost a name, with the time.
UNNAMED = "unnamed"
# That of the names that no collection removes
PINS = "pins"
# Seconds between two records of a manifest's use
_USE_INTERVAL = 60.0
# Seconds between two attempts
_INTERVAL = 0.02
# Seconds, and bytes per second: the longest wait for another ingest.
_WRITE_TIMEOUT, _WRITE_SPEED = 2.0, 50e6


class ImageLayout(ContentStore):
    """Content in ``root``: ``oci-layout``, ``index.json`` and ``blobs/<algorithm>/<encoded>``.

    Private files (locks, ingests, leases) are in ``root/.aimage``. The first write creates the
    directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names = MetadataFiles(root, "names")
        self._existed = False
        self._batch: GroupCommit | None = None
        self._joining = threading.Lock()
        # A process that runs long writes a large index by ``write_pending``, not with its changes
        self.defers_index = False

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories of the stores that are read; only the first is written."""
        return (self.root,)

    def read_only_names(self) -> dict[str, Path]:
        """Return the names that only a read-only store has, and the root of that store."""
        return {}

    def _check_exists(self) -> None:
        """Raise StoreError if the directory existed before and does not: it may be unmounted."""
        # Read before the check: another thread may create the directory after it.
        existed = self._existed
        with translate_store_errors(self.root):
            exists = self.root.is_dir()
        if exists:
            self._existed = True
        elif existed:
            raise StoreError(f"the store {self.root} is gone", hint="mount it again, or restore it")

    def check(self) -> None:
        """Raise StoreError if the names cannot be read. Costs a read of the index."""
        for _ in self.iter_entries():
            return

    def compute_fingerprint(self) -> Hashable:
        """Return the fingerprint of the stores; None also while a group commit is pending."""
        batch = self._batch
        return None if batch is not None and batch.is_pending else compute_fingerprint(self.roots)

    def resolve(self, reference: Reference, /) -> Descriptor:
        """Return the manifest with that name or, for a digest, any entry.

        Raises NotFoundError; FormatError: the entry of another tool has a type as which a manifest
        could be read, and the policy of signatures is asked about those that are named as one.
        """
        text = str(reference)
        for name, descriptor in self.iter_candidates(reference):
            if reference.digest is not None:
                is_found = descriptor.digest == reference.digest
            else:
                is_found = name == text or is_same_name(name, reference)
            if is_found and is_unspecific(descriptor.media_type):
                raise FormatError(
                    f"{reference} is not a manifest in the store {self.root}, but "
                    f"{descriptor.media_type[:100]}"
                )
            if is_found:
                return descriptor
        raise NotFoundError(
            f"{reference} not found in the store {self.root}",
            remedy="not_in_store_pull",
            name=text,
            root=self.root,
        )

    def exists(self, content: Descriptor, /) -> bool:
        # Read once: another thread may end the batch.
        batch = self._batch
        if batch is not None and content.digest in batch:
            return True
        return self.is_durable(content)

    def is_durable(self, content: Descriptor, /) -> bool:
        # Of thousands of blobs: without contexts, which take longer than the call
        try:
            status = os.lstat(self.locate(content))
        except FileNotFoundError:
            return False
        except OSError:
            with translate_store_errors(self.root):
                raise
        return stat.S_ISREG(status.st_mode) and status.st_size == content.size

    def locate(self, content: Descriptor) -> str:
        """Return the path of the content, stored or not."""
        return build_blob_path(self.root, content)

    def _settle(self, content: Descriptor) -> None:
        batch = self._batch
        if batch is not None and content.digest in batch:
            batch.settle()

    def find_path(self, content: Descriptor, /) -> Path:
        self._settle(content)
        path = self.locate(content)
        if not is_file(path):
            raise self._build_not_found_error(content)
        return Path(path)

    def _build_not_found_error(self, content: Descriptor) -> NotFoundError:
        self._check_exists()
        return NotFoundError(
            f"{content.digest} not found in the store {self.root}",
            hint="pull the AImage again to complete it",
        )

    def open(
        self, content: Descriptor, offset: int = 0, length: int | None = None, /
    ) -> io.FileIO | io.BytesIO:
        if content.media_type in mediatype.DOCUMENTS and (gate := find_gate()) is not None:
            gate.admit_stored(self, content)
        return self.open_unchecked(content, offset, length)

    def open_unchecked(
        self, content: Descriptor, offset: int = 0, length: int | None = None, /
    ) -> io.FileIO | io.BytesIO:
        """Open content as ``open`` does, without the user's policy: to decide by it."""
        with translate_store_errors(self.root):
            try:
                self._settle(content)
                path = self.locate(content)
                file = StoredFile(open_regular(path), str(path))
            except (FileNotFoundError, NotADirectoryError):
                raise self._build_not_found_error(content) from None
            if offset:
                file.seek(offset)
        if length is None:
            return file
        with file:
            return io.BytesIO(file.read(length) or b"")

    def receive(self, source: Source, blobs: Sequence[Descriptor], options: CopyOptions) -> None:
        fetch_blobs(source, self, blobs, options)

    def list_tags(self) -> Iterator[tuple[str, Descriptor]]:
        """Yield the names in index.json, unchanged, and their manifests."""
        return ((name, descriptor) for name, descriptor in self.iter_entries() if name)

    def iter_entries(self) -> Iterator[tuple[str, Descriptor]]:
        """Yield all entries of index.json; the name is empty for an entry without one."""
        self._check_exists()
        yield from _iter_parsed(iter_index(self.root))

    def iter_candidates(self, reference: Reference) -> Iterator[tuple[str, Descriptor]]:
        """Yield the entries that ``reference`` may mean, and perhaps others, in order."""
        self._check_exists()
        digest = reference.digest
        texts = list_spellings(str(reference)) if digest is None else {str(digest)}
        found = find_entries(self.root, texts, is_digest=digest is not None)
        yield from _iter_parsed(found)

    def iter_indexes(self) -> Iterator[tuple[str, Descriptor]]:
        """Yield the entries of index.json that are indexes themselves."""
        self._check_exists()
        # Found by a search for the texts of their types: few of 100,000 entries may be indexes.
        found = _iter_parsed(find_entries(self.root, mediatype.INDEXES, is_digest=True))
        yield from (pair for pair in found if pair[1].media_type in mediatype.INDEXES)

    def iter_malformed(self) -> Iterator[tuple[int, str]]:
        """Yield the positions of malformed entries of index.json, with their errors."""
        for position, entry in enumerate(read_index(self.root)["manifests"]):
            try:
                Descriptor.from_json(entry, "index.json")
            except FormatError as error:
                yield position, error.message

    def build_entry_readers(self) -> list[EntryReader]:
        """Return a reader of the entries of each store, for processes that read them often."""
        return [EntryReader(self.root, self._check_exists)]

    def lease(self, *digests: Digest) -> FileLease:
        """Protect content from collection until the lease is closed, or this process ends.

        Check its existence only once the lease is held. Raises StoreError.
        """
        self._check_exists()
        return FileLease(self.root, digests)

    def keep(self) -> contextlib.AbstractContextManager[None]:
        """Block collections until the returned context ends. Raises StoreError."""
        self._check_exists()
        return hold_lock(self.root, COLLECTION, shared=True)

    def use(self, content: Descriptor) -> None:
        """Record the use of a manifest, if the store is writable."""
        try:
            self._check_exists()
            path = os.path.join(check_own(self.root, "used"), content.digest.encoded)
            if abs(time.time() - os.lstat(path).st_mtime) > _USE_INTERVAL:
                touch(path)
        except FileNotFoundError:
            with contextlib.suppress(OSError, AImageError):
                make_directory(self.root, PRIVATE, "used")
                touch(path)
        except (OSError, AImageError):
            pass

    def use_time(self, content: Descriptor) -> float:
        """Return the time of a manifest's last use, or of its write, in seconds since the epoch."""
        encoded = content.digest.encoded
        for path in (os.path.join(self.root, PRIVATE, "used", encoded), self.locate(content)):
            with contextlib.suppress(OSError):
                return sanitize_time(os.lstat(path).st_mtime, time.time())
        return 0.0

    def find_write_time(self, content: Descriptor) -> float | None:
        """Return when content was stored, in seconds since the epoch; None if it is missing."""
        with contextlib.suppress(OSError):
            return os.stat(self.locate(content)).st_mtime
        return None

    def _record_unnamed(self, entries: Iterable[Any]) -> None:
        """Record that manifests lost a name: collections need no grace for their older blobs.

        A registry serves those that lost a tag until then.
        """
        records = RepositoryRecords(self.root)
        for entry in entries:
            # If that fails, the blobs keep their grace, and clients resolve the tag again.
            with contextlib.suppress(OSError, AImageError):
                digest = Digest.parse(entry.get("digest"))
                touch(make_directory(self.root, PRIVATE, UNNAMED) / digest.encoded)
                reference = Reference.parse(get_name(entry))
                if reference.tag:
                    descriptor = Descriptor.from_json(entry, "index.json")
                    records.add_dropped(reference.name, descriptor)

    def _record_origins(self, entries: Iterable[Any]) -> None:
        """Record the names that manifests are about to lose, with those below an index."""
        for entry in entries:
            # A full disk is no reason to keep a name
            with contextlib.suppress(AImageError):
                digest, name = Digest.parse(entry.get("digest")), get_name(entry)
                self.add_origins(digest, [name])
                if entry.get("mediaType") in mediatype.INDEXES:
                    with unchecked():
                        index = Descriptor.from_json(entry, "index.json")
                        below, _ = list_documents(self, index)
                    for manifest in below:
                        self.add_origins(manifest, [name, *self.list_origins(digest)])

    def add_origins(self, digest: Digest, names: Iterable[str], *, durable: bool = True) -> None:
        """Record that a manifest came by names: a policy counts them beside its own.

        Names that it loses are recorded by this store. Raises StoreError or NoSpaceError.
        """
        add_origins(self.root, digest, names, durable=durable)

    def list_origins(self, digest: Digest) -> set[str]:
        """Return the repositories whose names a manifest had or came by. Raises StoreError."""
        return set().union(*(list_origins(root, digest) for root in self.roots))

    def pin(self, name: str, value: dict[str, Any] | None = None) -> None:
        """Pin a name; ``value`` states why. Raises StoreError or NoSpaceError."""
        with hold_lock(self.root, "lock"):
            self.pins.put(name, value or {}, durable=True)

    def unpin(self, name: str) -> None:
        """Remove the pin of a name, if it has one. Raises StoreError or NoSpaceError."""
        with hold_lock(self.root, "lock"):
            self.pins.remove(name)

    @property
    def pins(self) -> MetadataFiles:
        """Return the pinned names. No collection removes them."""
        return MetadataFiles(self.root, PINS)

    def ingest(
        self,
        key: str,
        expected: Descriptor | None = None,
        /,
        *,
        directory: IngestDirectory | None = None,
    ) -> FileIngest:
        """Begin or continue an ingest, a new small one in the open ``directory`` if there is one.

        Raises IngestBusyError, StoreError or NoSpaceError.
        """
        self._check_exists()
        try:
            return FileIngest(self.root, key, expected, batch=self._batch, directory=directory)
        except IngestBusyError:
            if (batch := self._batch) is not None:
                # The other writer may be waiting for a blob that is pending here.
                batch.settle()
            raise

    @contextlib.contextmanager
    def begin_batch(self) -> Iterator[None]:
        """Commit blobs in groups; all are committed when the block ends.

        Copies in several threads share one group commit, and each ends with its blobs committed.
        Raises StoreError, NoSpaceError if a blob of this or another copy could not be stored.
        """
        with self._joining:
            if self._batch is None or self._batch.failure is not None:
                self._batch = GroupCommit(self.root)
            batch = self._batch
            batch.users += 1
        try:
            yield
        finally:
            self._leave(batch)
        if batch.failure is not None:
            raise batch.failure

    def _leave(self, batch: GroupCommit) -> None:
        try:
            batch.settle()
        finally:
            with self._joining:
                batch.users -= 1
                is_last = not batch.users
                if is_last and self._batch is batch:
                    self._batch = None
            if is_last:
                batch.close()

    def compute_missing_size(self, content: Descriptor, /) -> int:
        """Return the bytes that must still be allocated; those in an ingest already are."""
        return max(0, content.size - ingest_size(self.root, content))

    def measure_free(self) -> int:
        space = self.measure_space()
        return UNKNOWN_SIZE if space is None else space.free

    def measure_space(self) -> Space | None:
        """Return the space of the store's file system; None if that does not report it."""
        with translate_store_errors(self.root):
            return measure_space(self.root)

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        if not self.exists(content):
            self._store(content, body)
        if reference is not None:
            self.tag(content, reference)

    def adopt(self, path: Path, content: Descriptor) -> LinkedBlob | None:
        """Hard-link another program's file, or else copy it. The caller commits the link.

        Raises VerificationError if it differs from ``content``; StoreError, NoSpaceError.
        """
        try:
            path = resolve(path)
            linked = link_blob(self.root, path, content)
            if linked is None:
                self.push(content, lambda _=0: io.FileIO(open_regular(path)))
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        return linked

    def _store(self, content: Descriptor, body: Body) -> None:
        ingest = self._begin_ingest(content)
        if ingest is None:
            return
        # Another process has stored it
        if self.exists(content):
            ingest.abort()
            return
        try:
            ingest.restart()
            buffer, offset = new_buffer(min(CHUNK_SIZE, content.size + 1)), 0
            with body() as source:
                while (count := source.readinto(buffer)) and offset <= content.size:
                    ingest.write_at(offset, buffer[:count])
                    offset += count
        except BaseException:
            ingest.abort()
            raise
        ingest.commit(content)

    def _begin_ingest(self, content: Descriptor) -> FileIngest | None:
        """Return an ingest for local content, or None if another thread has committed it.

        Wait for another process's ingest for the expected time, then write a second copy.
        """

        def begin() -> FileIngest | None:
            try:
                return self.ingest(content.digest.encoded, content)
            except IngestBusyError:
                # Another thread has it in the batch
                if self.exists(content):
                    return None
                raise

        with contextlib.suppress(IngestBusyError):
            return begin()
        import tenacity

        longest = _WRITE_TIMEOUT + content.size / _WRITE_SPEED
        retryer = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(IngestBusyError),
            wait=tenacity.wait_fixed(_INTERVAL),
            stop=tenacity.stop_after_delay(longest),
            retry_error_callback=lambda _: self.ingest(f"push-{content.digest.encoded}"),
        )
        return retryer(begin)

    def tag(
        self, content: Descriptor, reference: Reference, /, *, is_partial: bool = False
    ) -> None:
        """Tag a stored manifest durably; with ``is_partial`` blobs may be missing.

        The blobs' directories are synchronised first, so that the index never names content that a
        power failure could undo.
        """
        # The order survives a crash at any point: blobs, record of the name, index or its list of
        # changes. A name whose record exists is restored.
        with unchecked():
            document = parse_document(self.read(content), content.media_type)
        # Before the name: another one must not be without the demands of this one.
        if (gate := find_gate()) is not None:
            gate.record(self, content, reference)
        self._sync_blobs()
        entry = document.descriptor.to_json() | {"digest": str(content.digest)}
        if isinstance(document, Manifest) and document.artifact_type:
            entry["artifactType"] = document.artifact_type
        name = index_name(reference)
        entry["annotations"] = {mediatype.CONTAINERD_NAME: name, mediatype.REF_NAME: name}
        if is_partial:
            entry["annotations"][mediatype.PARTIAL] = "true"
        before, moved = list[Any](), list[Any]()

        def undo() -> None:
            # Under the lock, and only what this call has written
            for record in before:
                self._names.restore(name, record)

        with edit_index(self.root, [name], is_deferred=self.defers_index, undo=undo) as index:
            moved = [old for old in index["manifests"] if is_named(old, name)]
            moved = [old for old in moved if old.get("digest") != str(content.digest)]
            self._record_origins(moved)
            entry = _replace(index["manifests"], entry, name)
            is_elsewhere = self.locate(content) != build_blob_path(self.root, content)
            record = {"entry": entry} | ({"elsewhere": True} if is_elsewhere else {})
            before.append(self._names.get(name))
            self._names.put(name, record, durable=True)
        self._record_unnamed(moved)
        self.use(content)
        if isinstance(document, Manifest):
            # Other artifacts have no summary.
            with contextlib.suppress(FormatError):
                keep_summary(self, self.root, content, document)

    def read(self, content: Descriptor) -> bytes:
        """Read a manifest, verified. Wait for another tool that is writing it in place.

        Raises NotFoundError, VerificationError, StoreError.
        """
        with translate_store_errors(self.root):
            return read_settled(
                lambda: read_all(self.open(content), content),
                self.locate(content),
                VerificationError,
            )

    def _sync_blobs(self) -> None:
        with translate_store_errors(self.root):
            for directory in [*sorted((self.root / "blobs").glob("*")), self.root / "blobs"]:
                if directory.is_dir():
                    sync_directory(directory)

    def untag(self, reference: Reference, /) -> None:
        """Remove a name; the blobs stay until they are collected. Raises NotFoundError."""
        if not self.remove_names(self.find_names(reference)):
            raise NotFoundError(
                f"{reference} not found in the store {self.root}", remedy="not_in_store"
            )

    def find_names(self, reference: Reference) -> dict[str, Digest]:
        """Return the names in the writable store, as in index.json, that ``reference`` means."""
        index_entry_name, digest = index_name(reference), reference.digest
        named = Reference.parse(index_entry_name)
        return {
            name: descriptor.digest
            for name, descriptor in ImageLayout.iter_candidates(self, named)
            if name == index_entry_name or is_same_name(name, named)
            if digest in (None, descriptor.digest)
        }

    def write_index(self) -> int:
        """Write the names that index.json lacks, and return their number, also of removed ones.

        Raises StoreError, NoSpaceError.
        """
        return write_index(self.root)

    def write_pending(self, *, is_due: bool = False) -> None:
        """Write a large index whose changes are in a list; with ``is_due`` not too often.

        Raises StoreError, NoSpaceError.
        """
        write_pending(self.root, is_due=is_due)

    def remove_names(self, names: Mapping[str, Digest]) -> set[str]:
        """Remove names, as in index.json, that still refer to these manifests, and return them.

        Raises StoreError, NoSpaceError: the index cannot be written, and no name is removed.
        """
        if not names:
            return set()
        removed: dict[str, dict[str, Any]] = {}

        def undo() -> None:
            for name, record in removed.items():
                self._names.restore(name, record)

        with edit_index(self.root, names, is_deferred=self.defers_index, undo=undo) as index:
            removed_entries = [entry for entry in index["manifests"] if _is_entry_of(entry, names)]
            self._record_origins(removed_entries)
            for entry in removed_entries:
                name = get_name(entry)
                if (record := self._names.get(name)) is not None:
                    removed[name] = record
                    # Removed before the entry: a recorded name would be restored.
                    self._names.remove(name)
            index["manifests"] = [
                entry for entry in index["manifests"] if entry not in removed_entries
            ]
        self._record_unnamed(removed_entries)
        return {get_name(entry) for entry in removed_entries}


def _iter_parsed(entries: Iterable[Any]) -> Iterator[tuple[str, Descriptor]]:
    # Of thousands of entries: without contexts
    for entry in entries:
        try:
            descriptor = Descriptor.from_json(entry, "index.json")
        except FormatError:
            # Malformed entries of other tools are reported by iter_malformed
            continue
        yield get_name(entry), descriptor


def _is_entry_of(entry: Any, names: Mapping[str, Digest]) -> bool:
    digest = names.get(get_name(entry))
    return digest is not None and entry.get("digest") == str(digest)


def index_name(reference: Reference) -> str:
    """Return the name in index.json: with a tag, the digest is left to the entry."""
    if reference.tag and reference.digest:
        return str(Reference(reference.registry, reference.repository, reference.tag))
    return str(reference)


def _replace(entries: list[Any], entry: dict[str, Any], name: str) -> dict[str, Any]:
    """Replace the entry of that name, keep fields of other tools in it, and return it."""
    for i, old in enumerate(entries):
        if is_named(old, name):
            if old.get("digest") == entry["digest"]:
                annotations = {
                    k: v for k, v in old["annotations"].items() if k != mediatype.PARTIAL
                }
                entry["annotations"] = annotations | entry["annotations"]
                entry = old | entry
            entries[i] = entry
            return entry
    entries.append(entry)
    return entry
