"""Signatures that must not count, at doors of each kind; and then one that counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.sign import _attach_bundle, sign_with
from clowder_aimage.trust.acceptance import Format
from clowder_aimage.trust.bundle import MAX_BUNDLE
from clowder_aimage.trust.oms import build_files_statement
from clowder_aimage.trust.signer import KeySigner
from clowder_aimage.trust.statement import (
    COSIGN_SIGN,
    build_cosign_statement,
    build_statement,
)
from tests.trust.key_files import (
    create_authority,
    create_certificate,
    create_key,
    create_signer,
    encode_der,
)
from tests.trust.own_sigstore import OwnSigstore
from tests.trust.place import Place

OTHER = Digest.of(b"another manifest")


def sign(statement: bytes, name: str = "signer") -> bytes:
    return sign_with(create_signer(name), Format.BUNDLE)(statement)


def certify(statement: bytes, **options: Any) -> bytes:
    key = create_key("certified")
    chain = (encode_der(create_certificate(create_authority("unknown"), key, **options)),)
    return sign_with(KeySigner(key, "x", chain), Format.BUNDLE)(statement)


def change(raw: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(raw) | changes).encode()


def repeat(raw: bytes) -> bytes:
    envelope = json.loads(raw)["dsseEnvelope"]
    return change(raw, dsseEnvelope=envelope | {"signatures": envelope["signatures"] * 2})


# By name: the bundle for the statement about the manifest.
TRAPS: dict[str, Callable[[bytes, Digest], bytes]] = {
    "by another key": lambda statement, _: sign(statement, "other"),
    "of another digest": lambda _, __: sign(build_cosign_statement(OTHER)),
    "of a bill of materials": lambda _, digest: sign(
        build_statement("https://spdx.dev/Document", {"digest": {"sha256": digest.encoded}}, {})
    ),
    "of another payload": lambda statement, _: change(
        sign(build_cosign_statement(OTHER)),
        dsseEnvelope=json.loads(sign(statement, "other"))["dsseEnvelope"],
    ),
    "with two signatures": lambda statement, _: repeat(sign(statement)),
    "of another version": lambda statement, _: change(sign(statement), mediaType="application/x"),
    "without material": lambda statement, _: change(sign(statement), verificationMaterial={}),
    "of the files of another manifest": lambda _, __: sign(
        build_files_statement("model", {"config.json": "11" * 32}, OTHER)
    ),
    "with a certificate of an unknown root": lambda statement, _: certify(statement),
    "with an expired certificate": lambda statement, _: certify(statement, days=(-30, -1)),
    "of an identity that is not expected": lambda statement, _: json.dumps(
        OwnSigstore().sign(statement)
    ).encode(),
    "too large": lambda statement, _: sign(statement) + b" " * MAX_BUNDLE,
    "broken": lambda _, __: b"{",
}
DOORS = (("pull", "NAME"), ("copy", "NAME", "OTHER"), ("manifest", "fetch", "NAME"))


def attach(place: Place, directory: Path, raw: bytes) -> None:
    reference = Reference.parse(place.name)
    with Repository(reference, ClientOptions(docker_config=directory)) as repository:
        place.lift()
        content = repository.resolve(reference)
        _push_bundle(repository, reference, content, raw)
        place.enforce()


def _push_bundle(
    repository: Repository, reference: Reference, content: Descriptor, raw: bytes
) -> None:
    """Attach a bundle, also one that is too large for ``sign``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clowder_aimage.sign.MAX_BUNDLE", 2 * MAX_BUNDLE)
        _attach_bundle(repository, reference, content, raw, COSIGN_SIGN)


def test_no_signature_that_must_not_count_opens_a_door(place: Place, tmp_path: Path) -> None:
    digest = Digest.parse(place.digest)
    statement = build_cosign_statement(digest)
    for name, build in TRAPS.items():
        # They add up: the last one is refused together with all others.
        attach(place, tmp_path, build(statement, digest))
        for door in DOORS:
            done = place.empty.attempt(*place.place(door))
            assert (done.code, "is refused by rule 1" in done.err) == (5, True), (name, door, done)
        # From the store, whose registry has them.
        assert place.here.attempt("export", place.name, "out").code == 5, name
    attach(place, tmp_path, sign(statement))
    for door in DOORS:
        place.empty(*place.place(door))
    place.here("export", place.name, "out", "-q")


def test_an_artifact_that_poses_as_a_signature_opens_no_door(place: Place, tmp_path: Path) -> None:
    """A manifest of the type of signatures, with the layers of a model."""
    reference = Reference.parse(place.name)
    with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
        content = repository.resolve(reference)
        with repository.open(content) as file:
            document = json.loads(file.read())
        document["artifactType"] = "application/vnd.dev.sigstore.bundle.v0.3+json"
        posing = Manifest.build(document)
        target = Reference.parse(f"{place.repository}:posing")
        repository.push(posing.descriptor, build_bytes_body(posing.raw), target)
    place.enforce()
    place.empty("pull", f"{place.repository}:posing", code=5)


def test_a_refusal_of_a_stored_model_tells_what_its_registry_has(
    place: Place, tmp_path: Path
) -> None:
    attach(place, tmp_path, sign(build_cosign_statement(Digest.parse(place.digest)), "other"))
    refused = place.here("export", place.name, "out", code=5).err
    assert f"{place.repository}@{place.digest} is refused by rule 1" in refused
    assert "by none of the expected keys" in refused
    assert "not found" in place.here("trust", "check", "unknown", code=3).err
    public = place.here("sign", place.name, "--key", place.public, code=2)
    assert "it is the public part of a key" in public.err
