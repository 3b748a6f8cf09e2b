"""What oci-layout and index.json of an archive say (OCI image-spec, image-layout.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.layout.index import entry_name
from clowder_aimage.oci import Descriptor, Reference, read_json

_MOST = 4096  # entries; each name is a durable write of its own


@dataclass(frozen=True, slots=True)
class ArchiveNames:
    """What is named, and the entries, in words, that have no name of ours."""

    named: Mapping[Reference, Descriptor]
    unnamed: tuple[str, ...] = ()


def check_layout(raw: bytes, where: str) -> None:
    """Raise FormatError unless these are the bytes of an oci-layout of the version there is."""
    try:
        version = read_json(raw, "oci-layout")["imageLayoutVersion"]
    except (FormatError, LookupError, TypeError):
        version = None
    if version != "1.0.0":
        raise FormatError(f"oci-layout in {where} does not say version 1.0.0")


def read_entries(raw: bytes, where: str) -> list[Descriptor]:
    """The entries of index.json, at least one.

    Raises:
        FormatError: it is no index, or ``where`` has none or too many of them in it.
    """
    try:
        value = read_json(raw, "index.json")
    except FormatError:
        value = None
    entries = value.get("manifests") if isinstance(value, dict) else None
    if not isinstance(entries, list):
        raise FormatError(f"the index.json of {where} is not an OCI index")
    if not 0 < len(entries) <= _MOST:
        raise FormatError(
            f"the index.json of {where} lists {len(entries)} manifests, not 1 to {_MOST}"
        )
    return [Descriptor.from_json(entry, f"index.json of {where}") for entry in entries]


def choose(entries: list[Descriptor], wanted: Reference | None, where: str) -> ArchiveNames:
    """The names to give: the one that is ``wanted``, or those that the entries have.

    Raises:
        UsageError: there is none, or more than one manifest for the one that is wanted.
        FormatError: a name names two things.
    """
    if wanted is not None:
        if len({entry.digest for entry in entries}) > 1:
            raise UsageError(
                f"{where} has {len(entries)} entries, and --as can name one: "
                + ", ".join(map(_words, entries[:20])),
                hint="load it without --as, and use 'aimage tag'",
            )
        return ArchiveNames({wanted: entries[0]})
    named: dict[Reference, Descriptor] = {}
    unnamed = []
    for entry in entries:
        reference = _reference(entry)
        if reference is None:
            unnamed.append(_words(entry))
        elif named.setdefault(reference, entry).digest != entry.digest:
            raise FormatError(
                f"{where} calls both {named[reference].digest} and {entry.digest} {reference}"
            )
    if not named:
        raise UsageError(
            f"{where} has no name for {', '.join(unnamed[:20])}",
            hint="give it one: aimage load FILE --as NAME",
        )
    return ArchiveNames(named, tuple(unnamed))


def _reference(entry: Descriptor) -> Reference | None:
    """The name of an entry; None where it has none, or one that cannot be a name here.

    Raises:
        FormatError: the name is another manifest's digest.
    """
    try:
        reference = Reference.parse(entry_name(entry.annotations))
    except UsageError:
        return None
    if reference.digest not in (None, entry.digest):
        raise FormatError(f"{entry.digest} is called {reference}, which is another digest")
    return reference


def _words(entry: Descriptor) -> str:
    """The entry, in words: its name where it has one, and its digest."""
    name = entry_name(entry.annotations)
    return f"{entry.digest} ({name[:100]!r})" if name else str(entry.digest)
