"""Pictures that requests begin with, from files, URLs and artifacts.

A text is one in base64, or names one: ``data:`` and ``https:`` URLs,
``oci://HOST/REPO:TAG[@DIGEST][#TITLE]``, and for the user of this machine a file, or ``-`` for
stdin. Nothing is decoded here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from clowder_aimage.content import ContentStore, Source, read_all
from clowder_aimage.content.platform import ANY, select
from clowder_aimage.content.store import Reader
from clowder_aimage.content.verified_reader import SourceReader
from clowder_aimage.errors import (
    ForbiddenError,
    FormatError,
    NetworkError,
    NoPictureError,
    NotFoundError,
    StoreError,
    TooLargeError,
    UsageError,
)
from clowder_aimage.oci import Descriptor, Index, Manifest, Reference, mediatype
from clowder_aimage.pictures.artifact import read_settings
from clowder_aimage.pictures.input_file import DECLARED_TYPES, MAX_BYTES, decode_base64
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.reach import OutsideError, Reach, reach_of_name
from clowder_aimage.registry.web_file import InputHosts, build_forbidden_error, fetch

# Suffixes of the titles of picture layers
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
# Characters of a data URL: each byte may be percent-encoded
_MAX_DATA = MAX_BYTES * 3
# The most titles in an error
_MAX_LISTED = 10
# Seconds for a picture of an artifact, in a worker
_PATIENCE = 30.0
# Bytes per second in addition, as of a URL
_RATE = 1 << 20
_T = TypeVar("_T")
# The schemes of all sources but files
PATTERN = "([Dd][Aa][Tt][Aa]|[Hh][Tt][Tt][Pp][Ss]?|[Oo][Cc][Ii]):"
# The first bytes of a PNG, JPEG or WebP file in base64
BARE = "(iVBORw0KGgo|[/_]9j[/_]|UklGR)"
# Shorter texts are not pictures, and may be the names of files
_LONG = re.compile(r"([A-Za-z0-9+/_-]\s*){64}")
_BARE, _BARE_BEGIN = re.compile(rf"(?={BARE}){_LONG.pattern}"), re.compile(BARE)
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


@dataclass(frozen=True, slots=True)
class InputSource:
    """A reader of pictures by their texts; it writes nothing to the store.

    ``connect`` returns the options for registries and URLs. ``hosts`` are allowed by the operator
    of a worker, ``registries`` are configured for models; if ``hosts`` is None, a user names any.
    ``has_files`` permits files, and ``stdin``.
    """

    store: ContentStore
    connect: Callable[[], ClientOptions]
    hosts: InputHosts | None = InputHosts()  # noqa: RUF009 - immutable
    registries: frozenset[str] = frozenset()
    has_files: bool = False
    stdin: BinaryIO | None = None

    def read(self, text: str, label: str = "image") -> bytes:
        """Return the bytes of a picture file, at most MAX_BYTES; ``label`` names it in errors.

        Raises:
            UsageError: The text names nothing readable, or several pictures.
            TooLargeError: It has more bytes.
            ForbiddenError: Its host or address is not permitted.
            NoPictureError: The artifact has no picture.
            NotFoundError, UnauthorizedError, NetworkError, RegistryError: It cannot be fetched.
            VerificationError, FormatError: An artifact differs from its digests.
            StoreError: A file cannot be read.
        """
        if len(text) > _MAX_DATA:
            raise TooLargeError(f"{label} is longer than a picture of {MAX_BYTES} bytes")
        match = _SCHEME.match(text)
        scheme = match[1].lower() if match else ""
        if scheme == "data":
            return _decode_data_url(text, label)
        if scheme in ("https", "http"):
            return fetch(text, self.connect(), limit=MAX_BYTES, hosts=self.hosts)
        if scheme == "oci":
            return self._pull(text, self._read_layer)
        bare = _BARE if self.has_files else _BARE_BEGIN
        if bare.match(text):
            return _decode_base64(text.encode(), label)
        if self.has_files and not scheme:
            return self._read_file(text, label)
        if _LONG.match(text):
            raise UsageError(
                f"{label} is base64, but not of a picture", hint="use a PNG, JPEG or WebP file"
            )
        kinds = "a picture in base64, a data: URL, an https: URL nor an oci:// artifact"
        kinds = f"a file, {kinds}" if self.has_files else kinds
        raise UsageError(f"{label} is neither {kinds}: {text[:60]!r}")

    def read_made(self, text: str) -> tuple[bytes, dict[str, Any]]:
        """Return the picture that an ``oci://`` text names, and the settings in its artifact.

        They are empty without any. Raises as read.
        """

        def take(source: Source, picture: PictureLayer) -> tuple[bytes, dict[str, Any]]:
            return self._read_layer(source, picture), read_settings(
                source, picture.manifest, picture.layer
            )

        return self._pull(text, take)

    def _read_layer(self, source: Source, picture: PictureLayer) -> bytes:
        try:
            return read_all(self.store.open(picture.layer), picture.layer, MAX_BYTES)
        except NotFoundError:
            reader = source.open(picture.layer)
        # A registry of strangers must not hold a worker for long
        if self.hosts is not None:
            reader = _TimedReader(reader, _PATIENCE + picture.layer.size / _RATE)
        return read_all(reader, picture.layer, MAX_BYTES)

    def _pull(self, text: str, take: Callable[[Source, PictureLayer], _T]) -> _T:
        """Read a picture with ``take`` from the store, else from its registry."""
        name, mark, title = text[len("oci://") :].partition("#")
        reference = Reference.parse(name)
        chosen = title if mark else None
        try:
            return take(self.store, _find(self.store, reference, chosen))
        except NotFoundError as error:
            missing = error
        connection = self.connect()
        reference = connection.expand(reference)
        if reference.registry is None:
            raise missing
        connection = replace(connection, max_reach=self._resolve_reach(reference, connection))
        try:
            with Repository(reference, connection) as repository:
                return take(repository, _find(repository, reference, chosen))
        except OutsideError as error:
            raise build_forbidden_error(error, str(reference), reference.registry) from None

    def _resolve_reach(self, reference: Reference, connection: ClientOptions) -> Reach:
        """Return the permitted network of a reference's registry. Raises ForbiddenError."""
        if self.hosts is None:
            return Reach.NOWHERE
        registry = reference.registry or ""
        scheme = "http" if connection.uses_http(registry) else "https"
        parts = urlsplit(f"//{registry}")
        host, port = str(parts.hostname), parts.port or {"https": 443, "http": 80}[scheme]
        entries = (f"http://{registry}",) if registry in self.registries else ()
        most = InputHosts.parse((*self.hosts.entries, *entries)).reach(scheme, host, port)
        if most is None:
            raise ForbiddenError(
                f"pictures are not allowed from the registry {registry}",
                remedy="allow_input",
                host=registry,
            )
        if (reach_of_name(host) or Reach.INTERNET) > most:
            raise ForbiddenError(f"{reference} is at an internal address")
        return most

    def _read_file(self, name: str, label: str) -> bytes:
        try:
            if name == "-":
                data = self.stdin.read(MAX_BYTES + 1) if self.stdin else b""
            else:
                with closing(Path(name).expanduser().open("rb")) as file:
                    data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raise NotFoundError(f"{label}: there is no file {name}") from None
        except (OSError, RuntimeError, ValueError) as error:
            # ~ of nobody, a zero byte
            reason = getattr(error, "strerror", None) or error
            raise StoreError(f"{label}: cannot read {name}: {reason}") from None
        return _check_size(data, label)


