"""Keyless signatures by an own instance of sigstore, and OpenSSF Model Signing as the judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trust.own_sigstore import IDENTITY, ISSUER
from tests.trust.sigstore_server import SigstoreServer, create_token, serving_sigstore


@pytest.fixture
def sigstore(tmp_path: Path) -> Iterator[SigstoreServer]:
    with serving_sigstore(tmp_path) as instance:
        yield instance


@pytest.fixture
def signed(pushed: Any, sigstore: SigstoreServer) -> Any:
    """Return the command line, with ``sign`` by the instance and an identity token."""
    files = ("--signing-config", sigstore.signing_config, "--trusted-root", sigstore.trusted_root)
    pushed.environment["SIGSTORE_ID_TOKEN"] = create_token()
    pushed.sign = ("sign", pushed.name, "--keyless", *files)
    return pushed


@pytest.mark.parametrize("form", ["bundle", "oms"])
@pytest.mark.parametrize("has_stamps", [False, True])
def test_an_identity_signs_by_an_own_instance(
    signed: Any, sigstore: SigstoreServer, form: str, has_stamps: bool
) -> None:
    sigstore.write_signing_config(has_stamps=has_stamps)
    signed(*signed.sign, "--as", form, "-q")
    assert len(sigstore.seen) == 2 + has_stamps
    identity = ("--identity", IDENTITY, "--issuer", ISSUER)
    check = ("verify", signed.name, "--signature", "--json", *identity)
    (report,) = signed(*check, "--trusted-root", sigstore.trusted_root).value
    (signature,) = report["signatures"]
    assert (signature["method"], signature["format"]) == ("keyless", form)
    assert signature["signer"] == IDENTITY and signature["time"]


def test_without_a_token_or_with_an_old_one_nothing_is_signed(
    signed: Any, sigstore: SigstoreServer
) -> None:
    signed.environment["SIGSTORE_ID_TOKEN"] = create_token(exp=1)
    assert "sigstore has refused to sign" in signed(*signed.sign, code=4).err
    signed.environment["SIGSTORE_ID_TOKEN"] = ""
    assert "there is no identity token" in signed(*signed.sign, code=2).err
    assert sigstore.seen == []


def test_a_file_that_is_not_one_of_an_instance_is_an_error(
    signed: Any, sigstore: SigstoreServer
) -> None:
    sigstore.signing_config.write_text("{}")
    assert "is not a file of an instance of sigstore" in signed(*signed.sign, code=2).err


def test_an_instance_that_does_not_answer_is_an_error(
    signed: Any, sigstore: SigstoreServer
) -> None:
    sigstore.url = "http://127.0.0.1:1"
    sigstore.write_signing_config()
    assert "sigstore cannot be reached" in signed(*signed.sign, code=1).err


@pytest.mark.integration
def test_model_signing_and_we_verify_keyless_signatures_of_each_other(
    signed: Any, sigstore: SigstoreServer, tmp_path: Path
) -> None:
    from model_signing import signing, verifying

    ours, theirs, model = tmp_path / "ours.sig", tmp_path / "theirs.sig", tmp_path / "model"
    config = sigstore.write_trust_config()
    signed(*signed.sign, "--as", "oms", "-o", ours)
    signed("export", signed.name, model)
    judge = verifying.Config().use_sigstore_verifier(
        identity=IDENTITY, oidc_issuer=ISSUER, trust_config=config
    )
    judge.verify(model, ours)
    signing.Config().use_sigstore_signer(identity_token=create_token(), trust_config=config).sign(
        model, theirs
    )
    check = ("verify", "--directory", model, "--bundle", theirs, "--issuer", ISSUER)
    root = ("--trusted-root", sigstore.trusted_root)
    assert f"keyless {IDENTITY}" in signed(*check, "--identity", IDENTITY, *root).out
    signed(*check, "--identity", "another@example.com", *root, code=5)
    next(model.rglob("config.json")).write_bytes(b"{}")
    signed(*check, "--identity", IDENTITY, *root, code=5)
    with pytest.raises(ValueError, match="Hash mismatch"):
        judge.verify(model, ours)
