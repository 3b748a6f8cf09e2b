"""Fetch by digest from mirrors first, verify the bytes, and share no credentials."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import urllib3

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import NotFoundError, UsageError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.host_settings import HostSettings, read_settings
from clowder_aimage.registry.response import RegistryResponse
from clowder_aimage.registry.session import Mirrors, Session
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving, skip_waiting

MANIFEST, BLOBS = artifact(b"{}", b"weights", b"more")
OTHER, OTHER_BLOBS = artifact(b"{}", b"other")
DIGEST = Digest.of(MANIFEST)
BASIC = base64.b64encode(b"operator:secret").decode()


def guarded(
    inner: Callable[[Seen], Answer], user: str = "operator:secret"
) -> Callable[[Any], Answer]:
    wanted = f"Basic {base64.b64encode(user.encode()).decode()}"

    def script(seen: Any) -> Answer:
        if seen.headers.get("Authorization") == wanted:
            return inner(seen)
        return Answer(401, {"WWW-Authenticate": 'Basic realm="x"'})

    return script


def connect(
    tmp_path: Path,
    registry: ScriptedRegistry,
    *mirrors: str,
    trust_tags: bool = False,
    auths: dict[str, dict[str, str]] | None = None,
    **options: Any,
) -> ClientOptions:
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths or {}}))
    settings = HostSettings(mirrors=mirrors, trust_tags=trust_tags)
    return ClientOptions(docker_config=tmp_path, registries={registry.host: settings}, **options)


def pull(
    registry: ScriptedRegistry, connection: ClientOptions, target: str = f"@{DIGEST}"
) -> tuple[Descriptor, ImageLayout]:
    reference = Reference.parse(f"{registry.host}/team/x{target}")
    assert connection.docker_config is not None
    store = ImageLayout(connection.docker_config / "store")
    with Repository(reference, connection) as repository:
        return copy(repository, reference, store), store


@pytest.fixture
def upstream() -> Iterator[ScriptedRegistry]:
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        yield registry


@pytest.fixture
def mirror() -> Iterator[ScriptedRegistry]:
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        yield registry


def test_a_digest_is_fetched_from_the_mirror_only(
    tmp_path: Path, upstream: ScriptedRegistry, mirror: ScriptedRegistry
) -> None:
    content, _ = pull(upstream, connect(tmp_path, upstream, mirror.host))
    assert content.digest == DIGEST
    assert upstream.seen == []
    assert len(mirror.seen) == 4


def test_a_tag_is_resolved_by_the_registry(
    tmp_path: Path, upstream: ScriptedRegistry, mirror: ScriptedRegistry
) -> None:
    pull(upstream, connect(tmp_path, upstream, mirror.host), ":v1")
    assert upstream.asked("GET") == ["/v2/team/x/manifests/v1"]
    assert len(mirror.asked("GET")) == 3


def test_a_trusted_mirror_resolves_a_tag(
    tmp_path: Path, upstream: ScriptedRegistry, mirror: ScriptedRegistry
) -> None:
    pull(upstream, connect(tmp_path, upstream, mirror.host, trust_tags=True), ":v1")
    assert upstream.seen == []


def test_a_mirror_path_prefixes_the_repository(
    tmp_path: Path, upstream: ScriptedRegistry, mirror: ScriptedRegistry
) -> None:
    pull(upstream, connect(tmp_path, upstream, f"{mirror.host}/proxy/hub"))
    assert {path.partition("/x/")[0] for path in mirror.asked("GET")} == {"/v2/proxy/hub/team"}


@pytest.mark.parametrize("status", [401, 429])
def test_a_failing_mirror_is_not_used_again(
    tmp_path: Path, upstream: ScriptedRegistry, status: int
) -> None:
    slept: list[float] = []
    with ScriptedRegistry(lambda _: Answer(status, {"Retry-After": "50"})).running() as broken:
        connection = connect(tmp_path, upstream, broken.host, sleep=slept.append)
        content, _ = pull(upstream, connection)
        assert content.digest == DIGEST
        assert len(broken.seen) == 1
    assert len(upstream.seen) == 4
    assert slept == []  # the mirror's Retry-After does not delay the pull


def test_an_unreachable_mirror_is_skipped(
    tmp_path: Path, upstream: ScriptedRegistry, mirror: ScriptedRegistry
) -> None:
    with ScriptedRegistry(lambda _: Answer()).running() as gone:
        pass
    pull(upstream, connect(tmp_path, upstream, gone.host, mirror.host))
    assert upstream.seen == []  # served by the next mirror


def test_a_mirror_without_one_blob_serves_the_others(
    tmp_path: Path, upstream: ScriptedRegistry
) -> None:
    digests = list(BLOBS)
    partial = {digest: BLOBS[digest] for digest in digests[1:]}
    with ScriptedRegistry(serving(MANIFEST, partial)).running() as mirror:
        pull(upstream, connect(tmp_path, upstream, mirror.host))
        assert len(mirror.seen) == 4
    assert upstream.asked("GET") == [f"/v2/team/x/blobs/{digests[0]}"]


def test_a_wrong_manifest_disables_the_mirror(tmp_path: Path, upstream: ScriptedRegistry) -> None:
    with ScriptedRegistry(serving(OTHER, OTHER_BLOBS)).running() as liar:
        content, _ = pull(upstream, connect(tmp_path, upstream, liar.host))
        assert len(liar.seen) == 1  # detected at its first wrong response
    assert content.digest == DIGEST


def test_an_endless_manifest_is_not_read_in_full(
    tmp_path: Path, upstream: ScriptedRegistry
) -> None:
    with ScriptedRegistry(lambda _: Answer(200, {}, b" " * 5_000_000)).running() as liar:
        content, _ = pull(upstream, connect(tmp_path, upstream, liar.host))
    assert content.digest == DIGEST


def test_a_wrong_blob_is_fetched_from_the_registry(
    tmp_path: Path, upstream: ScriptedRegistry
) -> None:
    """The digest is verified at the end, and the blob then fetched from the registry."""
    wrong = {digest: b"x" * len(blob) for digest, blob in BLOBS.items()}
    with ScriptedRegistry(serving(MANIFEST, wrong)).running() as liar:
        content, store = pull(upstream, connect(tmp_path, upstream, liar.host))
    assert content.digest == DIGEST
    for blob in BLOBS.values():
        assert store.exists(Descriptor.of("application/octet-stream", blob))
    assert sorted(upstream.asked("GET")) == sorted(f"/v2/team/x/blobs/{d}" for d in BLOBS)


def test_a_blob_that_is_wrong_at_every_host_fails(tmp_path: Path) -> None:
    wrong = serving(MANIFEST, {digest: b"x" * len(blob) for digest, blob in BLOBS.items()})
    with (
        ScriptedRegistry(wrong).running() as liar,
        ScriptedRegistry(wrong).running() as registry,
        pytest.raises(VerificationError),
    ):
        pull(registry, connect(tmp_path, registry, liar.host))


def test_a_mirror_that_keeps_disconnecting_is_replaced(
    tmp_path: Path, upstream: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_waiting(monkeypatch)
    whole = serving(MANIFEST, BLOBS)

    def cut(seen: Seen) -> Answer:
        answer = whole(seen)
        return replace(answer, cut=0) if "/blobs/" in seen.path else answer

    with ScriptedRegistry(cut).running() as mirror:
        content, _ = pull(upstream, connect(tmp_path, upstream, mirror.host))
    assert content.digest == DIGEST


def test_wrong_bytes_of_a_disconnected_mirror_are_attributed_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry completes the blob that a mirror began; the mirror is still recorded."""
    skip_waiting(monkeypatch)
    large = bytes(range(256)) * 400
    manifest, blobs = artifact(b"{}", large)
    digest = str(Digest.of(large))
    right, wrong = serving(manifest, blobs), serving(manifest, {digest: b"?" * len(large)})

    def lying(seen: Seen) -> Answer:
        return replace(wrong(seen), cut=1000) if seen.path.endswith(digest) else right(seen)

    with (
        ScriptedRegistry(right).running() as upstream,
        ScriptedRegistry(lying).running() as mirror,
    ):
        connection = connect(tmp_path, upstream, mirror.host)
        _, store = pull(upstream, connection, f"@{Digest.of(manifest)}")
        assert store.find_path(Descriptor.of("", large)).read_bytes() == large
        sent = [seen.headers.get("Range") for seen in upstream.seen if seen.path.endswith(digest)]
    assert sent == [f"bytes=3000-{len(large) - 1}", None]  # the rest, and then the whole blob


