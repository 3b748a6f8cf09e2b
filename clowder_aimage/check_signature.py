"""verify --signature: which expected signers have signed an artifact, or the files of a model."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.file_system import ADVICE
from clowder_aimage.content.open_directory import READ, OpenDirectory, resolve
from clowder_aimage.errors import (
    FormatError,
    NotFoundError,
    SignatureError,
    StoreError,
)
from clowder_aimage.exporter.digest import hash_stored_files
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.trust.acceptance import (
    AcceptedSignature,
    HashFiles,
    Signers,
    accept_files,
)
from clowder_aimage.trust.bundle import MAX_BUNDLE
from clowder_aimage.trust.collection import RegistryPlace, StorePlace, list_signatures
from clowder_aimage.trust.oms import SignedFiles


@dataclass(frozen=True, slots=True)
class SignatureReport:
    """The accepted signatures of a manifest, and why others are not accepted.

    ``is_stored`` is True if they are those in the store.
    """

    subject: Descriptor
    accepted: list[AcceptedSignature]
    reasons: list[str]
    is_stored: bool


def check_signature(
    layout: ImageLayout,
    reference: Reference,
    connection: ClientOptions | None,
    signers: Signers,
    now: datetime,
) -> SignatureReport:
    """Return the signatures of ``reference`` by expected signers.

    An AImage in the store is checked with its signatures there and, if none of them is accepted,
    with those in its registry, unless ``connection`` is None. The files of a model are compared
    with a signature of them if the store has them.

    Raises:
        UsageError: a library or a root is missing.
        NotFoundError: it is neither in the store nor in the registry.
        SignatureError: a bound is reached.
        UnauthorizedError, NetworkError, RegistryError: the registry does not answer.
    """
    try:
        subject = layout.resolve(reference)
    except NotFoundError:
        if connection is None or connection.expand(reference).registry is None:
            raise
        with Repository(reference, connection) as repository:
            subject = repository.resolve(reference)
            place = RegistryPlace(repository, connection.expand(reference))
            accepted, reasons = list_signatures(place, subject.digest, signers, now)
            return SignatureReport(subject, accepted, reasons, is_stored=False)
    hash_files = _build_hash_files(layout, reference, subject)
    accepted, reasons = list_signatures(
        StorePlace(layout), subject.digest, signers, now, hash_files
    )
    has_registry = connection is not None and connection.expand(reference).registry is not None
    if accepted or connection is None or not has_registry:
        return SignatureReport(subject, accepted, reasons, is_stored=True)
    with Repository(reference, connection) as repository:
        place = RegistryPlace(repository, connection.expand(reference))
        accepted, more = list_signatures(place, subject.digest, signers, now, hash_files)
    return SignatureReport(subject, accepted, reasons + more, is_stored=False)


def _build_hash_files(
    layout: ImageLayout, reference: Reference, subject: Descriptor
) -> HashFiles | None:
    """Return the function that hashes the files of a stored AImage; None for an index."""
    if subject.media_type in mediatype.INDEXES:
        return None
    hashed: dict[str, dict[str, str]] = {}

    def hash_files(hash_type: str) -> dict[str, str]:
        if hash_type not in hashed:
            hashed[hash_type] = hash_stored_files(layout, reference, subject, hash_type)
        return hashed[hash_type]

    return hash_files


def check_directory(
    directory: Path, bundle: Path, signers: Signers, now: datetime
) -> AcceptedSignature:
    """Verify the signature in the file ``bundle`` over the files of ``directory``.

    Raises:
        NotFoundError: one of the two does not exist.
        SignatureError: it is not of an expected signer, or not of these files.
        StoreError: a file cannot be read.
    """
    try:
        raw = _read_bundle(bundle)
        accepted, files = accept_files(raw, signers, now)
        files.compare(hash_directory(directory, files, bundle))
    except FormatError as error:
        raise SignatureError(
            f"{directory} has no accepted signature: {error.message}", **error.advice
        ) from None
    return accepted


def _read_bundle(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BUNDLE + 1)
    except FileNotFoundError:
        raise NotFoundError(f"file not found: {path}") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None


def hash_directory(directory: Path, files: SignedFiles, bundle: Path) -> dict[str, str]:
    """Return the hex digests of the files below ``directory``, without those that are left out.

    Raises FormatError: a file is a link, or not a regular file; NotFoundError, StoreError.
    """
    digests: dict[str, str] = {}
    try:
        own = bundle.stat()
        with OpenDirectory(resolve(directory)) as root:
            walked = os.fwalk(onerror=_fail, dir_fd=root.fd, follow_symlinks=False)
            for path, directories, names, fd in walked:
                # A link to a directory is among these, and is not followed.
                for name in (*directories, *names):
                    relative = str(Path(path) / name)
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    is_own = (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino)
                    if stat.S_ISDIR(status.st_mode) or is_own or files.is_ignored(relative):
                        continue
                    digests[relative] = _hash_file(name, fd, relative, files.hash_type)
    except FileNotFoundError:
        raise NotFoundError(f"directory not found: {directory}") from None
    except OSError as error:
        raise StoreError(
            f"cannot read {directory}: {error.strerror or error}",
            hint=ADVICE.get(error.errno or 0),
        ) from None
    return digests


def _fail(error: OSError) -> None:
    """Raise the error of a directory that cannot be read: its files are not verified."""
    raise error


def _hash_file(name: str, directory: int, path: str, hash_type: str) -> str:
    if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise FormatError(f"{path[:200]!r} is a link, or not a regular file")
    hasher, buffer = hashlib.new(hash_type), new_buffer()
    with os.fdopen(os.open(name, READ, dir_fd=directory), "rb", 0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()
