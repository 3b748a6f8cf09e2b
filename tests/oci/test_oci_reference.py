"""References: what is a host, what is local, and what is neither."""

from __future__ import annotations

import re
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.oci.reference import build_pattern

DIGEST = Digest.of(b"x")


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag"),
    [
        ("model:v1", None, "model", "v1"),
        ("docker/model:V1.0-rc_2", None, "docker/model", "V1.0-rc_2"),
        ("a__b.c-d--e", None, "a__b.c-d--e", "latest"),
        ("localhost", None, "localhost", "latest"),
        ("localhost:5000", None, "localhost", "5000"),
        ("localhost:5000/model", "localhost:5000", "model", "latest"),
        ("Registry.Example.COM/model", "Registry.Example.COM", "model", "latest"),
        ("[::1]:5000/m:v1", "[::1]:5000", "m", "v1"),
        ("nekko.ai/llama/3.1:70B", "nekko.ai", "llama/3.1", "70B"),
        (f"m:{'t' * 128}", None, "m", "t" * 128),
        ("r" * 255, None, "r" * 255, "latest"),
        ("h.x:65535/m", "h.x:65535", "m", "latest"),
    ],
)
def test_parse_a_tag(text: str, registry: str | None, repository: str, tag: str) -> None:
    reference = Reference.parse(text)
    assert reference == Reference(registry, repository, tag, None)
    assert Reference.parse(str(reference)) == reference
    assert reference.target == tag


@pytest.mark.parametrize(
    ("text", "registry", "tag"),
    [
        (f"m@{DIGEST}", None, None),
        (f"m:v1@{DIGEST}", None, "v1"),
        (f"h.x:5000/m@{DIGEST}", "h.x:5000", None),
        (f"h.x:5000/m:v1@{DIGEST}", "h.x:5000", "v1"),
    ],
)
def test_parse_a_digest(text: str, registry: str | None, tag: str | None) -> None:
    reference = Reference.parse(text)
    assert reference == Reference(registry, "m", tag, DIGEST)
    assert str(reference) == text
    assert reference.target == str(DIGEST)
    assert reference.with_digest(DIGEST).tag is None


NO_REFERENCES = [
    "",
    " ",
    ":v1",
    "@",
    f"@{DIGEST}",
    "/model",
    "model/",
    "a//b",
    ".",
    "..",
    "../model",
    "./model",
    "/etc/passwd",
    "a/../b",
    "registry.example.com/../model",
    "registry.example.com/",
    "host:5000/",
    "host:/m",
    "host:port/m",
    "host.x:0/m",
    "host.x:65536/m",
    "host.x:99999/m",
    "host.x:123456/m",
    "-host.x/m",
    "host-.x/m",
    "host..x/m",
    "ho_st.x/m",
    "::1/m",
    "[::1/m",
    "[::1%eth0]/m",
    "user@host.x/m",
    "user:password@host.x/m",
    "https://host.x/m",
    "model:",
    "model:-v1",
    "model:.v1",
    "model:v 1",
    "model:v1:v2",
    f"m:{'t' * 129}",
    "r" * 256,
    "r" * 1025,
    "m@sha256:abc",
    f"m@{str(DIGEST).upper()}",
    f"m@{DIGEST}@{DIGEST}",
    f"m@{DIGEST} ",
    "m@md5:d41d8cd98f00b204e9800998ecf8427e",
    "m@sha256:../../../etc/passwd",
    "model\n",
    "model:v1\n",
    "mod\0el",
    "modèle",
    "host.x\n/m",
    "a..b",
    "a___b",
    "-a",
    "a-",
    "a._b",
    "a\\b",
    "a b",
    "~/model",
    "model?x=y",
    "model#x",
    "%2e%2e/model",
]


