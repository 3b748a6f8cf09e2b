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
from clowder_aimage.oci.digest import new_hasher

HEX = "0123456789abcdef" * 4
# CVE-2024-37032, CVE-2024-3727: a digest that is used as a path.
EVIL = [
    "sha256:../../x",
    f"sha256:../{HEX[3:]}",
    f"sha256:/{HEX[1:]}",
    f"sha256-{HEX}",
    "sha256-..",
    f"sha256:{HEX.upper()}",
    f"SHA256:{HEX}",
    f"sha256:{HEX[:-1]}",
    f"sha256:{HEX}0",
    f"sha256:{HEX}\n",
    f" sha256:{HEX}",
    f"sha256:{HEX[:-1]}\0",
    f"sha256:{HEX[:-1]}\uff11",  # a digit, but not one of ours
    f"sha256:sha256:{HEX}",
    f"sha512:{HEX}",
    f"sha256:{HEX}{HEX}",
    f"md5:{'0' * 32}",
    f"blake3:{HEX}",
    f"sha256+b64u:{HEX}",
    f"../sha256:{HEX}",
    f":{HEX}",
    "sha256:",
    "sha256",
    "",
    HEX,
    None,
    1,
    True,
    [f"sha256:{HEX}"],
    {"sha256": HEX},
    f"sha256:{HEX}".encode(),
]


@pytest.mark.parametrize("text", EVIL, ids=lambda text: repr(text)[:40])
def test_anything_else_is_refused_wherever_it_stands(text):
    with pytest.raises(FormatError):
        Digest.parse(text)
    with pytest.raises(FormatError):
        Descriptor.from_json({"mediaType": "a/b", "digest": text, "size": 1})


@pytest.mark.parametrize("text", [text for text in EVIL if isinstance(text, str | int | None)])
@pytest.mark.parametrize("field", ["config", "layer", "subject", "manifest"])
def test_a_bad_digest_anywhere_refuses_the_whole_document(text, field):
    good = {"mediaType": "a/b", "digest": f"sha256:{HEX}", "size": 1}
    bad = {**good, "digest": text}
    document = {
        "config": {"schemaVersion": 2, "config": bad, "layers": [good]},
        "layer": {"schemaVersion": 2, "config": good, "layers": [good, bad]},
        "subject": {"schemaVersion": 2, "config": good, "layers": [], "subject": bad},
        "manifest": {"schemaVersion": 2, "manifests": [bad]},
    }[field]
    with pytest.raises(FormatError):
        parse_document(json.dumps(document).encode())


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_of_parse_and_str_agree(algorithm):
    digest = Digest.of(b"content", algorithm)
    assert digest.encoded == hashlib.new(algorithm, b"content").hexdigest()
    assert Digest.parse(str(digest)) == digest
    assert digest.short == digest.encoded[:12]
    hasher = digest.hasher()
    hasher.update(b"content")
    assert hasher.hexdigest() == digest.encoded


def test_an_unknown_algorithm_has_no_hasher():
    for name in ("md5", "shake_128", "SHA256", ""):
        with pytest.raises(FormatError):
            new_hasher(name)


@given(st.text())
def test_parse_gives_the_text_back_or_refuses(text):
    with contextlib.suppress(FormatError):
        assert str(Digest.parse(text)) == text


@given(st.text(alphabet="0123456789abcdefABCDEF./\\\0-", min_size=60, max_size=66))
def test_only_lower_case_hex_passes(encoded):
    good = len(encoded) == 64 and set(encoded) <= set("0123456789abcdef")
    try:
        Digest.parse(f"sha256:{encoded}")
    except FormatError:
        assert not good
    else:
        assert good
