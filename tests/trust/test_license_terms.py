"""Licences that a policy accepts, by SPDX expressions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.dialect.license import list_stated_licenses
from clowder_aimage.dialect.modelpack import CONFIG
from clowder_aimage.document.license_expression import (
    list_identifiers,
    list_licenses,
    parse_expression,
)
from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.oci import Descriptor, Manifest, mediatype
from clowder_aimage.trust.license_terms import build_terms
from clowder_aimage.trust.policy import Mode, build_policy

OPEN = ("Apache-2.0", "MIT")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("apache-2.0", "Apache-2.0"),
        ("MIT or apache-2.0", "MIT OR Apache-2.0"),
        ("mit AND isc OR zlib", "(MIT AND ISC) OR Zlib"),
        ("mit AND (isc or zlib)", "MIT AND (ISC OR Zlib)"),
        ("((mit))", "MIT"),
        ("GPL-2.0", "GPL-2.0-only"),
        ("gpl-2.0+", "GPL-2.0-or-later"),
        ("AGPL-3.0+", "AGPL-3.0-or-later"),
        ("Apache-2.0+", "Apache-2.0+"),
        ("gpl-2.0-only with classpath-exception-2.0", "GPL-2.0-only WITH Classpath-exception-2.0"),
        ("MIT WITH AdditionRef-x", "MIT WITH AdditionRef-x"),
        ("LicenseRef-FLUX", "LicenseRef-FLUX"),
        ("DocumentRef-spdx:LicenseRef-x AND MIT", "DocumentRef-spdx:LicenseRef-x AND MIT"),
        # Values of model cards that SPDX does not list
        ("gemma", "LicenseRef-gemma"),
        ("llama3.1", "LicenseRef-llama3.1"),
        ("openrail++", "LicenseRef-openrail-"),
        ("LicenseRef-MIT-Bootstrap", "LicenseRef-MIT-Bootstrap"),
    ],
)
def test_an_expression_is_read_as_spdx_writes_it(text: str, canonical: str) -> None:
    expression = parse_expression(text)
    assert str(expression) == canonical
    assert parse_expression(canonical) == expression


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "()", "(", "MIT)", "(MIT", "MIT AND", "AND", "or MIT", "MIT MIT", "MIT WITH"),
        *("Apache License 2.0", "MIT And ISC", "MIT WITH a WITH b", "(MIT) WITH x", "MIT/ISC"),
        *("MIT, ISC", "+", "LicenseRef-", "NOT MIT", "https://example.com/license", "MIT +"),
        *("(" * 1000 + "MIT", "(" * 31 + "MIT" + ")" * 31, "MIT OR " * 1000 + "MIT", "\0", "é"),
    ],
)
def test_a_text_that_is_no_expression_is_an_error(text: str) -> None:
    with pytest.raises(FormatError):
        parse_expression(text)


def test_all_identifiers_of_the_list_are_read() -> None:
    assert len(list_identifiers()) > 600
    for name in list_identifiers():
        found = list(list_licenses(parse_expression(name.swapcase())))
        assert len(found) == 1
        assert found[0].is_listed, name


def find_fault(terms: dict[str, Any], *stated: str) -> str | None:
    return build_terms("trust.yaml", terms).find_fault(stated)


@pytest.mark.parametrize(
    ("terms", "accepted", "refused"),
    [
        (
            {"allow": [*OPEN]},
            ["mit", "MIT OR CC-BY-NC-4.0", "CC-BY-NC-4.0 OR (MIT AND Apache-2.0)", "Apache-2.0+"],
            ["cc-by-nc-4.0", "MIT AND CC-BY-NC-4.0", "other", "LicenseRef-MIT", "ISC", "a b"],
        ),
        ({"allow": [*OPEN], "unknown": "allow"}, ["other", "gemma", "a b"], ["ISC"]),
        (
            {"deny": ["CC-BY-NC-*"]},
            ["mit", "ISC", "CC-BY-4.0", "CC-BY-NC-4.0 OR MIT"],
            ["cc-by-nc-sa-4.0", "MIT AND CC-BY-NC-4.0", "gemma", "CC-BY-NC-ND-3.0-IGO"],
        ),
        ({"deny": ["CC-BY-NC-*"], "unknown": "allow"}, ["gemma"], ["cc-by-nc-4.0"]),
        # Denied, although allowed
        ({"allow": ["CC-BY-*"], "deny": ["CC-BY-NC-*"]}, ["cc-by-sa-4.0"], ["cc-by-nc-4.0"]),
        ({"allow": ["LicenseRef-gemma"]}, ["gemma", "licenseref-GEMMA"], ["LicenseRef-gemma2"]),
        ({"allow": ["GPL-2.0"]}, ["GPL-2.0-only", "gpl-2.0+"], ["GPL-3.0-only"]),
        ({"allow": ["GPL-2.0-only"]}, ["gpl-2.0"], ["GPL-2.0-or-later"]),
        ({"deny": ["agpl-3.0"]}, ["mit"], ["AGPL-3.0-or-later", "AGPL-3.0-only"]),
        (
            {"allow": ["GPL-2.0-only WITH Classpath-exception-2.0"]},
            ["gpl-2.0-only WITH classpath-exception-2.0"],
            ["GPL-2.0-only", "GPL-2.0-only WITH GCC-exception-2.0"],
        ),
        # An exception permits more than the licence, unless nobody knows it.
        (
            {"allow": ["Apache-2.0"]},
            ["Apache-2.0 WITH LLVM-exception"],
            ["Apache-2.0 WITH Commons-Clause"],
        ),
        (
            {"deny": ["Apache-2.0"], "unknown": "allow"},
            ["Commons-Clause"],
            ["Apache-2.0 WITH Commons-Clause", "Apache-2.0+"],
        ),
        ({"unknown": "deny"}, ["mit", "cc-by-nc-4.0"], ["gemma"]),
        ({"unknown": "allow"}, ["mit", "gemma"], []),
    ],
)
def test_one_alternative_or_all_parts_must_be_accepted(
    terms: dict[str, Any], accepted: list[str], refused: list[str]
) -> None:
    assert [text for text in accepted if find_fault(terms, text) is not None] == []
    assert [text for text in refused if find_fault(terms, text) is None] == []


def test_an_aimage_without_a_licence_is_unknown() -> None:
    assert find_fault({"deny": ["MIT"]}) == "it states no licence (unknown: deny)"
    assert find_fault({"deny": ["MIT"], "unknown": "allow"}) is None


def test_all_licences_that_are_stated_must_be_accepted() -> None:
    assert find_fault({"allow": [*OPEN]}, "mit", "apache-2.0") is None
    fault = find_fault({"allow": [*OPEN]}, "mit", "cc-by-nc-4.0")
    assert fault == "it states the licence 'cc-by-nc-4.0', and CC-BY-NC-4.0 is not allowed"
    fault = find_fault({"deny": ["CC-BY-NC-*"]}, "cc-by-nc-4.0")
    assert fault is not None
    assert fault.endswith("CC-BY-NC-4.0 is denied by 'CC-BY-NC-*'")


def write_manifest(kind: str, config: Any, **annotations: str) -> tuple[Manifest, bytes]:
    raw = json.dumps(config).encode()
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST, "layers": []}
    document |= {"config": Descriptor.of(kind, raw).to_json()}
    if annotations:
        document["annotations"] = {mediatype.LICENSES: annotations["license"]}
    return Manifest.build(document), raw


@pytest.mark.parametrize(
    ("found", "stated"),
    [
        (write_manifest(mediatype.AIMAGE_CONFIG, {"license": "mit"}), ("mit",)),
        (write_manifest(mediatype.AIMAGE_CONFIG, {"license": " mit "}, license="mit"), ("mit",)),
        (write_manifest(mediatype.AIMAGE_CONFIG, {"license": "a"}, license="b"), ("a", "b")),
        (write_manifest(mediatype.AIMAGE_CONFIG, {}), ()),
        (write_manifest(mediatype.AIMAGE_CONFIG, {"license": "NOASSERTION"}, license=" "), ()),
        (write_manifest(mediatype.AIMAGE_CONFIG, {"license": ["mit"]}), ()),
        (write_manifest(mediatype.AIMAGE_CONFIG, []), ()),
        (write_manifest(CONFIG, {"descriptor": {"licenses": ["a", "b"]}}), ("a", "b")),
        (write_manifest(CONFIG, {"descriptor": {"licenses": ["a", 1]}}, license="c"), ("c", "a")),
        (write_manifest(CONFIG, {"descriptor": {"licenses": "a"}}), ()),
        (write_manifest("text/plain", "x", license="a"), ("a",)),
    ],
)
def test_licences_are_stated_in_several_places(
    found: tuple[Manifest, bytes], stated: tuple[str, ...]
) -> None:
    assert list_stated_licenses(*found) == stated


@pytest.mark.parametrize(
    ("document", "is_valid"),
    [
        ({"licenses": {"allow": ["MIT"]}}, True),
        ({"licenses": {"mode": "off"}}, True),
        ({"rules": [{"pattern": "*", "licenses": {"deny": ["MIT"], "unknown": "allow"}}]}, True),
        ({"licenses": {}}, False),
        ({"licenses": {"allow": []}}, False),
        ({"licenses": {"allowed": ["MIT"]}}, False),
        ({"licenses": {"allow": ["MIT"], "unknown": "warn"}}, False),
        ({}, False),
    ],
)
def test_the_schema_knows_licences(document: Any, is_valid: bool) -> None:
    if is_valid:
        validate("trust", document)
        validate("config", {"trust": document})
        return
    with pytest.raises(FormatError):
        validate("trust", document)


@pytest.mark.parametrize(
    ("terms", "message", "hint"),
    [
        ({"allow": ["Apache2"]}, "not on SPDX's list", "did you mean Apache-"),
        ({"allow": ["gemma"]}, "not on SPDX's list", "is written LicenseRef-gemma"),
        ({"allow": ["MIT OR ISC"]}, "several licences", "one licence"),
        ({"deny": ["MIT ISC"]}, "no licence expression", "one licence"),
        ({"allow": ["MIT"], "deny": ["M*"]}, "MIT is denied, too", ""),
    ],
)
def test_an_entry_without_effect_is_refused(terms: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        build_terms("trust.yaml", terms)
    assert hint in (raised.value.hint or "")


def test_licences_and_signatures_are_decided_by_rules_of_their_own() -> None:
    document = {
        "licenses": {"allow": [*OPEN]},
        "rules": [
            {"pattern": "r.example/lab/*", "licenses": {"allow": ["CC-BY-NC-4.0"]}},
            {"pattern": "r.example/old/*", "licenses": {"mode": "off"}},
            {"pattern": "r.example/*", "mode": "off"},
        ],
    }
    user = {"licenses": {"deny": ["MIT"]}, "mode": "warn"}
    policy = build_policy([(Path("/m.yaml"), document), (Path("/u.yaml"), user)])
    assert policy.is_enforced
    # A rule with licences alone does not shadow the one about signatures.
    rule = policy.find("r.example/lab/x")
    assert rule is not None
    assert rule.pattern == "r.example/*"
    sources = {
        name: [each.terms.source for each in policy.find_licenses(name)]
        for name in ("r.example/lab/x", "r.example/old/x", "r.example/x", "x")
    }
    assert sources == {
        "r.example/lab/x": ["rule 1 of /m.yaml", "/u.yaml"],
        "r.example/old/x": ["/u.yaml"],
        "r.example/x": ["/m.yaml", "/u.yaml"],
        "x": ["/m.yaml", "/u.yaml"],
    }
    assert policy.find_licenses("x")[1].mode is Mode.WARN
    assert policy.refuses("x")
    assert not policy.refuses("r.example/old/x")
    with pytest.raises(UsageError, match="has no effect"):
        build_policy(
            [
                (
                    Path("/m.yaml"),
                    {
                        "rules": [
                            {"pattern": "*", "licenses": {"allow": ["MIT"]}},
                            {"pattern": "r.example/*", "licenses": {"allow": ["ISC"]}},
                        ]
                    },
                )
            ]
        )
