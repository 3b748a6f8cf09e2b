"""Digests: strict before they can become part of a path or a URL."""

from __future__ import annotations

import contextlib
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Digest, parse_document
from clowder_aimage.oci.digest import create_hasher
from tests.hostile.hostile_corpus import HEX, TEXTS, VALUES


def accepts(text: object) -> bool:
    for parse in (
        Digest.parse,
        lambda text: Descriptor.from_json({"mediaType": "a/b", "digest": text, "size": 1}),
    ):
        try:
            parse(text)
        except FormatError:
            continue
        return True
    return False


def test_parse_refuses() -> None:
    corpus = {**VALUES, "bytes": HEX.encode()}
    assert [name for name, text in corpus.items() if accepts(text)] == []


@pytest.mark.parametrize("field", ["config", "layer", "subject", "manifest"])
def test_a_bad_digest_in_any_field_refuses_the_document(field: str) -> None:
    good = {"mediaType": "a/b", "digest": f"sha256:{HEX}", "size": 1}
    bad = {**good, "digest": TEXTS["climbs"]}
    document = {
        "config": {"schemaVersion": 2, "config": bad, "layers": [good]},
        "layer": {"schemaVersion": 2, "config": good, "layers": [good, bad]},
        "subject": {"schemaVersion": 2, "config": good, "layers": [], "subject": bad},
        "manifest": {"schemaVersion": 2, "manifests": [bad]},
    }[field]
    with pytest.raises(FormatError):
        parse_document(json.dumps(document).encode())


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_of_parse_and_str_agree(algorithm: str) -> None:
    digest = Digest.of(b"content", algorithm)
    assert digest.encoded == hashlib.new(algorithm, b"content").hexdigest()
    assert Digest.parse(str(digest)) == digest
    assert digest.short == digest.encoded[:12]
    hasher = digest.create_hasher()
    hasher.update(b"content")
    assert hasher.hexdigest() == digest.encoded


def test_an_unknown_algorithm_has_no_hasher() -> None:
    for name in ("md5", "shake_128", "SHA256", ""):
        with pytest.raises(FormatError):
            create_hasher(name)


@given(st.text())
def test_parse_gives_the_text_back_or_refuses(text: str) -> None:
    with contextlib.suppress(FormatError):
        assert str(Digest.parse(text)) == text


@given(st.text(alphabet="0123456789abcdefABCDEF./\\\0-", min_size=60, max_size=66))
def test_only_lower_case_hex_passes(encoded: str) -> None:
    good = len(encoded) == 64 and set(encoded) <= set("0123456789abcdef")
    try:
        Digest.parse(f"sha256:{encoded}")
    except FormatError:
        assert not good
    else:
        assert good
