"""Policies: rules in order, and documents that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.trust.policy import Mode, build_policy, build_rule_name, is_covered
from tests.trust.key_files import create_authority, write_key

HOST = "registry.example.com"


@pytest.mark.parametrize(
    ("text", "pattern", "is_matched"),
    [
        (f"{HOST}/team/x", f"{HOST}/team/*", True),
        (f"{HOST}/team/x/y", f"{HOST}/team/*", True),
        (f"{HOST}/team", f"{HOST}/team/*", False),
        (f"{HOST}/team/x", "*", True),
        (f"{HOST}/team/x", "*/x", True),
        (f"{HOST}/team/x", f"{HOST}/*m/x", True),
        (f"{HOST}/teams/x", f"{HOST}/team/x", False),
        (f"{HOST}.evil.example/team/x", f"{HOST}/*", False),
        ("aa", "a*a*a", False),
        ("x[1]", "x[1]", True),
    ],
)
def test_a_pattern_matches_the_whole_name(text: str, pattern: str, is_matched: bool) -> None:
    assert is_covered(text, pattern) is is_matched


def test_the_name_of_a_rule_is_the_canonical_one() -> None:
    assert build_rule_name(Reference.parse("docker.io/alpine:3")) == "docker.io/library/alpine"
    assert build_rule_name(Reference.parse("shapes")) == "shapes"


@pytest.mark.parametrize(
    ("spelling", "host"),
    [
        ("index.docker.io", "docker.io"),
        ("Registry-1.Docker.io:443", "docker.io"),
        (f"{HOST}:443", HOST),
        (HOST.upper(), HOST),
        # Over plain HTTP, by default or as configured
        ("localhost:80", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        (f"{HOST}:80", HOST),
        ("localhost:443", "localhost"),
        ("[::1]:80", "[::1]"),
        ("[0:0::0:1]:5000", "[::1]:5000"),
        ("[2001:DB8::0:7]", "[2001:db8::7]"),
        # Other registries
        (f"{HOST}:8443", f"{HOST}:8443"),
        (f"{HOST}:8080", f"{HOST}:8080"),
    ],
)
def test_the_spelling_of_a_host_makes_no_other_rule(
    tmp_path: Path, spelling: str, host: str
) -> None:
    name = build_rule_name(Reference.parse(f"{spelling}/team/x:v1"))
    assert name == f"{host}/team/x"
    assert build(tmp_path, {"pattern": f"{spelling}/team/*", **KEYS}).find(name)
    short = build_rule_name(Reference.parse(f"{spelling}/x"))
    assert short == (f"{host}/library/x" if host == "docker.io" else f"{host}/x")


def build(tmp_path: Path, *rules: dict[str, Any], **document: Any) -> Any:
    write_key(tmp_path, "signer")
    (tmp_path / "root.pem").write_bytes(create_authority().pem)
    return build_policy([(tmp_path / "trust.yaml", {"rules": list(rules)} | document)])


KEYS = {"keys": ["signer.pub"]}


def test_the_first_rule_that_matches_decides(tmp_path: Path) -> None:
    policy = build(
        tmp_path,
        {"pattern": f"{HOST}/open/*", "mode": "off"},
        {"pattern": f"{HOST}/*", **KEYS},
        mode="warn",
    )
    assert policy.find(f"{HOST}/open/x").mode is Mode.OFF
    assert policy.find(f"{HOST}/x").mode is Mode.WARN
    assert policy.find("other.example.com/x") is None
    assert not policy.is_enforced


def test_another_key_makes_another_rule(tmp_path: Path) -> None:
    rule = {"pattern": "*", **KEYS}
    first = build(tmp_path, rule)
    assert build(tmp_path, rule).version == first.version
    (tmp_path / "signer.pub").write_bytes(write_key(tmp_path, "other")[1].read_bytes())
    again = build_policy([(tmp_path / "trust.yaml", {"rules": [rule]})])
    assert again.version != first.version


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([], "has no rules"),
        ([{"pattern": "*"}], "neither keys nor identities"),
        ([{"pattern": "*", "keys": ["missing.pub"]}], "cannot read"),
        ([{"pattern": "*", "keys": ["signer.pem"]}], "is not a public key"),
        ([{"pattern": "*", **KEYS}, {"pattern": "x/*", "mode": "off"}], "has no effect"),
        ([{"pattern": "x", **KEYS}, {"pattern": "x", "mode": "off"}], "has no effect"),
        ([{"pattern": "*", "identities": [{"subject": "a@b"}]}], "both an authority"),
        ([{"pattern": "*", "authority": "root.pem", **KEYS}], "both an authority"),
        ([{"pattern": "*", "timestampAuthority": "root.pem", **KEYS}], "without an authority"),
        (
            [
                {
                    "pattern": "*",
                    "formats": ["cosign-tag"],
                    "identities": [{"subject": "a", "issuer": "b"}],
                }
            ],
            "which needs keys",
        ),
    ],
)
def test_a_document_that_is_empty_or_contradictory_is_refused(
    tmp_path: Path, rules: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build(tmp_path, *rules)


def test_a_policy_is_validated_by_its_schema(aimage: Any, tmp_path: Path) -> None:
    path = tmp_path / "trust.yaml"
    path.write_text("rules:\n  - pattern: '*'\n    keys: [signer.pub]\n")
    aimage()("validate", path)
    path.write_text("rules:\n  - pattern: '*'\n    kees: [signer.pub]\n")
    assert "kees" in aimage()("validate", path, code=5).out


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("docker.io/alpine", "docker.io/library/alpine"),
        ("index.docker.io/alpine", "docker.io/library/alpine"),
        *((text, text) for text in ("*", "*/x", "small", "sd-v1.5", "docker.io/al*", f"{HOST}*")),
        *((text, text) for text in ("*.example.com/*", f"{HOST}:*/x", "reg:5000/x/*-int8", "a/b")),
    ],
)
def test_a_pattern_is_spelt_as_names_are(tmp_path: Path, text: str, pattern: str) -> None:
    assert build(tmp_path, {"pattern": text, **KEYS}).rules[0].pattern == pattern


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (f"https://{HOST}/team/*", f"{HOST}/team/*"),
        (f"{HOST}/Team/*", f"{HOST}/team/*"),
        (f"{HOST}/team/x:v1", f"{HOST}/team/x"),
        (f"{HOST}/team/x:*", f"{HOST}/team/x"),
        (f"{HOST}/team/", f"{HOST}/team/*"),
        (HOST, f"{HOST}/*"),
        ("localhost:5000", "localhost:5000/*"),
        ("team/", "team/*"),
    ],
)
def test_a_pattern_that_no_name_can_match_is_refused(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(UsageError, match="no repository can be named") as caught:
        build(tmp_path, {"pattern": text, **KEYS})
    assert caught.value.hint == f"write {hint}"
