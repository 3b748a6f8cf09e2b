"""Artifacts that the program attaches to a manifest in the store: they live as long as it.

They have no name, so that no list of names has them. Each manifest with such artifacts has a
record, which garbage collection follows, and which it removes with the manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from clowder_aimage.errors import FormatError, StoreError, UsageError
from clowder_aimage.layout.description import ATTACHED
from clowder_aimage.layout.layout import ImageLayout
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    hold_lock,
    make_directory,
    open_regular,
    translate_store_errors,
)
from clowder_aimage.layout.metadata import write_shared
from clowder_aimage.oci import Descriptor, Digest, read_json

_LOCK = "attaching"
# Hex digits
_SHA256 = 64
_MAX_SIZE = 1 << 16
# Artifacts of one manifest: none is dropped for a new one
_MAX_ATTACHED = 16


def attach(store: ImageLayout, subject: Digest, artifact: Descriptor) -> None:
    """Record that a stored artifact is attached to a manifest.

    Raises UsageError: it has as many as it may have; StoreError, NoSpaceError.
    """
    with hold_lock(store.root, _LOCK), translate_store_errors(store.root):
        attached = list_attachments([store.root], subject)
        if any(entry.digest == artifact.digest for entry in attached):
            return
        if len(attached) >= _MAX_ATTACHED:
            raise UsageError(
                f"{subject} has {_MAX_ATTACHED} attached artifacts in the store, the limit",
                hint="remove it and collect the garbage, then make or load it again",
            )
        entries = [entry.to_json() for entry in (*attached, artifact)]
        record = {"subject": str(subject), "attached": entries}
        directory = make_directory(store.root, PRIVATE, ATTACHED)
        write_shared(os.path.join(directory, subject.encoded), (json.dumps(record).encode(),))


def list_attachments(roots: Iterable[Path], subject: Digest) -> Sequence[Descriptor]:
    """Return the artifacts that are attached to a manifest in stores. Raises StoreError."""
    found = dict[Digest, Descriptor]()
    for root in roots:
        path = os.path.join(check_own(root, ATTACHED), subject.encoded)
        recorded, entries = _read_record(path)
        if recorded == str(subject):
            found |= {entry.digest: entry for entry in entries}
    return list(found.values())


def list_subjects(roots: Iterable[Path]) -> set[Digest]:
    """Return the manifests with attached artifacts in stores. Raises StoreError."""
    subjects = set[Digest]()
    for root in roots:
        for name in _list_records(check_own(root, ATTACHED)):
            with contextlib.suppress(FormatError):
                subjects.add(Digest("sha256" if len(name) == _SHA256 else "sha512", name))
    return subjects


def list_all_attachments(root: Path) -> dict[str, list[str]]:
    """Return the digests of attached artifacts by those of the manifests. Raises StoreError."""
    directory = check_own(root, ATTACHED)
    attached: dict[str, list[str]] = {}
    for name in _list_records(directory):
        subject, entries = _read_record(os.path.join(directory, name))
        if entries:
            attached[subject] = [str(entry.digest) for entry in entries]
    return attached


def _list_records(directory: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(directory)
    return []


def _read_record(path: str) -> tuple[str, list[Descriptor]]:
    """Return the manifest of a record, and its artifacts; none if it is missing or damaged."""
    with contextlib.suppress(OSError, FormatError, StoreError, KeyError, TypeError):
        with open(open_regular(path), "rb", buffering=0) as file:
            value = read_json(file.read(_MAX_SIZE) or b"", "it")
        entries = [Descriptor.from_json(entry, "it") for entry in value["attached"]]
        return str(Digest.parse(value["subject"])), entries
    return "", []