class _TimedReader(SourceReader):
    """A stream that ends with an error after some seconds."""

    def __init__(self, source: Reader, seconds: float) -> None:
        super().__init__(source)
        self._until = time.monotonic() + seconds

    def _fill(self, view: memoryview) -> int:
        if time.monotonic() > self._until:
            raise NetworkError("the picture did not arrive in time")
        return self._source.readinto(view)


def _find(source: Source, reference: Reference, title: str | None) -> PictureLayer:
    _, document = select(source, source.resolve(reference), reference, ANY)
    if isinstance(document, Index):
        raise FormatError(f"{reference} is an index of indexes")
    return select_picture(document, reference, title)


def select_picture(manifest: Manifest, reference: Reference, title: str | None) -> PictureLayer:
    """Return the picture of an artifact: its only one, or that with a title.

    Raises:
        NoPictureError: It has none.
        NotFoundError: None has the title.
        UsageError: It has several, and no title is given.
        TooLargeError: It has more than MAX_BYTES.
    """
    pictures = [
        picture
        for picture in map(partial(PictureLayer, manifest), manifest.layers)
        if _is_image(picture)
    ]
    titles = ", ".join(repr(picture.title[:100]) for picture in pictures[:_MAX_LISTED])
    if not pictures:
        raise NoPictureError(
            f"{reference} has no picture",
            hint="a picture is a layer of the type image/*, or with a title in .png, .jpg or .webp",
        )
    if title is not None:
        pictures = [picture for picture in pictures if picture.title == title]
        if not pictures:
            raise NotFoundError(f"{reference} has no picture {title[:100]!r}, but: {titles}")
    if len({picture.layer.digest for picture in pictures}) > 1:
        raise UsageError(
            f"{reference} has several pictures: {titles}", hint="choose one by its title: #TITLE"
        )
    if pictures[0].layer.size > MAX_BYTES:
        raise TooLargeError(
            f"the picture of {reference} has {pictures[0].layer.size} bytes; pictures may have "
            f"{MAX_BYTES}"
        )
    return pictures[0]


def _is_image(picture: PictureLayer) -> bool:
    kind = picture.layer.media_type.lower()
    return kind.startswith("image/") or picture.title.lower().endswith(SUFFIXES)


def _decode_data_url(text: str, label: str) -> bytes:
    """Return the bytes of a data URL (RFC 2397). Raises UsageError, TooLargeError."""
    head, comma, body = text.partition(",")
    if not comma or len(head) > 1000:
        raise UsageError(
            f"{label} is not a valid data: URL", hint="expected data:image/png;base64,"
        )
    kind, *parameters = (part.strip().lower() for part in head[len("data:") :].split(";"))
    if kind not in DECLARED_TYPES:
        raise UsageError(f"{label} has the type {kind[:60]!a}", hint="use a PNG, JPEG or WebP file")
    data = unquote_to_bytes(body) if "%" in body or not body.isascii() else body.encode()
    if "base64" in parameters or _BARE.match(body.lstrip()):
        return _decode_base64(data, label)
    return _check_size(data, label)


def _decode_base64(text: bytes, label: str) -> bytes:
    try:
        return _check_size(decode_base64(text), label)
    except ValueError:
        raise UsageError(f"{label}: its base64 is not valid") from None


def _check_size(data: bytes, label: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise TooLargeError(f"{label} has more than {MAX_BYTES} bytes")
    return data
