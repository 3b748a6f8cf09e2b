"""Pictures that requests begin with, from files, URLs and artifacts.

A text names one: ``data:`` and ``https:`` URLs, ``oci://HOST/REPO:TAG[@DIGEST][#TITLE]``, and for
the user of this machine a file, or ``-`` for stdin. Nothing is decoded here.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from clowder_aimage.content import ContentStore, Lease, Source, read_all
from clowder_aimage.content.platform import ANY, select
from clowder_aimage.errors import (
    ForbiddenError,
    FormatError,
    NoPictureError,
    NotFoundError,
    StoreError,
    TooLargeError,
    UsageError,
)
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference, mediatype
from clowder_aimage.pictures.input_file import MAX_BYTES
from clowder_aimage.pictures.picture_artifact import has_settings
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.reach import Reach
from clowder_aimage.registry.web_file import InputHosts, fetch

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")  # of the titles of picture layers
_MAX_DATA = MAX_BYTES * 3  # characters of a data URL: each byte may be percent-encoded
_MAX_LISTED = 10  # titles in an error
_SCHEME = re.compile(r"(data|https?|oci|[a-z][a-z0-9+.-]*(?=://)):", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PictureLayer:
    """A layer that is a picture: the manifest that has it, and its own descriptor."""

    manifest: Manifest
    layer: Descriptor

    @property
    def title(self) -> str:
        """Return its title; empty without one."""
        return self.layer.annotations.get(mediatype.TITLE, "")

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Return what is kept of it: the layer, and the config if it has the settings."""
        return (self.layer, *([self.manifest.config] if has_settings(self.manifest) else []))

    @property
    def digests(self) -> tuple[Digest, ...]:
        """Return the digests of its blobs."""
        return tuple(blob.digest for blob in self.blobs)


@dataclass(frozen=True, slots=True)
class InputSource:
    """A reader of pictures that texts name.

    ``connect`` returns the options for registries and URLs. ``hosts`` are those from which the
    operator of a worker allows pictures; None for a user who names any. ``may_pull`` permits any
    registry, otherwise only those that ``hosts`` name. ``has_files`` permits files, and ``stdin``.
    """

    store: ContentStore
    connect: Callable[[], ClientOptions]
    hosts: InputHosts | None = InputHosts()  # noqa: RUF009 - immutable
    may_pull: bool = False
    has_files: bool = False
    stdin: BinaryIO | None = None

    def read(self, text: str, lease: Lease, what: str = "image") -> bytes:
        """Return the bytes of a picture file, at most MAX_BYTES; ``what`` names it in errors.

        A picture of an artifact is in the store afterwards, leased.

        Raises:
            UsageError: The text names nothing that can be read here, or one of several pictures.
            TooLargeError: It has more bytes.
            ForbiddenError: Its host or address is not permitted.
            NoPictureError: The artifact has no picture.
            NotFoundError, UnauthorizedError, NetworkError, RegistryError: It cannot be fetched.
            VerificationError, FormatError: An artifact differs from its digests.
            StoreError: A file cannot be read.
        """
        found = _SCHEME.match(text)
        scheme = found[1].lower() if found else ""
        if scheme == "data":
            return _data(text, what)
        if scheme in ("https", "http"):
            return fetch(text, self.connect(), limit=MAX_BYTES, hosts=self.hosts)
        if scheme == "oci":
            layer = self.pull(text, lease).layer
            return read_all(self.store.open(layer), layer, MAX_BYTES)
        if self.has_files and not scheme:
            return self._file(text, what)
        kinds = "a data: URL, an https: URL or an oci:// artifact"
        kinds = f"a file, {kinds}" if self.has_files else kinds
        raise UsageError(f"{what} is neither {kinds}: {text[:60]!r}")

    def pull(self, text: str, lease: Lease) -> PictureLayer:
        """Put the picture that an ``oci://`` text names into the store, leased. Raises as read."""
        name, mark, title = text[len("oci://") :].partition("#")
        reference = Reference.parse(name)
        chosen = title if mark else None
        try:
            found = self._find(self.store, reference, chosen)
        except NotFoundError:
            pass
        else:
            lease.add(*found.digests)
            if all(map(self.store.exists, found.blobs)):
                return found
        connection = self.connect()
        reference = connection.expand(reference)
        if reference.registry is None:
            raise NotFoundError(
                f"{reference} not found in the store", hint="add a registry host to the name"
            )
        self._check_registry(reference, connection)
        with Repository(reference, connection) as repository:
            found = self._find(repository, reference, chosen)
            lease.add(*found.digests)
            for blob in found.blobs:
                self.store.push(blob, partial(repository.open, blob))
        return found

    def _find(self, source: Source, reference: Reference, title: str | None) -> PictureLayer:
        _, document = select(source, source.resolve(reference), reference, ANY)
        if isinstance(document, Index):
            raise FormatError(f"{reference} is an index of indexes")
        return picture_layer(document, reference, title)

    def _check_registry(self, reference: Reference, connection: ClientOptions) -> None:
        """Raise ForbiddenError unless pictures may be pulled from the registry of a reference."""
        if self.may_pull or self.hosts is None:
            return
        host = reference.registry or ""
        scheme = "http" if connection.uses_http(host) else "https"
        name, _, port = host.partition(":") if "[" not in host else host.rpartition("]")
        number = int(port.lstrip(":") or {"https": 443, "http": 80}[scheme])
        reach = self.hosts.reach(scheme, name.strip("[]").lower(), number)
        if reach is None or reach is Reach.INTERNET:  # a pattern: its address is not checked
            raise ForbiddenError(
                f"pictures are not allowed from the registry {host}",
                remedy="allow_input",
                host=host,
            )

    def _file(self, name: str, what: str) -> bytes:
        try:
            if name == "-":
                data = self.stdin.read(MAX_BYTES + 1) if self.stdin else b""
            else:
                with closing(Path(name).expanduser().open("rb")) as file:
                    data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raise NotFoundError(f"{what}: there is no file {name}") from None
        except (OSError, RuntimeError, ValueError) as error:  # ~ of nobody, a zero byte
            reason = getattr(error, "strerror", None) or error
            raise StoreError(f"{what}: cannot read {name}: {reason}") from None
        return _limited(data, what)


