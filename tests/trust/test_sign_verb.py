"""``sign`` and ``verify --signature``, in a registry and in the store."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.sign import _attach_bundle
from clowder_aimage.trust.statement import COSIGN_SIGN, build_cosign_statement
from tests.lora_file import write_lora
from tests.trust.key_files import (
    Authority,
    create_authority,
    create_certificate,
    create_key,
    write_key,
)
from tests.trust.own_sigstore import IDENTITY, ISSUER, OwnSigstore
from tests.trust.own_timestamp import OwnTimestampAuthority

# Days of validity, also in years
LONG = (-400, 4000)


@pytest.mark.parametrize("form", ["bundle", "cosign-tag", "oms"])
@pytest.mark.parametrize("place", [(), ("--local",)])
def test_what_is_signed_verifies(
    pushed: Any, tmp_path: Path, form: str, place: tuple[str, ...]
) -> None:
    private, public = write_key(tmp_path, "signer")
    other = write_key(tmp_path, "other")[1]
    signed = pushed("sign", pushed.name, "--key", private, "--as", form, *place)
    assert signed.line.startswith("sha256:")
    check = ("verify", pushed.name, "--signature", "--json", "--key")
    (report,) = pushed(*check, public).value
    assert [entry["format"] for entry in report["signatures"]] == [form]
    assert pushed(*check, other, code=5).value[0]["signatures"] == []


def test_an_exported_model_verifies_with_the_signature_of_its_files(
    pushed: Any, tmp_path: Path
) -> None:
    private, public = write_key(tmp_path, "signer")
    signature, model = tmp_path / "model.sig", tmp_path / "model"
    pushed("sign", "small", "--key", private, "--as", "oms", "-o", signature)
    pushed("export", "small", model)
    check = ("verify", "--directory", model, "--bundle", signature, "--key", public)
    assert "over " in pushed(*check).line
    config = next(model.rglob("config.json"))
    (model / "more").mkdir()
    (model / "more" / "link").symlink_to(config)
    assert "'more/link' is a link" in pushed(*check, code=5).err
    (model / "more" / "link").unlink()
    (model / "linked").symlink_to(model / "more")
    assert "'linked' is a link" in pushed(*check, code=5).err
    (model / "linked").unlink()
    config.write_bytes(config.read_bytes() + b" ")
    assert "other bytes than the signed ones" in pushed(*check, code=5).err


def test_a_directory_that_cannot_be_read_is_not_verified(
    pushed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = write_key(tmp_path, "signer")
    signature, model = tmp_path / "model.sig", tmp_path / "model"
    pushed("sign", "small", "--key", private, "--as", "oms", "-o", signature)
    pushed("export", "small", model)
    (model / "more").mkdir()
    (model / "more" / "file").write_text("not signed")
    opened = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if path == "more":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    check = ("verify", "--directory", model, "--bundle", signature, "--key", public)
    assert "Permission denied" in pushed(*check, code=1).err


def test_an_index_is_signed_with_its_manifests(pushed: Any, tmp_path: Path) -> None:
    private, public = write_key(tmp_path, "signer")
    name = pushed.name.rpartition(":")[0]
    first = pushed("resolve", pushed.name).line
    layout = ImageLayout(pushed.store)
    child = layout.resolve(Reference.parse(pushed.name))
    index = encode(
        {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": [child.to_json()]}
    )
    with Repository(Reference.parse(name), ClientOptions(docker_config=tmp_path)) as repository:
        content = Descriptor.of(mediatype.OCI_INDEX, index)
        repository.push(content, build_bytes_body(index), Reference.parse(f"{name}:all"))
    pushed("verify", f"{name}:all", "--signature", "--key", public, code=5)
    assert len(pushed("sign", f"{name}:all", "--key", private).out.split()) == 2
    for target in (f"{name}:all", f"{name}@{content.digest}", f"{name}@{first}"):
        pushed("verify", target, "--signature", "--key", public)


def test_a_command_signs_with_a_key_elsewhere(pushed: Any, tmp_path: Path) -> None:
    private, public = write_key(tmp_path, "signer")
    command = f"openssl dgst -sha256 -sign {private}"
    pushed("sign", pushed.name, "--key", public, "--key-command", command)
    pushed("verify", pushed.name, "--signature", "--key", public)
    other = write_key(tmp_path, "other")[1]
    wrong = pushed("sign", pushed.name, "--key", other, "--key-command", command, code=2)
    assert "does not verify with the public key" in wrong.err
    failed = pushed("sign", pushed.name, "--key", public, "--key-command", "false", code=4)
    assert "the command false has not signed: exit code 1" in failed.err
    pushed("sign", pushed.name, "--key", public, "--key-command", "no-such-program", code=2)


def test_an_encrypted_key_needs_its_password(pushed: Any, tmp_path: Path) -> None:
    private, public = write_key(tmp_path, "signer", b"open sesame")
    assert "AIMAGE_KEY_PASSWORD" in pushed("sign", pushed.name, "--key", private, code=2).err
    pushed.environment["AIMAGE_KEY_PASSWORD"] = "open sesame"
    pushed("sign", pushed.name, "--key", private)
    pushed("verify", pushed.name, "--signature", "--key", public)


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    return Certified(tmp_path)


class Certified:
    """The files of a signer with a certificate below an intermediate authority."""

    def __init__(self, directory: Path) -> None:
        self.private, self.public = write_key(directory, "certified")
        root, middle_key = create_authority(), create_key("intermediate")
        middle = create_certificate(root, middle_key, days=LONG, is_authority=True)
        leaf = create_certificate(Authority(middle, middle_key), create_key("certified"), days=LONG)
        pem = serialization.Encoding.PEM
        self.leaf, self.middle = directory / "leaf.pem", directory / "middle.pem"
        self.chain, self.root = directory / "chain.pem", directory / "root.pem"
        self.leaf.write_bytes(leaf.public_bytes(pem))
        self.middle.write_bytes(middle.public_bytes(pem))
        self.chain.write_bytes(self.leaf.read_bytes() + self.middle.read_bytes())
        self.root.write_bytes(root.pem)
        self.sign = ("--key", self.private, "--certificate", self.chain)
        self.expected = ("--identity", "signer@example.com", "--authority", self.root)


@pytest.mark.parametrize("form", ["bundle", "cosign-tag", "oms"])
def test_a_certificate_and_a_key_elsewhere_sign_in_each_form(
    pushed: Any, certified: Certified, form: str
) -> None:
    command = f"openssl dgst -sha256 -sign {certified.private}"
    elsewhere = ("--key", certified.public, "--key-command", command)
    chain = ("--certificate", certified.chain)
    pushed("sign", pushed.name, *elsewhere, *chain, "--as", form, "-q")
    check = ("verify", pushed.name, "--signature", "--json")
    (report,) = pushed(*check, *certified.expected).value
    (signature,) = report["signatures"]
    assert (signature["method"], signature["format"]) == ("certificate", form)
    # It is by a key, too, for who knows that.
    if form == "cosign-tag":
        pushed(*check, "--key", certified.public)
    pushed("sign", pushed.name, *elsewhere, "--certificate", certified.root, code=2)


def test_openssl_stamps_the_time_of_a_signature(
    pushed: Any, certified: Certified, tmp_path: Path
) -> None:
    authority = OwnTimestampAuthority()
    files = authority.write(tmp_path)
    roots = ("--timestamp-authority", files["root"])
    for form in ("bundle", "cosign-tag"):
        stamp = (
            "--timestamp-command",
            f"openssl ts -reply -config {files['config']} -queryfile /dev/stdin",
        )
        pushed("sign", pushed.name, *certified.sign, *stamp, "--as", form, "-q")
        check = ("verify", pushed.name, "--signature", "--json", "--form", form)
        (report,) = pushed(*check, *certified.expected, *roots).value
        assert report["signatures"][0]["time"]
        # A time that nobody who is expected states is none.
        (report,) = pushed(*check, *certified.expected).value
        assert "time" not in report["signatures"][0]
    pushed("sign", pushed.name, "--key", certified.private, *stamp, code=2)
    pushed("verify", pushed.name, "--signature", "--key", certified.public, *roots, code=2)


@pytest.mark.integration
def test_model_signing_and_we_verify_certificates_of_each_other(
    pushed: Any, certified: Certified, tmp_path: Path
) -> None:
    from model_signing import signing, verifying

    ours, theirs, model = tmp_path / "ours.sig", tmp_path / "theirs.sig", tmp_path / "small"
    pushed("sign", "small", *certified.sign, "--as", "oms", "-o", ours)
    pushed("export", "small", model)
    judge = verifying.Config().use_certificate_verifier(certificate_chain=[certified.root])
    judge.verify(model, ours)
    signing.Config().use_certificate_signer(
        private_key=certified.private,
        signing_certificate=certified.leaf,
        certificate_chain=[certified.middle],
    ).sign(model, theirs)
    check = ("verify", "--directory", model, "--bundle", theirs)
    pushed(*check, *certified.expected)
    pushed(*check, "--identity", "other@example.com", "--authority", certified.root, code=5)
    next(model.rglob("config.json")).write_bytes(b"{}")
    pushed(*check, *certified.expected, code=5)


def test_pictures_adapters_and_other_artifacts_are_signed(
    pushed: Any, repository: str, tmp_path: Path
) -> None:
    private, public = write_key(tmp_path, "signer")
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"a picture")
    prints = pushed("attach", pushed.name, picture, "--type", mediatype.AIMAGE_PICTURE).line
    adapter = f"{repository}:adapter"
    pushed("create", adapter, write_lora(tmp_path / "lora.safetensors"), "-q")
    pushed("push", adapter, "-q")
    for name, form in (
        (f"{repository}@{prints}", "bundle"),
        (f"{repository}@{prints}", "cosign-tag"),
        *((adapter, form) for form in ("bundle", "cosign-tag", "oms")),
    ):
        pushed("sign", name, "--key", private, "--as", form, "-q")
        pushed("verify", name, "--signature", "--key", public, "--form", form)


def test_signatures_travel_with_a_recursive_copy(
    pushed: Any, repository: str, tmp_path: Path
) -> None:
    private, public = write_key(tmp_path, "signer")
    pushed("sign", pushed.name, "--key", private)
    pushed("copy", "-r", pushed.name, f"{repository}-copy:v1", "-q")
    pushed("verify", f"{repository}-copy:v1", "--signature", "--key", public)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sign", "x"), "missing option --key"),
        (("sign", "x", "--keyless", "--as", "cosign-tag"), "--keyless cannot be combined"),
        (("sign", "x", "--key", "KEY", "-o", "x.sig"), "--output requires --as oms"),
        (("sign", "x", "--key", "PUBLIC"), "is not a private key"),
        (("verify", "x", "--signature"), "missing option --key or --identity"),
        (("verify", "x", "--key", "PUBLIC"), "require --signature"),
        (("verify", "x", "--signature", "--key", "KEY"), "is not a public key"),
        (("verify", "x", "--signature", "--identity", "a@b"), "requires either --issuer"),
        (("verify", "--signature", "--key", "PUBLIC"), "--signature requires REF"),
        (("verify", "x", "--signature", "--repair", "--key", "PUBLIC"), "--repair cannot be"),
    ],
)
def test_options_that_contradict_each_other(
    aimage: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    private, public = write_key(tmp_path, "signer")
    files = {"KEY": private, "PUBLIC": public}
    assert message in aimage()(*(files.get(word, word) for word in arguments), code=2).err


def test_a_certificate_and_a_keyless_identity_are_accepted(pushed: Any, tmp_path: Path) -> None:
    private, _ = write_key(tmp_path, "certified")
    authority = create_authority()
    certificate = create_certificate(authority, create_key("certified"), days=(-400, 4000))
    chain, root = tmp_path / "chain.pem", tmp_path / "root.pem"
    chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    root.write_bytes(authority.pem)
    pushed("sign", pushed.name, "--key", private, "--certificate", chain, "-q")
    check = ("verify", pushed.name, "--signature", "--identity")
    done = pushed(*check, "signer@*", "--authority", root)
    assert "signed by certificate signer@example.com" in done.out
    pushed(*check, "other@*", "--authority", root, code=5)
    # Keyless, as cosign attaches it.
    sigstore, layout = OwnSigstore(), ImageLayout(pushed.store)
    reference = Reference.parse(pushed.name)
    content = layout.resolve(reference)
    raw = json.dumps(sigstore.sign(build_cosign_statement(content.digest))).encode()
    _attach_bundle(layout, reference, content, raw, COSIGN_SIGN)
    trusted = sigstore.write_root(tmp_path / "trusted_root.json")
    keyless = ("--issuer", ISSUER, "--trusted-root", trusted, "--offline")
    done = pushed(*check, IDENTITY, *keyless)
    assert f"signed by keyless {IDENTITY} by {ISSUER}, 2026-11-29 12:00 UTC" in done.out
    pushed(*check, "other@*", *keyless, code=5)


@pytest.mark.integration
def test_model_signing_verifies_our_signatures_and_we_verify_its(
    pushed: Any, tmp_path: Path
) -> None:
    from model_signing import signing, verifying

    private, public = write_key(tmp_path, "signer")
    signature, model = tmp_path / "ours.sig", tmp_path / "small"
    pushed("sign", "small", "--key", private, "--as", "oms", "-o", signature)
    pushed("export", "small", model)
    judge = verifying.Config().use_elliptic_key_verifier(public_key=public)
    judge.verify(model, signature)
    theirs = tmp_path / "theirs.sig"
    signing.Config().use_elliptic_key_signer(private_key=private).sign(model, theirs)
    check = ("verify", "--directory", model, "--key", public, "--bundle")
    pushed(*check, theirs)
    # It also counts for the AImage, whose files are compared.
    kind = "application/vnd.dev.sigstore.bundle.v0.3+json"
    pushed("attach", pushed.name, theirs, "--type", kind)
    (report,) = pushed("verify", pushed.name, "--signature", "--key", public, "--json").value
    assert report["signatures"][0]["format"] == "oms"
    next(model.rglob("config.json")).write_bytes(b"{}")
    pushed(*check, theirs, code=5)
    with pytest.raises(ValueError, match="Hash mismatch"):
        judge.verify(model, signature)
