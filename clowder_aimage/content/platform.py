"""The selection of a manifest in an index, by variant, by platform, or as the only one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from clowder_aimage.content.graph import GraphNode, read_document, walk
from clowder_aimage.content.store import Source
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference, mediatype

# Maximum number of indexes read to find one manifest
_MAX_INDEXES = 64
_MAX_LISTED = 40
_MAX_WIDTH = 60
_SYSTEMS = {"macos": "darwin"}
# Go's names by those of uname and other tools.
_ARCHITECTURES = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "aarch64": "arm64",
    "i386": "386",
    "i686": "386",
    "armv6l": "arm/v6",
    "armv7l": "arm/v7",
}
# These variants mean the same as none.
_BASE = {("amd64", "v1"), ("arm64", "v8")}
# BuildKit marks an attestation about another child with this annotation.
_ATTESTED = "vnd.docker.reference.type"


@dataclass(frozen=True, slots=True)
class Platform:
    """The platform of a manifest, in Go's words (image-spec, image-index.md)."""

    os: str
    architecture: str
    variant: str = ""

    @classmethod
    def of(cls, os: str, architecture: str, variant: str = "") -> Platform:
        """Return a platform, normalized: ``x86_64`` is ``amd64``, ``arm64/v8`` is ``arm64``."""
        os, architecture, variant = (field.strip().lower() for field in (os, architecture, variant))
        architecture, _, implied = _ARCHITECTURES.get(architecture, architecture).partition("/")
        variant = variant or implied
        variant = "" if (architecture, variant) in _BASE else variant
        return cls(_SYSTEMS.get(os, os), architecture, variant)

    @classmethod
    def detect(cls) -> Platform:
        """Return the platform of this machine."""
        machine = os.uname()
        return cls.of(machine.sysname, machine.machine)

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Parse ``os/architecture[/variant]``. Raises UsageError."""
        fields = text.split("/")
        if not 2 <= len(fields) <= 3 or not all(field.strip() for field in fields):
            raise UsageError(
                f"invalid platform {text!r}", hint="use OS/ARCH[/VARIANT], such as linux/arm64"
            )
        return cls.of(*fields)

    @classmethod
    def in_descriptor(cls, descriptor: Descriptor) -> Platform | None:
        """Return the platform of a child of an index; None without one, or with a malformed one."""
        match descriptor.extra.get("platform"):
            case {"os": str(os), "architecture": str(architecture), **rest} if os and architecture:
                variant = rest.get("variant")
                return cls.of(os, architecture, variant if isinstance(variant, str) else "")
        return None

    def takes(self, platform: Platform) -> bool:
        """Return True if content for ``platform`` runs on this platform; no variant accepts any."""
        is_compatible = (self.os, self.architecture) == (platform.os, platform.architecture)
        return is_compatible and self.variant in ("", platform.variant)

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


@dataclass(frozen=True, slots=True)
class ManifestSelector:
    """The variant and the platform to select; None for any.

    Manifests of ``fallback_variant`` are selected only if there are no others.
    """

    variant: str | None = None
    platform: Platform | None = None
    fallback_variant: str | None = None


ANY = ManifestSelector()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A manifest in an index, with its variant and platform, or those of a parent index."""

    descriptor: Descriptor
    variant: str = ""
    platform: Platform | None = None


def select(
    source: Source, root: Descriptor, reference: Reference, selector: ManifestSelector | None
) -> tuple[Descriptor, Manifest | Index]:
    """Return the selected manifest below ``root``, the manifest of ``reference``, and its document.

    If several match, the one for this machine's platform is selected. Without a selector ``root``
    itself is returned, even if it is an index.

    Raises:
        UsageError: several manifests of an index match, or a single one has another variant.
        NotFoundError: the index has no such manifest.
        FormatError, VerificationError, AccessError: a document cannot be read.
    """
    document = read_document(source, root)
    if selector is None:
        return root, document
    if isinstance(document, Index):
        machine, candidates = Platform.detect(), list_candidates(source, document)
        chosen = choose(candidates, selector, machine, reference).descriptor
        return chosen, read_document(source, chosen)
    if selector.variant not in (None, document.annotations.get(mediatype.VARIANT)):
        raise UsageError(
            f"{reference} is not an index, and its variant is not {selector.variant!r}",
            remedy="no_variant",
        )
    return root, document


def list_candidates(source: Source, index: Index) -> list[Candidate]:
    """Return the selectable manifests of ``index`` in order, without attestations.

    Raises FormatError, VerificationError, AccessError: a nested index cannot be read.
    """
    count = itertools.count(1)

    def read(content: Descriptor) -> Manifest | Index | None:
        if content.digest == index.digest:
            return index
        if content.media_type not in mediatype.INDEXES or _is_attestation(content):
            return None
        if next(count) >= _MAX_INDEXES:
            raise FormatError(f"{content.digest}: over {_MAX_INDEXES} nested indexes")
        return read_document(source, content)

    return [
        _build_candidate(node)
        for node in walk(read, index.descriptor)
        if node.content.media_type in mediatype.MANIFESTS and not _is_attestation(node.content)
    ]


