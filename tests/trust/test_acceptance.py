"""Decisions about signatures: formats, signers, and parts that belong to each other."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Digest
from clowder_aimage.sign import sign_with
from clowder_aimage.trust.acceptance import (
    Format,
    Signers,
    accept_bundle,
    accept_files,
    accept_payload,
)
from clowder_aimage.trust.bundle import MAX_BUNDLE, build_certificate_bundle
from clowder_aimage.trust.certificate import Identity
from clowder_aimage.trust.dsse import IN_TOTO, Envelope, encode_pae
from clowder_aimage.trust.oms import build_files_statement
from clowder_aimage.trust.signer import KeySigner
from clowder_aimage.trust.simple_signing import TaggedSignature, build_payload
from clowder_aimage.trust.statement import build_cosign_statement, build_statement
from tests.trust.key_files import (
    DAY,
    NOW,
    create_authority,
    create_certificate,
    create_key,
    create_signer,
    encode_der,
    get_public,
)
from tests.trust.own_sigstore import IDENTITY, ISSUER, OwnSigstore, encode

SUBJECT, OTHER = Digest.of(b"a manifest"), Digest.of(b"another one")
SIGNERS = Signers(keys=(get_public("signer"),))
FILES = {"config.json": "11" * 32, "model.safetensors": "22" * 32}
ADDRESS = "signer@example.com"


def sign_statement(statement: bytes, name: str = "signer", bits: int = 256) -> bytes:
    return sign_with(create_signer(name, bits), Format.BUNDLE)(statement)


def test_the_encoding_before_the_signature_is_that_of_the_specification() -> None:
    # secure-systems-lab/dsse, protocol.md, "Test vectors".
    assert encode_pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


@pytest.mark.parametrize("bits", [256, 384, 521])
def test_a_bundle_by_an_expected_key_counts(bits: int) -> None:
    raw = sign_statement(build_cosign_statement(SUBJECT), bits=bits)
    signers = Signers(keys=(get_public("other"), get_public("signer", bits)))
    accepted = accept_bundle(raw, SUBJECT, signers, NOW)
    key = get_public("signer", bits)
    assert (accepted.format, accepted.signer) == (Format.BUNDLE, f"sha256:{key.fingerprint}")
    assert accepted.subject == SUBJECT and accepted.time is None


def change(raw: bytes, edit: Callable[[Any], object]) -> bytes:
    value = json.loads(raw)
    edit(value)
    return json.dumps(value).encode()


def replace_payload(value: Any) -> None:
    value["dsseEnvelope"]["payload"] = encode(build_cosign_statement(OTHER))


GOOD = sign_statement(build_cosign_statement(SUBJECT))
BAD_BUNDLES: dict[str, tuple[bytes, str]] = {
    "another key": (sign_statement(build_cosign_statement(SUBJECT), "other"), "none of the exp"),
    "another digest": (sign_statement(build_cosign_statement(OTHER)), "of another digest"),
    "a payload from another bundle": (
        change(
            sign_statement(build_cosign_statement(OTHER)),
            lambda value: value.update(
                dsseEnvelope=json.loads(GOOD)["dsseEnvelope"]
                | {"signatures": value["dsseEnvelope"]["signatures"]}
            ),
        ),
        "none of the expected",
    ),
    "a statement about something else": (
        sign_statement(
            build_statement(
                "https://spdx.dev/Document", {"digest": {"sha256": SUBJECT.encoded}}, {}
            )
        ),
        "it is not a signature, but states",
    ),
    "another payload type": (
        change(GOOD, lambda value: value["dsseEnvelope"].update(payloadType="text/plain")),
        "of the type 'text/plain'",
    ),
    "two signatures": (
        change(
            GOOD,
            lambda value: value["dsseEnvelope"].update(
                signatures=value["dsseEnvelope"]["signatures"] * 2
            ),
        ),
        "exactly one signature",
    ),
    "no signature": (
        change(GOOD, lambda value: value["dsseEnvelope"].update(signatures=[])),
        "exactly one signature",
    ),
    "an empty signature": (
        change(GOOD, lambda value: value["dsseEnvelope"].update(signatures=[{"sig": ""}])),
        "empty signature",
    ),
    "two materials": (
        change(GOOD, lambda value: value["verificationMaterial"].update(certificate={})),
        "one key, certificate or chain",
    ),
    "no material": (
        change(GOOD, lambda value: value.update(verificationMaterial={})),
        "one key, certificate or chain",
    ),
    "a message signature beside it": (
        change(GOOD, lambda value: value.update(messageSignature={})),
        "DSSE envelope, and nothing else",
    ),
    "an older bundle": (
        change(
            GOOD,
            lambda value: value.update(
                mediaType="application/vnd.dev.sigstore.bundle+json;version=0.1"
            ),
        ),
        "unsupported signature bundle",
    ),
    "a keyless one without an entry": (
        change(
            GOOD,
            lambda value: value.update(
                verificationMaterial={"certificate": {"rawBytes": ""}, "tlogEntries": []}
            ),
        ),
        "exactly one entry of a log",
    ),
    "too many bytes": (GOOD[:-1] + b" " * MAX_BUNDLE + b"}", "too large"),
    "no JSON": (b"signature", "not valid JSON"),
    "a key twice": (GOOD.replace(b"{", b'{"mediaType":"x",', 1), "duplicate key"),
}


@pytest.mark.parametrize("name", BAD_BUNDLES)
def test_a_bundle_that_is_not_a_signature_of_the_manifest_does_not_count(name: str) -> None:
    raw, reason = BAD_BUNDLES[name]
    with pytest.raises(FormatError, match=reason):
        accept_bundle(raw, SUBJECT, SIGNERS, NOW)


def test_the_key_in_a_bundle_is_not_used() -> None:
    """Bundles of model_signing before 1.1 have the key, which anybody may write there."""
    key = get_public("other")
    material = {"publicKey": {"rawBytes": encode(key.der), "keyDetails": "PKIX_ECDSA_P256_SHA_256"}}
    own = change(
        sign_statement(build_cosign_statement(SUBJECT), "other"),
        lambda value: value.update(verificationMaterial=material),
    )
    with pytest.raises(FormatError, match="none of the expected keys"):
        accept_bundle(own, SUBJECT, SIGNERS, NOW)
    assert accept_bundle(own, SUBJECT, Signers(keys=(key,)), NOW).signer.endswith(key.fingerprint)


def test_a_bundle_as_cosign_writes_it_counts() -> None:
    """By a key, with the entry of a log, whose subject has no name (specs/BUNDLE_SPEC.md)."""
    statement = json.loads(build_cosign_statement(SUBJECT))
    del statement["subject"][0]["name"]
    payload = json.dumps(statement).encode()
    certificate = create_certificate(create_authority(), create_key("signer"))
    entry = OwnSigstore().record(payload, b"signature", certificate)
    stamps = {"rfc3161Timestamps": [{"signedTimestamp": encode(b"a stamp")}]}
    raw = change(
        sign_statement(payload),
        lambda value: value["verificationMaterial"].update(
            tlogEntries=[entry], timestampVerificationData=stamps
        ),
    )
    # A key that is known needs neither of them.
    assert accept_bundle(raw, SUBJECT, SIGNERS, NOW).time is None


def test_a_form_that_is_not_expected_does_not_count() -> None:
    signers = Signers(keys=SIGNERS.keys, formats=frozenset({Format.OMS}))
    with pytest.raises(FormatError, match="in the form bundle are not accepted"):
        accept_bundle(GOOD, SUBJECT, signers, NOW)


def accept_tagged(
    payload: bytes, signature: bytes, subject: Digest = SUBJECT, signers: Signers = SIGNERS
) -> Any:
    return accept_payload(payload, TaggedSignature(signature), subject, signers, NOW)


def test_an_older_signature_of_cosign_counts_for_its_digest_and_key_only() -> None:
    payload = build_payload(SUBJECT, "registry.example.com/team/x")
    signature = create_signer("signer").sign(payload, "sha256")
    accepted = accept_tagged(payload, signature)
    assert accepted.format is Format.COSIGN_TAG
    with pytest.raises(FormatError, match="another digest"):
        accept_tagged(payload, signature, OTHER)
    with pytest.raises(FormatError, match="none of the expected keys"):
        accept_tagged(payload, signature, SUBJECT, Signers(keys=(get_public("other"),)))
    upper = payload.replace(b"docker-manifest-digest", b"Docker-manifest-digest")
    accept_tagged(upper, create_signer("signer").sign(upper, "sha256"))
    kind = payload.replace(b"cosign container image signature", b"atomic container signature")
    with pytest.raises(FormatError, match="not a signature of an image"):
        accept_tagged(kind, create_signer("signer").sign(kind, "sha256"))


# Signatures with a certificate


AUTHORITY = create_authority()
EXPECTED = Signers(roots=(AUTHORITY.der,), identities=(Identity(ADDRESS),))


def sign_with_certificate(**options: Any) -> bytes:
    key = create_key("certified")
    authority = options.pop("authority", AUTHORITY)
    chain = (encode_der(create_certificate(authority, key, **options)),)
    signer = KeySigner(key, "certified", chain)
    return sign_with(signer, Format.BUNDLE)(build_cosign_statement(SUBJECT))


def test_a_certificate_below_an_expected_root_counts_for_its_identity() -> None:
    accepted = accept_bundle(sign_with_certificate(), SUBJECT, EXPECTED, NOW)
    assert accepted.signer == ADDRESS
    pattern = Signers(roots=(AUTHORITY.der,), identities=(Identity("*@example.com"),))
    accept_bundle(sign_with_certificate(), SUBJECT, pattern, NOW)


def test_a_chain_by_an_intermediate_authority_counts() -> None:
    intermediate = create_key("intermediate")
    middle = create_certificate(AUTHORITY, intermediate, is_authority=True)
    leaf_key = create_key("certified")
    between = type(AUTHORITY)(middle, intermediate)
    chain = (encode_der(create_certificate(between, leaf_key)), encode_der(middle))
    raw = sign_with(KeySigner(leaf_key, "x", chain), Format.BUNDLE)(build_cosign_statement(SUBJECT))
    accept_bundle(raw, SUBJECT, EXPECTED, NOW)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"authority": create_authority("other")}, "is not accepted"),
        ({"subject": "signer@example.com.evil.example"}, "who is not expected"),
        ({"days": (-30, -1)}, "is not accepted"),
        ({"days": (1, 30)}, "is not accepted"),
        ({"is_authority": True}, "is not accepted"),
    ],
    ids=["another root", "another identity", "expired", "not yet valid", "an authority"],
)
def test_another_certificate_does_not_count(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        accept_bundle(sign_with_certificate(**options), SUBJECT, EXPECTED, NOW)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The version 3, the name of an extension, the curve P-256
        ("a003020102", "a003020105"),
        ("0603551d25", "0603551d0f"),
        ("06082a8648ce3d030107", "06082a8648ce3d030109"),
    ],
)
@pytest.mark.parametrize("position", [0, 1])
def test_a_malformed_certificate_does_not_count(before: str, after: str, position: int) -> None:
    der = encode_der(create_certificate(AUTHORITY, create_key("certified")))
    damaged = der.replace(bytes.fromhex(before), bytes.fromhex(after), 1)
    assert damaged != der
    chain = (damaged,) if position == 0 else (der, damaged)
    signer = KeySigner(create_key("certified"), "certified", chain)
    raw = sign_with(signer, Format.BUNDLE)(build_cosign_statement(SUBJECT))
    if position and after != "a003020105":
        # A certificate that is not needed is not read.
        accept_bundle(raw, SUBJECT, EXPECTED, NOW)
        return
    with pytest.raises(FormatError, match="certificate is not accepted"):
        accept_bundle(raw, SUBJECT, EXPECTED, NOW)


def test_a_root_inside_a_bundle_and_a_signer_who_signs_certificates_do_not_count() -> None:
    other, key = create_authority("other"), create_key("certified")
    chain = (encode_der(create_certificate(other, key)), other.der)
    statement = build_cosign_statement(SUBJECT)
    with pytest.raises(FormatError, match="is not accepted"):
        accept_bundle(
            sign_with(KeySigner(key, "x", chain), Format.BUNDLE)(statement), SUBJECT, EXPECTED, NOW
        )
    # The certificate of a signer is not one of an authority.
    leaf = create_certificate(AUTHORITY, create_key("leaf"))
    below = create_certificate(type(AUTHORITY)(leaf, create_key("leaf")), key)
    forged = (encode_der(below), encode_der(leaf))
    with pytest.raises(FormatError, match="is not accepted"):
        accept_bundle(
            sign_with(KeySigner(key, "x", forged), Format.BUNDLE)(statement),
            SUBJECT,
            EXPECTED,
            NOW,
        )


def test_a_signature_by_another_key_than_that_of_the_certificate_does_not_count() -> None:
    certificate = encode_der(create_certificate(AUTHORITY, create_key("certified")))
    statement = build_cosign_statement(SUBJECT)
    signature = create_signer("other").sign(encode_pae(IN_TOTO, statement))
    raw = build_certificate_bundle(Envelope(IN_TOTO, statement, signature), (certificate,))
    with pytest.raises(FormatError, match="does not match"):
        accept_bundle(raw, SUBJECT, EXPECTED, NOW)


# Keyless signatures


OWN = OwnSigstore()
STATEMENT = build_cosign_statement(SUBJECT)


@pytest.fixture
def keyless(tmp_path: Path) -> Signers:
    root = OWN.write_root(tmp_path / "trusted_root.json")
    return Signers(identities=(Identity(IDENTITY, ISSUER),), trusted_root=root, offline=True)


def accept(value: dict[str, Any], signers: Signers) -> Any:
    return accept_bundle(json.dumps(value).encode(), SUBJECT, signers, NOW + 100 * DAY)


def test_a_keyless_signature_counts_by_its_identity_and_has_the_time_of_the_log(
    keyless: Signers,
) -> None:
    # The certificate has expired since: the log shows that the signature is older.
    accepted = accept(OWN.sign(STATEMENT), keyless)
    assert (accepted.signer, accepted.issuer, accepted.time) == (IDENTITY, ISSUER, NOW)


def test_a_keyless_signature_of_another_identity_or_instance_does_not_count(
    keyless: Signers,
) -> None:
    for identity in (Identity(IDENTITY, "https://other.example.com"), Identity("x@y", ISSUER)):
        signers = Signers(identities=(identity,), trusted_root=keyless.trusted_root, offline=True)
        with pytest.raises(FormatError, match="who is not expected"):
            accept(OWN.sign(STATEMENT), signers)
    with pytest.raises(FormatError, match="keyless signature is not accepted"):
        accept(OwnSigstore("other").sign(STATEMENT), keyless)
    with pytest.raises(FormatError, match="no identity with an issuer is expected"):
        accept(OWN.sign(STATEMENT), SIGNERS)


def test_the_parts_of_a_keyless_bundle_must_belong_to_each_other(keyless: Signers) -> None:
    """Parts that are good in another bundle (GHSA-whqx-f9j3-ch6m)."""
    good, other = OWN.sign(STATEMENT), OWN.sign(build_cosign_statement(OTHER))
    for edit in (
        lambda value: value["verificationMaterial"].update(
            tlogEntries=other["verificationMaterial"]["tlogEntries"]
        ),
        lambda value: value["verificationMaterial"].update(
            certificate=other["verificationMaterial"]["certificate"]
        ),
        lambda value: value.update(dsseEnvelope=other["dsseEnvelope"]),
        lambda value: value["dsseEnvelope"].update(signatures=other["dsseEnvelope"]["signatures"]),
        lambda value: value["verificationMaterial"]["tlogEntries"][0].update(integratedTime="1"),
        lambda value: value["verificationMaterial"]["tlogEntries"][0]["inclusionProof"].update(
            rootHash=encode(bytes(32))
        ),
        lambda value: value["verificationMaterial"]["tlogEntries"][0].pop("inclusionPromise"),
    ):
        mixed = copy.deepcopy(good)
        edit(mixed)
        with pytest.raises(FormatError):
            accept(mixed, keyless)
    accept(good, keyless)


def test_a_keyless_signature_after_the_end_of_its_certificate_does_not_count(
    keyless: Signers,
) -> None:
    value = OWN.sign(STATEMENT)
    certificate = value["verificationMaterial"]["certificate"]["rawBytes"]
    signature = base64.b64decode(value["dsseEnvelope"]["signatures"][0]["sig"])
    from cryptography.x509 import load_der_x509_certificate

    parsed = load_der_x509_certificate(base64.b64decode(certificate))
    late = OWN.record(STATEMENT, signature, parsed, NOW + DAY)
    value["verificationMaterial"]["tlogEntries"] = [late]
    with pytest.raises(FormatError, match="is not accepted"):
        accept(value, keyless)


# Signatures of files


def build_oms(**changes: Any) -> bytes:
    statement = json.loads(build_files_statement("model", FILES, SUBJECT))
    for path, value in changes.items():
        target = statement
        *parents, last = path.split("__")
        for name in parents:
            target = target[name]
        target[last] = value
    return sign_statement(json.dumps(statement).encode())


def test_a_signature_of_files_counts_for_the_manifest_that_it_states() -> None:
    accepted = accept_bundle(build_oms(), SUBJECT, SIGNERS, NOW)
    assert (accepted.format, accepted.files) == (Format.OMS, 2)
    with pytest.raises(FormatError, match="of the files of"):
        accept_bundle(build_oms(), OTHER, SIGNERS, NOW)


def test_a_signature_of_files_is_compared_with_the_files() -> None:
    accept_bundle(build_oms(), SUBJECT, SIGNERS, NOW, lambda _: FILES)
    for files, reason in (
        (FILES | {"extra.py": "33" * 32}, "'extra.py' is not signed"),
        ({"config.json": FILES["config.json"]}, "'model.safetensors' is missing"),
        (FILES | {"config.json": "33" * 32}, "'config.json' has other bytes"),
    ):
        with pytest.raises(FormatError, match=reason):
            accept_bundle(build_oms(), SUBJECT, SIGNERS, NOW, {"sha256": files}.__getitem__)
    ignored = FILES | {".gitattributes": "33" * 32, ".git/config": "33" * 32}
    accept_bundle(build_oms(), SUBJECT, SIGNERS, NOW, lambda _: ignored)
    with pytest.raises(FormatError, match=r"'sub/\.gitignore' is not signed"):
        nested = FILES | {"sub/.gitignore": "33" * 32}
        accept_bundle(build_oms(), SUBJECT, SIGNERS, NOW, lambda _: nested)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"predicate__serialization__method": "shards"}, "only whole files"),
        ({"predicate__serialization__hash_type": "md5"}, "has the hash 'md5'"),
        ({"predicate__resources": []}, "has no files"),
        ({"subject": [{"name": "model", "digest": {"sha256": "00" * 32}}]}, "not the digest of"),
        ({"predicateType": "https://model_signing/Digests/v0.1"}, "not a signature"),
        (
            {"predicate__resources": [{"name": "x", "algorithm": "sha256", "digest": "../x"}]},
            "malformed",
        ),
    ],
)
def test_another_statement_about_files_does_not_count(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        accept_files(build_oms(**changes), SIGNERS, NOW)
