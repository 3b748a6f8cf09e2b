"""in-toto statements (in-toto/attestation, spec/v1): about which content something is stated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Digest
from clowder_aimage.oci.manifest import encode
from clowder_aimage.trust.dsse import IN_TOTO, read_object

STATEMENT = "https://in-toto.io/Statement/v1"
# The statement of ``cosign sign`` (sigstore/cosign, specs/BUNDLE_SPEC.md).
COSIGN_SIGN = "https://sigstore.dev/cosign/sign/v1"
# Bytes: a model of 4,000 files takes 1 MB.
MAX_PAYLOAD = 1 << 20


@dataclass(frozen=True, slots=True)
class Statement:
    """A predicate about subjects: each has a name, which may be empty, and digests."""

    predicate_type: str
    subjects: tuple[tuple[str, Mapping[str, str]], ...]
    predicate: Mapping[str, Any]

    @classmethod
    def parse(
        cls, payload_type: str, payload: bytes, label: str = "the signed statement"
    ) -> Statement:
        """Parse the payload of an envelope. Raises FormatError."""
        if payload_type != IN_TOTO:
            raise FormatError(f"the signed payload is of the type {payload_type[:80]!r}")
        document = read_object(read_json(payload, label, MAX_PAYLOAD), "it")
        if document.get("_type") != STATEMENT:
            raise FormatError(f"{label} is not an in-toto statement of version 1")
        predicate_type = document.get("predicateType")
        subjects = document.get("subject")
        if not isinstance(predicate_type, str) or not isinstance(subjects, list) or not subjects:
            raise FormatError(f"{label} has no predicateType or no subject")
        predicate = document.get("predicate")
        return cls(
            predicate_type,
            tuple(map(_parse_subject, subjects)),
            {} if predicate is None else read_object(predicate, "the predicate"),
        )

    def covers(self, digest: Digest) -> bool:
        """Return True if a subject has this digest, by the algorithm of that."""
        return any(digests.get(digest.algorithm) == digest.encoded for _, digests in self.subjects)


def _parse_subject(value: object) -> tuple[str, Mapping[str, str]]:
    subject = read_object(value, "a subject")
    name, digests = subject.get("name", ""), read_object(subject.get("digest"), "a digest")
    texts = {key: text for key, text in digests.items() if isinstance(text, str)}
    if not isinstance(name, str) or not texts or len(texts) < len(digests):
        raise FormatError("a subject of the statement is malformed")
    return name, texts


def build_cosign_statement(digest: Digest) -> bytes:
    """Return the statement that ``cosign sign`` signs for a manifest."""
    # The name says nothing, and sigstore's library for Python requires one
    subject = {"name": "", "digest": {digest.algorithm: digest.encoded}}
    return build_statement(COSIGN_SIGN, subject, {})


def build_statement(
    predicate_type: str, subject: Mapping[str, Any], predicate: Mapping[str, Any]
) -> bytes:
    """Return a statement about one subject."""
    return encode(
        {
            "_type": STATEMENT,
            "subject": [subject],
            "predicateType": predicate_type,
            "predicate": predicate,
        }
    )
