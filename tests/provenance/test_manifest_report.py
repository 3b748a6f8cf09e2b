"""Reports about manifests, with C2PA's library and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("c2pa", reason="c2pa is not installed")

from clowder_aimage.document.schema import validate
from clowder_aimage.errors import UsageError
from clowder_aimage.model.bounded_process import RefusedError
from clowder_aimage.model.picture_mark import AGENT, COMPOSITE, GENERATED, PictureMark
from clowder_aimage.oci import mediatype
from clowder_aimage.pictures.generated_picture import GeneratedPicture
from clowder_aimage.pictures.provenance import manifest_report, picture_report
from clowder_aimage.pictures.provenance.annotation import describe_origin
from clowder_aimage.pictures.provenance.certificate_name import find_signer
from clowder_aimage.pictures.provenance.claim import describe_generation, restore_facts
from clowder_aimage.pictures.provenance.manifest_process import answer_request, encode_request
from clowder_aimage.pictures.provenance.manifest_report import read_manifest
from clowder_aimage.pictures.provenance.marked_input import MarkedInput
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


def test_the_process_summarizes_what_the_library_reports(signed: bytes, tmp_path: Path) -> None:
    """In this process, whose coverage is measured."""
    path = tmp_path / "input"
    path.write_bytes(signed)
    signer, mark = open_signer(tmp_path), PictureMark(COMPOSITE)
    entry = MarkedInput("image", path, MARK, has_manifest=True, keeps_manifest=True)
    edited = signer.sign(make_file(), "png", mark, (entry,), FACTS)
    report = json.loads(answer_request(encode_request(edited, "png", authority().pem)))
    assert (report["state"], report["faults"], report["signer"]) == ("Trusted", [], "Test pictures")
    assert report["actions"] == [
        {"action": "c2pa.opened", "sourceType": ""},
        {"action": "c2pa.edited", "sourceType": COMPOSITE},
    ]
    (summary,) = report["inputs"]
    assert (summary["title"], summary["relationship"]) == ("image", "parentOf")
    assert (summary["signer"], summary["faults"]) == ("Test pictures", [])
    changed = encode_request(edited[:-20] + bytes(20), "png", "")
    for request, message in (
        (encode_request(make_file(), "png", ""), "no JUMBF data found"),
        (changed, "asset could not be parsed"),
        (encode_request(edited, "png", "no certificates"), "not certificates in PEM|"),
    ):
        with pytest.raises(RefusedError, match=message):
            answer_request(request)


def test_the_mark_and_the_signer_are_annotations_of_a_layer(signed: bytes) -> None:
    origin = {mediatype.SOURCE_TYPE: GENERATED, mediatype.SOFTWARE_AGENT: AGENT}
    cases = {make_file("jpeg"): origin, signed: origin | {mediatype.SIGNER: "Test pictures"}}
    for data, expected in cases.items():
        kind = "webp" if data is signed else "jpeg"
        layer = GeneratedPicture(data, 7, kind, FACTS).layer
        title = {mediatype.TITLE: f"7.{'webp' if kind == 'webp' else 'jpg'}"}
        assert layer.annotations == expected | title
        validate("layer-annotations", dict(layer.annotations))
    assert describe_origin(b"no picture") == {}


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