def _build_candidate(node: GraphNode) -> Candidate:
    """Return the candidate at ``node``, with missing fields taken from its parent indexes."""
    content, variant, platform = node.content, "", None
    ancestor: GraphNode | None = node
    while ancestor is not None:
        variant = variant or ancestor.content.annotations.get(mediatype.VARIANT, "")
        platform = platform or Platform.in_descriptor(ancestor.content)
        ancestor = ancestor.parent
    return Candidate(content, variant, platform)


def _is_attestation(child: Descriptor) -> bool:
    # BuildKit gives attestations the platform unknown/unknown, so that no client selects them.
    unknown = Platform.in_descriptor(child) == Platform("unknown", "unknown")
    return unknown or _ATTESTED in child.annotations


def choose(
    candidates: Sequence[Candidate],
    selector: ManifestSelector,
    machine: Platform,
    reference: Reference,
) -> Candidate:
    """Return the selected candidate, the only one, or the only match for this machine.

    Raises NotFoundError if none matches, UsageError if several do. Both list them.
    """
    matches = [
        candidate for candidate in candidates if selector.variant in (None, candidate.variant)
    ]
    matches = [
        candidate for candidate in matches if candidate.variant != selector.fallback_variant
    ] or matches
    if selector.platform is not None:
        unspecified = [candidate for candidate in matches if candidate.platform is None]
        matches = _filter_compatible(matches, selector.platform) or unspecified
    elif len(_collect_digests(matches)) > 1:
        compatible = _filter_compatible(matches, machine, unspecified=True)
        # The files of a mountable image are the same for all platforms.
        portable = [x for x in matches if mediatype.MOUNTABLE in x.descriptor.annotations]
        matches = compatible or portable[:1]
    if not matches:
        raise _build_no_match_error(candidates, selector, machine, reference)
    if len(_collect_digests(matches)) > 1:
        raise _build_ambiguity_error(matches, reference)
    return matches[0]


def _filter_compatible(
    candidates: Sequence[Candidate], platform: Platform, *, unspecified: bool = False
) -> list[Candidate]:
    """Return the candidates for exactly that platform, or else all compatible ones.

    With ``unspecified``, candidates without a platform are included.
    """
    exact = any(candidate.platform == platform for candidate in candidates)
    fits = platform.__eq__ if exact else platform.takes
    return [
        candidate
        for candidate in candidates
        if (fits(candidate.platform) if candidate.platform else unspecified)
    ]


def _collect_digests(candidates: Sequence[Candidate]) -> set[Digest]:
    """Return the distinct digests: an index may list a manifest twice."""
    return {candidate.descriptor.digest for candidate in candidates}


def _build_no_match_error(
    candidates: Sequence[Candidate],
    selector: ManifestSelector,
    machine: Platform,
    reference: Reference,
) -> NotFoundError:
    if not candidates:
        return NotFoundError(
            f"{reference} is an index without selectable manifests",
            remedy="pull_index",
            reference=reference,
        )
    criteria = [f"with variant {selector.variant!r}"] if selector.variant is not None else []
    if selector.platform or selector.variant is None:
        criteria.append(f"for {selector.platform or f'this machine, {machine}'}")
    return NotFoundError(
        f"{reference} is an index without a manifest {' '.join(criteria)}; it has:\n"
        + _format_table(candidates),
        remedy="choose_other_manifest",
        reference=reference,
    )


def _build_ambiguity_error(matches: Sequence[Candidate], reference: Reference) -> UsageError:
    has_variants = len({candidate.variant for candidate in matches}) > 1
    has_platforms = len({candidate.platform for candidate in matches}) > 1
    return UsageError(
        f"{reference} is an index, and several of its manifests match:\n{_format_table(matches)}",
        remedy="choose_variant_or_platform"
        if has_variants and has_platforms
        else "choose_variant"
        if has_variants
        else "choose_platform"
        if has_platforms
        else "choose_digest",
        reference=reference,
        name=reference.name,
    )


def _format_table(candidates: Sequence[Candidate]) -> str:
    """Return a line for each: variant, platform and digest."""
    rows = [
        (
            format_cell(candidate.variant),
            format_cell(str(candidate.platform or "")),
            str(candidate.descriptor.digest),
        )
        for candidate in candidates[:_MAX_LISTED]
    ]
    variant, platform = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"  {row[0]:{variant}}  {row[1]:{platform}}  {row[2]}" for row in rows]
    remainder = len(candidates) - len(rows)
    return "\n".join([*lines, f"  and {remainder} more"] if remainder else lines)


def format_cell(text: str) -> str:
    """Return untrusted text as one short line; ``-`` if it is empty."""
    return " ".join(text.split())[:_MAX_WIDTH] or "-"