def picture_layer(manifest: Manifest, reference: Reference, title: str | None) -> PictureLayer:
    """Return the picture of an artifact: its only one, or that with a title.

    Raises:
        NoPictureError: It has none.
        NotFoundError: None has the title.
        UsageError: It has several, and no title is given.
        TooLargeError: It has more than MAX_BYTES.
    """
    found = [one for one in map(partial(PictureLayer, manifest), manifest.layers) if _is_image(one)]
    titles = ", ".join(repr(one.title[:100]) for one in found[:_MAX_LISTED])
    if not found:
        raise NoPictureError(
            f"{reference} has no picture",
            hint="a picture is a layer of the type image/*, or with a title in .png, .jpg or .webp",
        )
    if title is not None:
        found = [one for one in found if one.title == title]
        if not found:
            raise NotFoundError(f"{reference} has no picture {title[:100]!r}, but: {titles}")
    if len({one.layer.digest for one in found}) > 1:
        raise UsageError(
            f"{reference} has several pictures: {titles}", hint="choose one by its title: #TITLE"
        )
    if found[0].layer.size > MAX_BYTES:
        raise TooLargeError(
            f"the picture of {reference} has {found[0].layer.size} bytes; pictures may have "
            f"{MAX_BYTES}"
        )
    return found[0]


def _is_image(found: PictureLayer) -> bool:
    kind = found.layer.media_type.lower()
    return kind.startswith("image/") or found.title.lower().endswith(SUFFIXES)


def _data(text: str, what: str) -> bytes:
    """Return the bytes of a data URL (RFC 2397). Raises UsageError, TooLargeError."""
    if len(text) > _MAX_DATA:
        raise TooLargeError(f"{what} has {len(text)} characters; pictures may have {MAX_BYTES}")
    head, comma, body = text.partition(",")
    if not comma or len(head) > 1000:
        raise UsageError(f"{what} is not a valid data: URL", hint="expected data:image/png;base64,")
    data = unquote_to_bytes(body) if "%" in body or not body.isascii() else body.encode()
    if head.lower().endswith(";base64"):
        try:
            data = base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise UsageError(f"{what}: the data: URL is not valid base64") from None
    return _limited(data, what)


def _limited(data: bytes, what: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise TooLargeError(f"{what} has more than {MAX_BYTES} bytes")
    return data
