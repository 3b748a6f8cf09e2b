"""Headers of responses in every form that the RFCs allow, and bodies that a proxy compressed.

Sources: RFC 8288 (Link), RFC 9110, 8.3 (Content-Type), 8.4 (Content-Encoding), 14.4
(Content-Range); OCI image-spec, "Descriptors" (urls).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.content import copy
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError, VerificationError
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.auth import _Challenge
from clowder_aimage.registry.content_coding import BodyDecoder
from clowder_aimage.registry.link_header import find_link
from clowder_aimage.registry.listing import list_tags
from clowder_aimage.registry.session import Session
from tests.memory_store import MemoryStore
from tests.scripted import Answer, Script, ScriptedRegistry, Seen, artifact, serving, skip_waiting

# header: the target of the link "next"
LINKS = {
    '</v2/x?n=1&last=a>; rel="next"': "/v2/x?n=1&last=a",
    "</a>; rel=next": "/a",
    "</a>;rel=next": "/a",
    '</a> ; rel = "next"': "/a",
    '</a>; REL="NEXT"': "/a",
    "</a>; rel='next'": "/a",
    "</a>;rel='prev next', </b>": "/a",
    "</a>; rel='next": "",
    "</a>; title='; rel=prev'; rel='next'": "/a",
    '</a>; title="x, y; rel=prev"; rel="next"': "/a",
    '</a>; title="a \\"quoted\\" word"; rel=next': "/a",
    '</a>; rel="prev next last"': "/a",
    '</a>; rel="next"; rel="prev"': "/a",
    '</b>; rel="prev", </a>; rel="next"': "/a",
    "</b>;rel=prev,</a>;rel=next": "/a",
    '</a,b;c>; rel="next"': "/a,b;c",
    '<https://r.example.com/v2/x?last=b>; rel="next"': "https://r.example.com/v2/x?last=b",
    '<?last=b>; rel="next"': "?last=b",
    '< /a >; rel="next"': "/a",
    "</a>; rel=\"next\"; title*=UTF-8'de'n%c3%a4chstes": "/a",
    '/v2/x?last=a; rel="next"': "/v2/x?last=a",
    ', , </a>; rel="next" ,': "/a",
    '</a>; rel="previous"': "",
    '</a>; rel="prev"; title="next"': "",
    '</a>; rev="next"': "",
    "</a>": "",
    "": "",
    '</a; rel="next"': "",
}


@pytest.mark.parametrize("header", LINKS)
def test_links_are_read_in_all_forms(header: str) -> None:
    assert find_link(header, "next") == LINKS[header]


@given(st.text('<>;,="\\ ab/rel next', max_size=80))
def test_any_header_of_links_is_read(header: str) -> None:
    assert isinstance(find_link(header, "next"), str)


def test_a_long_header_of_links_is_read_in_linear_time() -> None:
    assert find_link('<a>; b="\\' * 10_000, "next") == ""


def test_pages_follow_the_links(tmp_path: Path) -> None:
    pages = {
        "tags/list": (b'{"tags": ["a"]}', '</v2/x/tags/list?n=2>; Title="a, b"; Rel=NEXT'),
        "tags/list?n=2": (b'{"tags": ["b"]}', "<list?n=3>; rel=next"),
        "tags/list?n=3": (b'{"tags": ["c"]}', '</v2/x/tags/list>; rel="first"'),
    }

    def script(seen: Seen) -> Answer:
        body, link = pages[seen.path.removeprefix("/v2/x/")]
        return Answer(200, {"Content-Type": "application/json", "Link": link}, body)

    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x")
        with Session(reference, ClientOptions(docker_config=tmp_path)) as session:
            assert list_tags(session, "x") == ["a", "b", "c"]


# -- content

BLOB = b"layer" * 500
MANIFEST, BLOBS = artifact(b"{}", BLOB)


def pull(script: Script, tmp_path: Path) -> MemoryStore:
    store = MemoryStore()
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        options = ClientOptions(docker_config=tmp_path, connections_override=1)
        with Repository(reference, options) as repository:
            copy(repository, reference, store)
    return store


def check(store: MemoryStore) -> None:
    content = Descriptor.of("application/vnd.example.blob", BLOB)
    assert store.open(content).read() == BLOB


TYPES = (
    mediatype.OCI_MANIFEST,
    f"{mediatype.OCI_MANIFEST}; charset=utf-8",
    f"{mediatype.OCI_MANIFEST};charset=UTF-8",
    mediatype.OCI_MANIFEST.title(),
    f" {mediatype.OCI_MANIFEST.upper()} ; q=1",
    "application/json",
    "application/octet-stream",
    "",
)


@pytest.mark.parametrize("media_type", TYPES)
def test_types_have_parameters_and_no_case(media_type: str, tmp_path: Path) -> None:
    serve = serving(MANIFEST, BLOBS)

    def script(seen: Seen) -> Answer:
        answer = serve(seen)
        is_manifest = "/manifests/" in seen.path
        headers = {"Content-Type": media_type} if is_manifest else answer.headers
        return Answer(answer.status, headers, answer.body)

    check(pull(script, tmp_path))


def compress_raw(data: bytes) -> bytes:
    return zlib.compress(data)


def compress_members(data: bytes) -> bytes:
    return gzip.compress(data[:100]) + gzip.compress(data[100:])


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZIP": gzip.compress,
    "x-gzip": gzip.compress,
    "identity, gzip": gzip.compress,
    "deflate": compress_raw,
    " gzip ": compress_members,
}


def coding(name: str, kind: str, compress: Callable[[bytes], bytes]) -> Script:
    """Return a registry behind a proxy that compresses the responses of a kind."""
    serve = serving(MANIFEST, BLOBS)

    def script(seen: Seen) -> Answer:
        answer = serve(seen)
        if kind not in seen.path or answer.status not in (200, 206):
            return answer
        headers = answer.headers | {"Content-Encoding": name}
        headers.pop("Content-Length", None)
        return Answer(answer.status, headers, compress(answer.body))

    return script


@pytest.mark.parametrize("kind", ["/blobs/", "/manifests/"])
@pytest.mark.parametrize("name", CODINGS)
def test_a_compressed_body_is_decompressed(name: str, kind: str, tmp_path: Path) -> None:
    check(pull(coding(name, kind, CODINGS[name]), tmp_path))


@pytest.mark.parametrize("name", ["br", "zstd", "gzip, br"])
def test_an_unknown_compression_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=f"sent an unexpected {name} body"):
        pull(coding(name, "/blobs/", lambda data: data + b"?"), tmp_path)


def test_a_label_on_the_bytes_of_a_blob_is_ignored(tmp_path: Path) -> None:
    """Storage services label layers that are compressed files."""
    check(pull(coding("gzip", "/blobs/", bytes), tmp_path))


@pytest.mark.parametrize("compress", [lambda data: gzip.compress(data)[:20], lambda _: b"<html>"])
def test_a_damaged_compression_is_an_error(
    compress: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_waiting(monkeypatch)
    with pytest.raises(AImageError, match=r"compressed body is (damaged|truncated)"):
        pull(coding("gzip", "/blobs/", compress), tmp_path)


def test_a_range_of_a_compressed_body_is_not_used(tmp_path: Path) -> None:
    """It is a range of the compressed bytes (RFC 9110, 14.2): the whole is requested."""
    packed = gzip.compress(BLOB)

    def script(seen: Seen) -> Answer:
        headers = {"Content-Encoding": "gzip"}
        if seen.headers.get("Range") != "bytes=100-2499":
            return Answer(200, headers, packed)
        headers["Content-Range"] = f"bytes 100-{len(packed) - 1}/{len(packed)}"
        return Answer(206, headers, packed[100:])

    content = Descriptor.of("application/vnd.example.blob", BLOB)
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        options = ClientOptions(docker_config=tmp_path)
        with (
            Repository(reference, options) as repository,
            repository.open(content, 100) as reader,
        ):
            assert reader.read() == BLOB[100:]
            assert not repository.supports_ranges(content)


@pytest.mark.parametrize("value", ["bytes 5-2499/2500", "Bytes 5-2499/2500", "bytes  5-2499/*"])
def test_the_unit_of_a_range_has_no_case(value: str, tmp_path: Path) -> None:
    content = Descriptor.of("application/vnd.example.blob", BLOB)

    def script(_: Seen) -> Answer:
        return Answer(206, {"Content-Range": value}, BLOB[5:])

    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        with (
            Repository(reference, ClientOptions(docker_config=tmp_path)) as repository,
            repository.open(content, 5) as reader,
        ):
            assert reader.read() == BLOB[5:]
        assert len(registry.seen) == 1


def test_the_length_of_a_compressed_response_is_not_a_size(tmp_path: Path) -> None:
    def script(seen: Seen) -> Answer:
        headers = {"Content-Encoding": "gzip", "Content-Length": "44"}
        return Answer(200, headers, gzip.compress(BLOB))

    content = Descriptor.of("application/vnd.example.blob", BLOB)
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            assert repository.exists(content)


@given(st.binary(max_size=3000), st.integers(1, 700))
def test_a_decoder_returns_no_more_than_is_asked_for(data: bytes, size: int) -> None:
    packed = gzip.compress(data)
    blocks = iter([packed[at : at + 7] for at in range(0, len(packed), 7)])
    decoder, decoded = BodyDecoder(lambda _: next(blocks, b"")), b""
    while piece := decoder.read(size):
        assert len(piece) <= size
        decoded += piece
    assert decoded == data


@pytest.mark.parametrize("path", ["/manifests/", "/blobs/"])
def test_a_host_that_a_redirect_leads_to_is_named(path: str, tmp_path: Path) -> None:
    serve = serving(MANIFEST, BLOBS)

    def script(seen: Seen) -> Answer:
        location = {"Location": "http://127.0.0.1:1/storage?signature=secret"}
        return Answer(307, location) if path in seen.path else serve(seen)

    with pytest.raises(NetworkError) as caught:
        pull(script, tmp_path)
    assert str(caught.value).startswith("cannot reach 127.0.0.1:1 (a redirect of 127.0.0.1:")
    assert "secret" not in str(caught.value)


CHALLENGES = (
    'Bearer realm="https://a.test/t",service="s"',
    "Bearer realm=https://a.test/t,service=s",
    'BEARER Realm="https://a.test/t", SERVICE = s',
    'Basic realm="x", Bearer realm="https://a.test/t",service="s"',
    'Basic realm="say \\"Bearer realm=1\\"", Bearer service=s, realm="https://a.test/t"',
    'Negotiate, Bearer error="invalid_token", realm="https://a.test/\\t", service="s"',
)


@pytest.mark.parametrize("header", CHALLENGES)
def test_challenges_are_read_in_all_forms(header: str) -> None:
    challenge = _Challenge.parse(header)
    assert (challenge.scheme, challenge.realm, challenge.service) == (
        "bearer",
        "https://a.test/t",
        "s",
    )


FOREIGN: tuple[tuple[object, str], ...] = (
    (["https://user:secret@mirror.example.com/x?sig=1"], "at mirror.example.com"),
    ([], ""),
    ("https://cdn.example.com", "at cdn.example.com"),
    (["http://[broken"], "elsewhere"),
    ([7], "elsewhere"),
)


@pytest.mark.parametrize(("urls", "place"), FOREIGN)
def test_a_missing_foreign_layer_is_explained(urls: object, place: str, tmp_path: Path) -> None:
    manifest = json.loads(MANIFEST)
    manifest["layers"][0]["urls"] = urls
    raw = json.dumps(manifest).encode()
    blobs = {name: data for name, data in BLOBS.items() if name != str(Digest.of(BLOB))}
    with pytest.raises(NotFoundError) as caught:
        pull(serving(raw, blobs), tmp_path)
    assert ("is stored" in caught.value.message) == bool(place)
    assert place in caught.value.message
    assert "secret" not in caught.value.message
