"""Certificates that have expired, with the stamps of times at which they had not."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from clowder_aimage.errors import FormatError, UnauthorizedError, UsageError
from clowder_aimage.oci import Digest
from clowder_aimage.sign import sign_with
from clowder_aimage.trust.acceptance import (
    AcceptedSignature,
    Format,
    Signers,
    accept_bundle,
    accept_payload,
)
from clowder_aimage.trust.certificate import Identity
from clowder_aimage.trust.signer import KeySigner
from clowder_aimage.trust.simple_signing import TaggedSignature, build_payload
from clowder_aimage.trust.statement import build_cosign_statement
from clowder_aimage.trust.timestamp import MAX_STAMPS, StampCommand
from tests.trust.key_files import (
    DAY,
    NOW,
    create_authority,
    create_certificate,
    create_key,
    encode_der,
)
from tests.trust.own_sigstore import IDENTITY, ISSUER, OwnSigstore, encode
from tests.trust.own_timestamp import OwnTimestampAuthority

SUBJECT = Digest.of(b"a manifest")
STATEMENT = build_cosign_statement(SUBJECT)
AUTHORITY, STAMPS = create_authority(), OwnTimestampAuthority()
# The certificate of the signer has expired 20 days ago, and the signature is 25 days old.
CERTIFICATE = create_certificate(AUTHORITY, create_key("expired"), days=(-30, -20))
SIGNED, AFTERWARDS = NOW - 25 * DAY, NOW - 10 * DAY
SIGNERS = Signers(
    roots=(AUTHORITY.der,),
    identities=(Identity("signer@example.com"),),
    stamp_roots=(STAMPS.root.der,),
)
Stamp = Callable[[bytes], bytes]


def sign(stamp: Stamp | None) -> bytes:
    signer = KeySigner(create_key("expired"), "expired", (encode_der(CERTIFICATE),), stamp)
    return sign_with(signer, Format.BUNDLE)(STATEMENT)


def sign_bundle(stamp: Stamp | None) -> Callable[[Signers], AcceptedSignature]:
    raw = sign(stamp)
    return lambda signers: accept_bundle(raw, SUBJECT, signers, NOW)


def sign_tag(stamp: Stamp | None) -> Callable[[Signers], AcceptedSignature]:
    """Return a signature as cosign attaches it, by its annotations."""
    payload = build_payload(SUBJECT, "registry.example.com/team/x")
    signature = KeySigner(create_key("expired"), "expired").sign(payload, "sha256")
    stamps = (stamp(signature),) if stamp else ()
    certificates = (encode_der(CERTIFICATE), AUTHORITY.der)
    layer = TaggedSignature(signature, certificates, stamps).build_layer(payload)
    names = {name.rpartition("/")[2] for name in layer.annotations}
    assert ("rfc3161timestamp" in names) is (stamp is not None)
    return lambda signers: accept_payload(
        payload, TaggedSignature.parse(layer), SUBJECT, signers, NOW
    )


FORMS = {"bundle": sign_bundle, "cosign-tag": sign_tag}


@cache
def create_other() -> OwnTimestampAuthority:
    return OwnTimestampAuthority("other")


def stamp_as_signer(signature: bytes) -> bytes:
    """Return the stamp of a signer of the same root, who is not for stamps."""
    own = OwnTimestampAuthority()
    own.certificate = create_certificate(
        STAMPS.root, own._key, usage=ExtendedKeyUsageOID.CODE_SIGNING
    )
    return own.stamp(signature, SIGNED)


ACCEPTED: dict[str, Stamp] = {
    "before the end": lambda signature: STAMPS.stamp(signature, SIGNED),
    "by an authority that has expired since": lambda signature: OwnTimestampAuthority(
        days=(-60, -22)
    ).stamp(signature, SIGNED),
}
REFUSED: dict[str, Stamp | None] = {
    "none": None,
    "of another signature": lambda _: STAMPS.stamp(b"another signature", SIGNED),
    "after the end": lambda signature: STAMPS.stamp(signature, AFTERWARDS),
    "before the beginning": lambda signature: STAMPS.stamp(signature, NOW - 40 * DAY),
    "of another root": lambda signature: create_other().stamp(signature, SIGNED),
    "by an authority that had expired": lambda signature: OwnTimestampAuthority(
        days=(-60, -26)
    ).stamp(signature, SIGNED),
    "by a signer": stamp_as_signer,
    "damaged": lambda signature: STAMPS.stamp(signature, SIGNED)[:-1] + b"\0",
    "no stamp": lambda _: b"no stamp",
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("form", FORMS)
def test_an_expired_certificate_counts_with_a_stamp(form: str, name: str) -> None:
    accept = FORMS[form](ACCEPTED[name])
    accepted = accept(SIGNERS)
    assert (accepted.format, accepted.time) == (Format(form), SIGNED)
    # Without an expected authority of stamps, a stamp is what anybody can write
    with pytest.raises(FormatError, match="is not accepted"):
        accept(Signers(roots=SIGNERS.roots, identities=SIGNERS.identities))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("form", FORMS)
def test_an_expired_certificate_does_not_count_with_another_stamp(form: str, name: str) -> None:
    with pytest.raises(FormatError, match="is not accepted"):
        FORMS[form](REFUSED[name])(SIGNERS)


def test_the_earliest_good_stamp_of_several_counts() -> None:
    value = json.loads(sign(ACCEPTED["before the end"]))
    entries = value["verificationMaterial"]["timestampVerificationData"]["rfc3161Timestamps"]
    entries.append({"signedTimestamp": encode(b"no stamp")})
    raw = json.dumps(value).encode()
    assert accept_bundle(raw, SUBJECT, SIGNERS, NOW).time == SIGNED
    entries += entries * MAX_STAMPS
    with pytest.raises(FormatError, match=f"at most {MAX_STAMPS} time stamps"):
        accept_bundle(json.dumps(value).encode(), SUBJECT, SIGNERS, NOW)


@pytest.mark.parametrize("annotation", ["certificate", "chain", "rfc3161timestamp"])
def test_a_malformed_annotation_of_a_certificate_does_not_count(annotation: str) -> None:
    tagged = TaggedSignature(b"signature", (encode_der(CERTIFICATE), AUTHORITY.der), (b"stamp",))
    document = tagged.build_layer(b"payload").to_json()
    assert TaggedSignature.parse(type(tagged.build_layer(b"")).from_json(document, "")) == tagged
    document["annotations"][f"dev.sigstore.cosign/{annotation}"] = "{}"
    with pytest.raises(FormatError):
        TaggedSignature.parse(type(tagged.build_layer(b"")).from_json(document, ""))


# Keyless


OWN = OwnSigstore()


def sign_keyless(*stamps: Stamp) -> Any:
    """Return a bundle whose log states no time, as those of Rekor 2."""
    value = OWN.sign(STATEMENT)
    material = value["verificationMaterial"]
    for name in ("integratedTime", "inclusionPromise"):
        del material["tlogEntries"][0][name]
    signature = b64decode(value["dsseEnvelope"]["signatures"][0]["sig"])
    material["timestampVerificationData"] = {
        "rfc3161Timestamps": [{"signedTimestamp": encode(stamp(signature))} for stamp in stamps]
    }
    return value


@pytest.fixture
def keyless(tmp_path: Path) -> Signers:
    root = OWN.write_root(tmp_path / "trusted_root.json", STAMPS)
    return Signers(identities=(Identity(IDENTITY, ISSUER),), trusted_root=root, offline=True)


def accept(value: Any, signers: Signers) -> AcceptedSignature:
    return accept_bundle(json.dumps(value).encode(), SUBJECT, signers, NOW + 100 * DAY)


def test_a_keyless_signature_counts_at_the_time_of_a_stamp(keyless: Signers) -> None:
    time = NOW + timedelta(minutes=3)
    good: Stamp = lambda signature: STAMPS.stamp(signature, time)  # noqa: E731
    assert accept(sign_keyless(good), keyless).time == time
    # What anybody has stamped earlier is not its time.
    early: Stamp = lambda signature: create_other().stamp(signature, NOW - DAY)  # noqa: E731
    assert accept(sign_keyless(good, early), keyless).time == time


@pytest.mark.parametrize(
    "stamp",
    [
        lambda signature: STAMPS.stamp(signature, NOW + timedelta(minutes=11)),
        lambda _: STAMPS.stamp(b"another signature"),
        lambda signature: create_other().stamp(signature),
        lambda signature: OwnTimestampAuthority(days=(-60, -26)).stamp(signature),
    ],
    ids=["later than its certificate", "of another signature", "of another root", "expired"],
)
def test_a_keyless_signature_with_another_stamp_does_not_count(
    keyless: Signers, stamp: Stamp
) -> None:
    with pytest.raises(FormatError, match="is not accepted"):
        accept(sign_keyless(stamp), keyless)


# The signer


def test_a_command_stamps_what_it_is_asked_for(tmp_path: Path) -> None:
    asked = tmp_path / "request"
    answer = tmp_path / "answer"
    answer.write_bytes(STAMPS.stamp(b"another signature"))
    command = StampCommand(f"sh -c 'cat > {asked}; cat {answer}'")
    with pytest.raises(UnauthorizedError, match="the stamp of something else"):
        command.stamp(b"signature")
    assert b"signature" not in asked.read_bytes()
    answer.write_bytes(b"busy")
    with pytest.raises(UnauthorizedError, match="is no time stamp"):
        command.stamp(b"signature")
    with pytest.raises(UnauthorizedError, match="exit code 1"):
        StampCommand("false").stamp(b"signature")
    with pytest.raises(UsageError, match="is empty"):
        StampCommand("")
