"""AImages whose layers are compressed or tars, unpacked once into the store.

The files become blobs by their own digests. A manifest that lists them is stored beside the packed
one, whose digest it is recorded under, after all blobs were verified and stored: until then nothing
refers to them. Garbage collection keeps them as long as the packed AImage.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.decompress import open_decompressed
from clowder_aimage.content.fetch import RESERVE, check_space
from clowder_aimage.content.gate import unchecked
from clowder_aimage.content.store import Lease, Reader
from clowder_aimage.content.tar import TarReader
from clowder_aimage.dialect import DEFAULT, DIALECTS, AImage, Layer
from clowder_aimage.dialect.aimage import check_name, check_names
from clowder_aimage.dialect.layer_name import clean_path
from clowder_aimage.dialect.packing import has_packed_layers, is_tar, is_unpacked_to_run
from clowder_aimage.dialect.vendor import guess_media_type
from clowder_aimage.errors import FormatError, NoSpaceError, NotFoundError, StoreError
from clowder_aimage.layout.attachment import list_all_attachments
from clowder_aimage.layout.description import UNPACKED
from clowder_aimage.layout.layout import ImageLayout
from clowder_aimage.layout.lock import PRIVATE, check_own, hold_lock, make_directory, open_regular
from clowder_aimage.layout.metadata import write_shared
from clowder_aimage.layout.stored_aimage import StoredAImage, read_stored
from clowder_aimage.oci import Descriptor, Digest, mediatype, read_json

# Files of all tars of an AImage: their manifest has at most 4 MiB
_MAX_FILES = 4096
# Bytes between two looks at the free space
_INTERVAL = 64 << 20
_LOCK = "unpacking"
_SUFFIXES = (".gz", ".zst")


def list_companions(root: Path) -> dict[str, list[str]]:
    """Return the digests of manifests without a name, by those of the manifests that keep them.

    These are the manifests of unpacked files, by those of the packed AImages, and attached
    artifacts. Raises StoreError.
    """
    companions = list_all_attachments(root)
    directory = Path(check_own(root, UNPACKED))
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            if (record := _read_record(path)) is not None:
                packed, unpacked = record
                companions.setdefault(packed, []).append(str(unpacked.digest))
    return companions


def find_unpacked(store: ImageLayout, stored: StoredAImage, lease: Lease | None) -> AImage | None:
    """Return an AImage of unpacked files, leased; None if it is not in the store."""
    path = Path(check_own(store.root, UNPACKED), stored.descriptor.digest.encoded)
    record = _read_record(path)
    if record is None or record[0] != str(stored.descriptor.digest):
        return None
    unpacked = record[1]
    try:
        if lease is not None:
            lease.add(unpacked.digest)
        # The packed AImage, which was read, has admitted it.
        with unchecked():
            found = read_stored(store, unpacked)
    except (NotFoundError, FormatError):
        return None
    if lease is not None:
        lease.add(*(child.digest for child in found.manifest.children))
    if not all(store.exists(child) for child in found.manifest.children):
        return None
    return replace(found.aimage, subject=stored.aimage.subject)


def needs_unpacking(store: ImageLayout, stored: StoredAImage) -> bool:
    """Return True if a packed AImage is complete in the store, and its files are not."""
    is_packed_only = has_packed_layers(stored.aimage) and not find_unpacked(store, stored, None)
    return is_packed_only and all(map(store.exists, stored.manifest.children))


def unpack_layers(store: ImageLayout, stored: StoredAImage, lease: Lease) -> AImage:
    """Return an AImage of unpacked files, leased: those in the store, or new ones.

    Raises:
        FormatError: A layer is damaged, unpacks to too much, or has links or devices.
        UsageError: A layer is compressed with zstd, and the package for it is not installed.
        VerificationError: A layer differs from its digest, or its content from the stated one.
        StoreError, NoSpaceError: It cannot be stored.
    """
    if not has_packed_layers(stored.aimage):
        return stored.aimage
    if (found := find_unpacked(store, stored, lease)) is not None:
        return found
    with hold_lock(store.root, _LOCK):
        # Another process may have unpacked it meanwhile
        if (found := find_unpacked(store, stored, lease)) is not None:
            return found
        unpacker = _Unpacker(store, lease, stored.aimage.algorithm)
        parts = (part for layer in stored.aimage.layers for part in unpacker.unpack(layer))
        # A file may be in several tars
        layers = dict.fromkeys(parts)
        aimage = AImage(stored.aimage.config, check_names(tuple(layers)))
        _keep(store, stored, aimage, lease)
    return replace(aimage, subject=stored.aimage.subject)


def _keep(store: ImageLayout, stored: StoredAImage, aimage: AImage, lease: Lease) -> None:
    """Store the manifest of unpacked files, and record it."""
    manifest, config = DIALECTS[DEFAULT].write(aimage)
    lease.add(manifest.digest, manifest.config.digest)
    store.push(manifest.config, build_bytes_body(config))
    store.push(manifest.descriptor, build_bytes_body(manifest.raw))
    record = {"packed": str(stored.descriptor.digest), "unpacked": manifest.descriptor.to_json()}
    directory = make_directory(store.root, PRIVATE, UNPACKED)
    path = os.path.join(directory, stored.descriptor.digest.encoded)
    write_shared(path, (json.dumps(record).encode(),))


def _read_record(path: Path) -> tuple[str, Descriptor] | None:
    with contextlib.suppress(OSError, FormatError, StoreError, KeyError, TypeError):
        with open(open_regular(str(path)), "rb", buffering=0) as file:
            value = read_json(file.read(1 << 16) or b"", "it")
        return str(Digest.parse(value["packed"])), Descriptor.from_json(value["unpacked"], "it")
    return None


@dataclass(slots=True)
class _Unpacker:
    """A writer of the files in layers to a store; ``files`` counts those of tars."""

    store: ImageLayout
    lease: Lease
    algorithm: str
    files: int = 0

    def unpack(self, layer: Layer) -> Iterator[Layer]:
        """Yield the layers of the files in a layer: itself if it is not packed."""
        if not is_unpacked_to_run(layer):
            yield layer
        elif is_tar(layer):
            yield from self._unpack_tar(layer)
        else:
            yield self._decompress(layer)

    def _decompress(self, layer: Layer) -> Layer:
        if layer.content is not None:
            self.lease.add(layer.content.digest)
            check_space([layer.content], self.store)
        name = layer.name
        media_type, _ = mediatype.split_compression(layer.descriptor.media_type)
        if not mediatype.is_ours(media_type):
            name = next((name[: -len(end)] for end in _SUFFIXES if name.endswith(end)), name)
            media_type = guess_media_type(name) or mediatype.AIMAGE_FILE
        content = layer.content
        if content is None or not self.store.exists(content):
            with open_decompressed(self.store, layer.descriptor, layer.content) as source:
                content = self._write(_iter_chunks(source))
        plain = Descriptor(media_type, content.digest, content.size)
        return Layer(plain, name, layer.dtype, layer.shape)

    def _unpack_tar(self, layer: Layer) -> Iterator[Layer]:
        with open_decompressed(self.store, layer.descriptor, layer.content) as source:
            reader = TarReader(source.readinto, f"layer {layer.name}")
            for member in reader.iter_members():
                if member.isdir():
                    continue
                name = _check_member(layer, member)
                self.files += 1
                if self.files > _MAX_FILES:
                    raise FormatError(f"layer {layer.name} has more than {_MAX_FILES} files")
                content = self._write(_iter_member(reader, member.size))
                media_type = guess_media_type(name) or mediatype.AIMAGE_FILE
                yield Layer(Descriptor(media_type, content.digest, content.size), name)
            # The digest of the layer is verified at its end, which is behind that of the tar
            for _ in _iter_chunks(source):
                pass

    def _write(self, chunks: Iterator[memoryview]) -> Descriptor:
        """Store a blob under the digest that it has."""
        ingest, size, checked = self.store.ingest("unpack"), 0, 0
        try:
            ingest.digest(self.algorithm)
            for chunk in chunks:
                if size >= checked:
                    self._check_free()
                    checked = size + _INTERVAL
                ingest.write_at(size, chunk)
                size += len(chunk)
            digest = ingest.digest(self.algorithm)
            content = Descriptor("application/octet-stream", digest, size)
            self.lease.add(content.digest)
            exists = self.store.exists(content)
        except BaseException:
            ingest.abort()
            raise
        if exists:
            ingest.abort()
        else:
            ingest.commit(content)
        return content

    def _check_free(self) -> None:
        if (free := self.store.measure_free()) < RESERVE + _INTERVAL:
            raise NoSpaceError(
                f"the model cannot be unpacked: {free / 1e6:.1f} MB are available, of which "
                f"{RESERVE / 1e6:.1f} MB stay free",
                missing_size=RESERVE + _INTERVAL - free,
                hint="free some space, or use a store on another disk",
            )


def _iter_chunks(source: Reader) -> Iterator[memoryview]:
    buffer = memoryview(new_buffer())
    while count := source.readinto(buffer):
        yield buffer[:count]


def _iter_member(reader: TarReader, size: int) -> Iterator[memoryview]:
    buffer = memoryview(new_buffer())
    while size:
        view = buffer[: min(size, len(buffer))]
        reader.read_exactly(view)
        yield view
        size -= len(view)


def _check_member(layer: Layer, member: tarfile.TarInfo) -> str:
    """Return the name of a file in a tar. Raises FormatError for links, devices, sparse files."""
    if not member.isreg() or member.issparse() or member.size < 0:
        raise FormatError(f"layer {layer.name}: {member.name[:200]!r} is not a plain file")
    name = clean_path(member.name)
    if not name:
        raise FormatError(f"layer {layer.name} has a file without a name")
    return check_name(name)