class Answering(Session):
    """A mirror's session that has every blob."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def build_url(self, path: str) -> str:
        return path

    def request(self, method: str, url: str, **_: Any) -> RegistryResponse:
        self.asked.append(url)
        return RegistryResponse(200, url, {}, urllib3.HTTPResponse(b""))


@pytest.fixture
def answering() -> tuple[Answering, Mirrors]:
    session = Answering()
    return session, Mirrors([session])


BLOB = f"blobs/{DIGEST}"


def test_an_avoided_mirror_gets_no_requests(answering: tuple[Answering, Mirrors]) -> None:
    session, mirrors = answering
    assert mirrors.request("GET", BLOB, None, 1) is not None
    mirrors.avoid(DIGEST)
    assert mirrors.request("GET", BLOB, None, 1) is None
    assert mirrors.request("GET", f"blobs/{Digest.of(b'other')}", None, 1) is None
    assert session.asked == [BLOB]


def test_bytes_of_an_avoided_mirror_are_attributed_to_it(
    answering: tuple[Answering, Mirrors],
) -> None:
    _, mirrors = answering
    mirrors.request("GET", BLOB, None, 1)
    mirrors.avoid(DIGEST)
    assert mirrors.invalidate(DIGEST)
    assert not mirrors.invalidate(DIGEST)  # reported once: all later bytes come from the registry


def test_bytes_of_the_registry_are_not_attributed_to_a_mirror(
    answering: tuple[Answering, Mirrors],
) -> None:
    session, mirrors = answering
    mirrors.avoid(DIGEST)
    assert not mirrors.invalidate(DIGEST)
    assert mirrors.request("GET", BLOB, None, 1) is not None
    assert session.asked == [BLOB]


def test_a_blob_missing_everywhere_names_the_registry(tmp_path: Path) -> None:
    def absent(_: Seen) -> Answer:
        return Answer(404)

    with (
        ScriptedRegistry(absent).running() as upstream,
        ScriptedRegistry(absent).running() as mirror,
        pytest.raises(NotFoundError, match=upstream.host),
    ):
        pull(upstream, connect(tmp_path, upstream, mirror.host))


def test_a_mirror_receives_no_registry_credentials(tmp_path: Path) -> None:
    """Check every header that the mirror receives, although it challenges for credentials."""
    inner = serving(MANIFEST, BLOBS)
    with (
        ScriptedRegistry(guarded(inner)).running() as upstream,
        ScriptedRegistry(guarded(inner)).running() as mirror,
    ):
        auths = {upstream.host: {"auth": BASIC}, f"{upstream.host}/team": {"auth": BASIC}}
        pull(upstream, connect(tmp_path, upstream, mirror.host, auths=auths))
        assert mirror.seen
        for seen in mirror.seen:
            assert "Authorization" not in seen.headers
            assert not any("secret" in value or BASIC in value for value in seen.headers.values())


def test_a_mirror_receives_its_own_credentials(tmp_path: Path) -> None:
    inner = serving(MANIFEST, BLOBS)
    with (
        ScriptedRegistry(guarded(inner)).running() as upstream,
        ScriptedRegistry(guarded(inner, "mirror:pass")).running() as mirror,
    ):
        own = base64.b64encode(b"mirror:pass").decode()
        auths = {upstream.host: {"auth": BASIC}, mirror.host: {"auth": own}}
        pull(upstream, connect(tmp_path, upstream, mirror.host, auths=auths))
        assert upstream.seen == []
        sent = {seen.headers.get("Authorization") for seen in mirror.seen}
        assert sent == {None, f"Basic {own}"}


def test_a_push_does_not_use_mirrors(tmp_path: Path, mirror: ScriptedRegistry) -> None:
    """A blob on a mirror may be missing in the registry, and its tags may differ."""

    def script(seen: Seen) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload/1"})
        return Answer(201) if seen.method == "PUT" else Answer(404)

    with ScriptedRegistry(script).running() as upstream:
        connection = connect(tmp_path, upstream, mirror.host, trust_tags=True)
        reference = Reference.parse(f"{upstream.host}/team/x:v1")
        blob = Descriptor.of("text/plain", b"weights")
        with Repository(reference, connection) as repository:
            assert not repository.exists(blob)
            repository.push(blob, build_bytes_body(b"weights"))
            with pytest.raises(NotFoundError):
                repository.resolve(reference)
        assert upstream.asked("PUT")
    assert mirror.seen == []


def test_command_line_options_do_not_apply_to_mirrors() -> None:
    entries = {
        "r.example.com": HostSettings(plain_http=True),
        "m.example.com": HostSettings(insecure=True),
    }
    told = ClientOptions(plain_http=True, registries=entries)
    assert told.to("r.example.com").plain_http
    assert not told.to_mirror("n.example.com").plain_http
    assert told.to_mirror("m.example.com").insecure
    assert ClientOptions(registries=entries).to("r.example.com").plain_http
    assert not ClientOptions(insecure=True, registries=entries).to("r.example.com").plain_http


def test_the_config_file_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_settings(path)[0] == {}
    entry = {
        "mirrors": ["m.example.com:5000", "harbor.example.com/proxy"],
        "trustTags": True,
        "plainHttp": True,
        "insecure": True,
        "caFile": "ca.pem",
    }
    path.write_text(json.dumps({"registries": {"r.example.com": entry, "[::1]:5000": {}}}))
    assert read_settings(path)[0] == {
        "r.example.com": HostSettings(
            ("m.example.com:5000", "harbor.example.com/proxy"),
            True,
            True,
            True,
            tmp_path / "ca.pem",
        ),
        "[::1]:5000": HostSettings(),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"registries": []}',
        '{"registries": {"https://x": {}}}',
        '{"registries": {"x": {"mirrors": "y"}}}',
        '{"registries": {"x": {"mirrors": ["https://y"]}}}',
        '{"registries": {"x": {"plainHttp": "yes"}}}',
        '{"registries": {"x": {"caFile": ""}}}',
    ],
)
def test_an_invalid_config_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="cannot use the configuration"):
        read_settings(path)


@pytest.mark.integration
def test_the_command_line_reads_the_config_file(
    aimage: Callable[..., Aimage], tiny: Path, registry: RealRegistry, upstream: ScriptedRegistry
) -> None:
    """From the environment variable or the default place; a named file must exist."""
    here = aimage()
    host = registry.host
    here("create", f"{host}/mirrored/x:v1", tiny, "--whole-files")
    digest = here("push", f"{host}/mirrored/x:v1").line
    config = here.home / "aimage.json"
    entry = {"mirrors": [host], "trustTags": True}
    config.write_text(json.dumps({"registries": {upstream.host: entry}}))
    there = aimage("there")
    there.environment["AIMAGE_CONFIG"] = str(config)
    assert there("pull", f"{upstream.host}/mirrored/x:v1").line == digest
    assert upstream.asked("GET") == []
    there.environment["AIMAGE_CONFIG"] = str(config) + ".absent"
    assert "AIMAGE_CONFIG" in there("pull", f"{upstream.host}/mirrored/x:v1", code=2).err


def test_connections_are_limited_per_registry() -> None:
    entries = {
        "slow.example.com": HostSettings(connections=2),
        "r.example.com": HostSettings(connections=6),
    }
    connection = ClientOptions(registries=entries)
    assert connection.compute_connections("slow.example.com") == 2
    assert (
        connection.compute_connections("other.example.com")
        == connection.compute_connections(None)
        == 8
    )
    # a copy uses the lower limit
    assert connection.compute_connections("r.example.com", "slow.example.com") == 2
    override = ClientOptions(registries=entries, connections_override=5)
    assert override.compute_connections("slow.example.com") == 5


def test_the_configured_chunk_size_is_respected(tmp_path: Path) -> None:
    """With ``chunkSize`` set, no request is larger."""
    data = bytes(range(256)) * 10_000  # 2.4 MiB
    taken = []

    def script(seen: Seen) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload/1"})
        if seen.method == "PATCH":
            taken.append(seen.body)
            span = f"0-{sum(map(len, taken)) - 1}"
            return Answer(202, {"Location": "/upload/1", "Range": span})
        return Answer(201 if seen.method == "PUT" else 404)

    with ScriptedRegistry(script).running() as registry:
        settings = {registry.host: HostSettings(chunk_size=1_048_576)}
        reference = Reference.parse(f"{registry.host}/x")
        with Repository(
            reference, ClientOptions(docker_config=tmp_path, registries=settings)
        ) as repository:
            repository.push(Descriptor.of("application/x", data), build_bytes_body(data))
        bodies = [seen.body for seen in registry.seen if seen.method in ("PATCH", "PUT")]
    assert b"".join(bodies) == data
    assert [len(body) for body in taken] == [1_048_576] * 2
