"""Pictures that texts name: files, URLs and artifacts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import (
    AImageError,
    ForbiddenError,
    NetworkError,
    NoPictureError,
    NotFoundError,
    TooLargeError,
    UnauthorizedError,
    UsageError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, mediatype
from clowder_aimage.pictures import input_source
from clowder_aimage.pictures.input_source import InputSource
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.web_file import InputHosts
from tests.scripted import Answer, ScriptedRegistry, serving

PICTURE = b"\x89PNG a picture"
OTHER = b"another"
CONFIG = b"{}"


def layer(data: bytes, media_type: str = "image/png", title: str | None = None) -> dict[str, Any]:
    annotations = {mediatype.TITLE: title} if title is not None else {}
    return Descriptor(media_type, Digest.of(data), len(data), annotations).to_json()


def manifest_of(*layers: dict[str, Any]) -> bytes:
    config = Descriptor.of(mediatype.OCI_EMPTY, CONFIG).to_json()
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST, "config": config}
    return json.dumps(document | {"layers": list(layers)}).encode()


@pytest.fixture
def server() -> Iterator[ScriptedRegistry]:
    with ScriptedRegistry(lambda _: Answer(404)).running() as found:
        yield found


def user(store: ImageLayout, **rest: Any) -> InputSource:
    return InputSource(store, ClientOptions, hosts=None, has_files=True, **rest)


def read_input(source: InputSource, text: str) -> bytes:
    return source.read(text)


def offer(server: ScriptedRegistry, *layers: dict[str, Any], **blobs: bytes) -> str:
    known = {str(Digest.of(data)): data for data in (PICTURE, OTHER, CONFIG)}
    server.script = serving(manifest_of(*layers), known | blobs)
    return f"oci://{server.host}/team/pictures:v1"


# -- files and data


def test_a_file_and_stdin_are_read(store: ImageLayout, tmp_path: Path) -> None:
    (tmp_path / "a:b.png").write_bytes(PICTURE)
    assert read_input(user(store), str(tmp_path / "a:b.png")) == PICTURE
    assert read_input(user(store, stdin=io.BytesIO(PICTURE)), "-") == PICTURE


@pytest.mark.parametrize(
    "text",
    [
        f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}",
        f"DATA:;base64,{base64.b64encode(PICTURE).decode().rstrip('=')}",
        f"data:image/png;base64;charset=utf-8,\n{base64.encodebytes(PICTURE).decode()}",
        "data:,%89PNG%20a%20picture",
        "data:image/png;charset=x,%89PNG a picture",
    ],
)
def test_a_data_url_is_decoded(store: ImageLayout, text: str) -> None:
    assert read_input(InputSource(store, ClientOptions), text) == PICTURE


@pytest.mark.parametrize(
    "first", [b"\x89PNG\r\n\x1a\n\0\0\0\r", b"\xff\xd8\xff\xe0", b"RIFF0000WEBP"]
)
@pytest.mark.parametrize("encode", [base64.encodebytes, base64.urlsafe_b64encode])
@pytest.mark.parametrize("prefix", ["", "data:image/png,"])
def test_base64_alone_is_known_by_its_first_bytes(
    store: ImageLayout, first: bytes, encode: Callable[[bytes], bytes], prefix: str
) -> None:
    data = first + bytes(range(200, 256)) * 2
    for source in (InputSource(store, ClientOptions), user(store)):
        assert read_input(source, prefix + encode(data).decode()) == data
    # A worker has no files whose names a short text could be
    short = prefix + encode(data[:30]).decode()
    assert prefix or read_input(InputSource(store, ClientOptions), short) == data[:30]


def test_base64_of_other_files_is_named(store: ImageLayout) -> None:
    with pytest.raises(UsageError, match="not of a picture") as caught:
        read_input(InputSource(store, ClientOptions), base64.b64encode(b"GIF89a" * 20).decode())
    assert caught.value.hint == "use a PNG, JPEG or WebP file"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("data:image/png;base64", UsageError),
        ("data:image/png;base64,aGk" + "=" * 9, UsageError),
        ("data:image/png;base64,aGk=aGk", UsageError),
        ("data:image/png;base64,a", UsageError),
        ("file:///etc/passwd", UsageError),
        ("ftp://example.com/a.png", UsageError),
        ("oci://not a name", UsageError),
        ("oci://", UsageError),
    ],
)
@pytest.mark.parametrize("is_worker", [False, True])
def test_an_invalid_text_is_refused(
    store: ImageLayout, text: str, error: type[AImageError], is_worker: bool
) -> None:
    with pytest.raises(error):
        read_input(InputSource(store, ClientOptions) if is_worker else user(store), text)


@pytest.mark.parametrize("text", ["-", "/etc/passwd", "a.png", "./data:,a", "~/a.png", ""])
def test_a_worker_reads_no_files(store: ImageLayout, text: str) -> None:
    with pytest.raises(UsageError, match="image is neither a picture in base64, a data"):
        read_input(InputSource(store, ClientOptions, stdin=io.BytesIO(PICTURE)), text)


def test_what_is_too_large_is_refused(
    store: ImageLayout,
    tmp_path: Path,
    server: ScriptedRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(input_source, "MAX_BYTES", 10)
    monkeypatch.setattr(input_source, "_MAX_DATA", 30)
    (tmp_path / "a.png").write_bytes(bytes(11))
    texts = (str(tmp_path / "a.png"), "-", f"data:,{'a' * 11}", f"data:,{'a' * 31}")
    for text in (*texts, offer(server, layer(PICTURE))):
        with pytest.raises(TooLargeError):
            read_input(user(store, stdin=io.BytesIO(bytes(11))), text)
    assert not server.asked("GET")[1:]


@pytest.mark.parametrize(("name", "error"), [("none.png", NotFoundError), ("~nobody-x/a", None)])
def test_a_file_that_cannot_be_read_is_an_error(
    store: ImageLayout, tmp_path: Path, name: str, error: type[AImageError] | None
) -> None:
    with pytest.raises(error or AImageError):
        read_input(user(store), name if error is None else str(tmp_path / name))


# -- artifacts


def test_a_picture_of_an_artifact_leaves_nothing_in_the_store(
    store: ImageLayout, server: ScriptedRegistry
) -> None:
    """One layer of several is fetched, and not at all if the store has it."""
    text = f"{offer(server, layer(OTHER, title='b.png'), layer(PICTURE, title='a.png'))}#a.png"
    assert read_input(user(store), text) == PICTURE
    assert [path.rpartition("/")[2] for path in server.asked("GET")][1:] == [
        str(Digest.of(PICTURE))
    ]
    assert not store.root.exists()
    store.push(Descriptor.of("image/png", PICTURE), build_bytes_body(PICTURE))
    mark = len(server.seen)
    assert read_input(user(store), text) == PICTURE
    assert all("/blobs/" not in seen.path for seen in server.seen[mark:])


def test_a_title_or_a_type_makes_a_picture(store: ImageLayout, server: ScriptedRegistry) -> None:
    kinds = ("image/webp", None), ("application/octet-stream", "made/A.JPG")
    for kind, title in kinds:
        assert read_input(user(store), offer(server, layer(PICTURE, kind, title))) == PICTURE


def test_a_title_chooses_one_of_several(store: ImageLayout, server: ScriptedRegistry) -> None:
    text = offer(server, layer(PICTURE, title="a.png"), layer(OTHER, title="b#c.png"))
    assert read_input(user(store), f"{text}#b#c.png") == OTHER
    with pytest.raises(UsageError, match=r"has several pictures: 'a.png', 'b#c.png'"):
        read_input(user(store), text)
    with pytest.raises(NotFoundError, match="has no picture"):
        read_input(user(store), f"{text}#x")


def test_a_digest_chooses_the_manifest(store: ImageLayout, server: ScriptedRegistry) -> None:
    text = offer(server, layer(PICTURE))
    digest = Digest.of(manifest_of(layer(PICTURE)))
    assert read_input(user(store), f"{text}@{digest}") == PICTURE
    with pytest.raises(VerificationError):
        read_input(user(store), f"{text}@{Digest.of(b'other')}")


def test_an_artifact_without_a_picture_is_refused(
    store: ImageLayout, server: ScriptedRegistry
) -> None:
    with pytest.raises(NoPictureError, match="has no picture") as raised:
        read_input(user(store), offer(server, layer(PICTURE, "text/plain", "a.txt")))
    assert raised.value.exit_code == 5


def test_wrong_bytes_are_refused(store: ImageLayout, server: ScriptedRegistry) -> None:
    text = offer(server, layer(PICTURE), **{str(Digest.of(PICTURE)): bytes(len(PICTURE))})
    with pytest.raises(VerificationError):
        read_input(user(store), text)


def test_errors_of_a_registry_are_those_of_a_pull(
    store: ImageLayout, server: ScriptedRegistry
) -> None:
    text = f"oci://{server.host}/team/pictures:v1"
    for status, error in ((404, NotFoundError), (403, UnauthorizedError)):
        server.script = lambda _, status=status: Answer(status)  # type: ignore[misc]
        with pytest.raises(error):
            read_input(user(store), text)
    with pytest.raises(NotFoundError, match="not found in the store"):
        read_input(user(store), "oci://pictures:v1")


def test_a_worker_pulls_from_the_registries_that_are_named(
    store: ImageLayout, server: ScriptedRegistry
) -> None:
    text = offer(server, layer(PICTURE))
    port = server.host.rpartition(":")[2]
    for entries in ((), ("127.0.0.1",), (f"*:{port}",)):
        with pytest.raises(ForbiddenError, match=r"not allowed from the registry|internal address"):
            read_input(InputSource(store, ClientOptions, InputHosts.parse(entries)), text)
    assert not server.seen
    named = InputHosts.parse([server.host])
    configured = InputSource(store, ClientOptions, registries=frozenset([server.host]))
    for source in (InputSource(store, ClientOptions, named), configured):
        assert read_input(source, text) == PICTURE
    with pytest.raises(ForbiddenError, match="not allowed"):  # registries, not URLs
        read_input(configured, f"http://{server.host}/a.png")


def test_behind_a_proxy_a_pattern_allows_no_registry(
    store: ImageLayout, server: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://{server.host}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    text = offer(server, layer(PICTURE)).replace(server.host, "pictures.example.com")
    for entry, is_allowed in (
        ("http://*.example.com", False),
        ("http://pictures.example.com", True),
    ):
        source = InputSource(
            store, lambda: ClientOptions(plain_http=True), InputHosts.parse([entry])
        )
        if is_allowed:
            assert read_input(source, text) == PICTURE
            continue
        with pytest.raises(ForbiddenError, match="through a proxy"):
            read_input(source, text)
        assert not server.seen


def test_a_registry_that_is_too_slow_does_not_hold_a_worker(
    store: ImageLayout, server: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_source, "_PATIENCE", -1.0)
    text = offer(server, layer(PICTURE))
    with pytest.raises(NetworkError, match="did not arrive in time"):
        read_input(InputSource(store, ClientOptions, InputHosts.parse([server.host])), text)
    assert read_input(user(store), text) == PICTURE


def test_a_registry_may_be_an_ipv6_address(store: ImageLayout) -> None:
    try:
        found = ScriptedRegistry(lambda _: Answer(404), "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with found.running() as server:
        text = offer(server, layer(PICTURE, title="a.png"))
        assert text.startswith("oci://[::1]:")
        for entry, is_allowed in ((server.host, True), ("[::1]", False), ("[::2]:5000", False)):
            source = InputSource(store, ClientOptions, InputHosts.parse([entry]))
            if is_allowed:
                assert read_input(source, f"{text}#a.png") == PICTURE
            else:
                with pytest.raises(ForbiddenError, match=r"from the registry \[::1\]:"):
                    read_input(source, text)


@pytest.mark.parametrize(
    ("name", "address", "entry", "is_allowed"),
    [
        ("pictures.example.com", "127.0.0.1", "*.example.com", False),
        ("pictures.example.com", "127.0.0.1", "pictures.example.com", True),
        ("[fe80::1]", "127.0.0.1", "*", False),
        ("169.254.169.254", "127.0.0.1", "*", False),
        ("0x7f000001.", "127.0.0.1", "*", False),
    ],
)
def test_a_pattern_means_addresses_of_the_internet(
    store: ImageLayout,
    server: ScriptedRegistry,
    name: str,
    address: str,
    entry: str,
    is_allowed: bool,
) -> None:
    """The name resolves to a private address, which is compared before anything is sent."""
    port = server.host.rpartition(":")[2]
    text = offer(server, layer(PICTURE)).replace("127.0.0.1", name)
    hosts = InputHosts.parse([f"http://{entry}:{port}"])
    addresses = {(name, int(port)): address}
    source = InputSource(store, lambda: ClientOptions(plain_http=True, addresses=addresses), hosts)
    if is_allowed:
        assert read_input(source, text) == PICTURE
        return
    with pytest.raises((ForbiddenError, UsageError)):
        read_input(source, text)
    assert not server.seen


def test_a_worker_fetches_urls_of_allowed_hosts(
    store: ImageLayout, server: ScriptedRegistry
) -> None:
    server.script = lambda _: Answer(200, {}, PICTURE)
    url = f"http://{server.host}/a.png"
    with pytest.raises(ForbiddenError):
        read_input(InputSource(store, ClientOptions), url)
    assert (
        read_input(InputSource(store, ClientOptions, InputHosts.parse([server.host])), url)
        == PICTURE
    )
    assert read_input(user(store), url) == PICTURE