def test_parse_refuses() -> None:
    messages = {}
    for text in NO_REFERENCES:
        try:
            messages[text] = str(Reference.parse(text))
        except UsageError as error:
            messages[text] = error.message
    assert {
        text: found for text, found in messages.items() if "invalid reference" not in found
    } == {}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Model", "model"),
        ("h.x:5000/Team/Model:V1", "h.x:5000/team/model:V1"),
        ("LOCALHOST/model", "localhost/model"),
    ],
)
def test_capitals_are_refused_with_a_correction(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        Reference.parse(text)
    assert (caught.value.hint or "").endswith(f": {meant}")
    Reference.parse(meant)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("localhost:5000/m", True),
        ("127.8.9.10:5000/m", True),
        ("[::1]:5000/m", True),
        ("m", False),
        ("127.0.0.1.evil.com/m", False),
    ],
)
def test_is_loopback(text: str, loopback: bool) -> None:
    assert Reference.parse(text).is_loopback is loopback


LOWER, LETTERS = string.ascii_lowercase + string.digits, string.ascii_letters + string.digits
# st.from_regex takes a tenth of a second for an example of these
component = st.builds(
    lambda separator, parts: separator.join(parts),
    st.sampled_from([".", "_", "__", "-", "---"]),
    st.lists(st.text(LOWER, min_size=1, max_size=4), min_size=1, max_size=3),
)
label = st.sampled_from(LETTERS) | st.builds(
    "{}{}{}".format,
    st.sampled_from(LETTERS),
    st.text(LETTERS + "-", max_size=8),
    st.sampled_from(LETTERS),
)
hosts = st.one_of(
    st.lists(label, min_size=2, max_size=4).map(".".join),
    st.builds("{}:{}".format, label, st.integers(1, 65535)),
    st.ip_addresses(v=6).map("[{}]".format),
    st.builds("[{}]:{}".format, st.ip_addresses(v=6), st.integers(1, 65535)),
    st.just("localhost"),
)
digests = st.binary(max_size=4).map(Digest.of) | st.just(Digest.of(b"", "sha512"))
tags = st.builds(
    "{}{}".format, st.sampled_from(LETTERS + "_"), st.text(LETTERS + "._-", max_size=127)
)


@st.composite
def references(draw: st.DrawFn) -> Reference:
    registry = draw(st.none() | hosts)
    parts = draw(st.lists(component, min_size=1, max_size=3))
    if registry is None and len(parts) > 1:
        parts[0] = "team"  # a first part with a dot would be a host
    repository = "/".join(parts)[:200].rstrip("/._-")
    digest = draw(st.none() | digests)
    tag = draw(tags if digest is None else st.none() | tags)
    return Reference(registry, repository, tag, digest)


# The text of a reference of which a character is another one, or missing, or which has one more.
edited = st.builds(
    lambda text, at, count, new: text[:at] + new + text[at + count :],
    references().map(str),
    st.integers(0, 80),
    st.integers(0, 1),
    st.sampled_from(["", *"aZ0_.-/:@[] \n"]),
).filter(lambda text: len(text) <= 128)


@settings(max_examples=40)
@given(references())
def test_every_reference_survives_being_written_and_read(reference: Reference) -> None:
    assert Reference.parse(str(reference)) == reference


@given(st.text() | st.text(alphabet="aZ0.:/@_-[]%\\ \n"))
def test_any_text_is_a_reference_that_reads_back_or_a_usage_error(text: Any) -> None:
    try:
        reference = Reference.parse(text)
    except UsageError:
        return
    assert Reference.parse(str(reference)) == reference
    assert ".." not in reference.repository
    assert reference.repository == reference.repository.lower()


@pytest.mark.parametrize(("is_remote", "has_digest"), [(False, True), (True, True), (False, False)])
@settings(max_examples=60)
@given(text=st.text("aZ0_.-/:@[]", max_size=20) | edited)
def test_the_pattern_of_a_schema_is_the_grammar(
    text: str, is_remote: bool, has_digest: bool
) -> None:
    """Within the lengths, which are not part of it."""
    try:
        reference = Reference.parse(text)
    except UsageError:
        is_expected = False
    else:
        is_expected = not is_remote or reference.registry is not None
        is_expected &= has_digest or reference.digest is None
    pattern = build_pattern(is_remote=is_remote, has_digest=has_digest)
    assert bool(re.fullmatch(pattern, text)) == is_expected
