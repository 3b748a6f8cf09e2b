"""Reports about manifests, with C2PA's library and without."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("c2pa", reason="c2pa is not installed")

from clowder_aimage.errors import UsageError
from clowder_aimage.pictures.provenance import manifest_report, picture_report
from clowder_aimage.pictures.provenance.certificate_name import find_signer
from clowder_aimage.pictures.provenance.claim import describe_generation, restore_facts
from clowder_aimage.pictures.provenance.manifest_report import read_manifest
from clowder_aimage.pictures.provenance.picture_report import read_report
from tests.provenance.signing import (
    FACTS,
    MARK,
    Authority,
    authority,
    get_store,
    make_file,
    open_signer,
)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    signer = open_signer(tmp_path_factory.mktemp("signer"))
    return signer.sign(make_file("webp"), "webp", MARK, (), FACTS)


def test_a_signer_is_trusted_by_a_root_only(signed: bytes) -> None:
    other = Authority.make("Other").pem
    cases = {"": None, authority().pem: True, other: False, other + authority().pem: True}
    for roots, is_trusted in cases.items():
        report = read_manifest(signed, "webp", roots)
        assert (report.is_valid, report.is_trusted) == (True, is_trusted)
    assert (report.signer, report.organization) == ("Test pictures", "Tests")
    assert restore_facts(report.generation) == FACTS


def test_the_signer_is_named_without_the_library(
    signed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_report, "find_spec", lambda _: None)
    monkeypatch.setattr(picture_report, "has_library", lambda: False)
    report = read_report(signed, "it")
    assert (report.manifest, report.signer) == (None, "Test pictures")
    assert report.fault.startswith("it is not checked: ") and report.mark == MARK
    with pytest.raises(UsageError, match=r"needs the extra \[c2pa\]"):
        read_manifest(signed, "webp")


def test_a_damaged_certificate_has_no_name(signed: bytes) -> None:
    store = get_store(signed)
    assert find_signer(store) == "Test pictures"
    start = store.index(b"\x30\x82", store.rindex(b"c2pa.signature\0"))
    for at in range(start, start + 400):
        find_signer(store[:at])
        changed = bytearray(store)
        changed[at] ^= 0xFF
        assert len(find_signer(bytes(changed))) <= 200
    assert find_signer(b"") == find_signer(bytes(1000)) == ""


@pytest.mark.parametrize(
    "generation",
    [None, [], {}, {"schemaVersion": 2}, {"schemaVersion": 1, "parameters": [], "seed": "1"}]
    + [{"schemaVersion": 1, "parameters": {}, "seed": seed} for seed in ("", "x", "-1", "²")],
)
def test_a_statement_of_another_form_restores_nothing(generation: object) -> None:
    assert restore_facts(generation) == {}
    assert restore_facts(describe_generation(FACTS)) == FACTS


def test_a_report_about_what_is_not_a_picture_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"text", make_file()[:20]):
        with pytest.raises(UsageError, match="it is not a valid PNG, JPEG or WebP file"):
            read_report(data, "it")
