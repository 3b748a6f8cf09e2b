"""Vulnerabilities of other registry clients, and the tests that cover them here.

Digest as a path (CVE-2024-37032, CVE-2026-7020, CVE-2024-3727)
    test_pull_answers: test_a_bad_digest_is_refused_before_any_request;
    tests/oci/test_oci_digest: test_a_bad_digest_in_any_field_refuses_the_document;
    here: test_a_bad_digest_in_an_index_or_among_referrers
Realm on another host, or inside this network (CVE-2025-51471, CVE-2026-48978, CVE-2026-33990)
    test_credentials: test_a_realm_on_another_host_receives_no_credentials,
    test_internal_addresses_are_recognised, test_other_spellings_of_internal_addresses_are_refused,
    test_a_huge_token_response_is_not_read_in_full;
    test_tokens: test_a_realm_on_another_host_receives_no_identity_token,
    test_a_redirect_of_the_token_service_is_not_followed; here:
    test_a_realm_without_encryption_is_refused, test_an_internal_realm_of_a_public_registry_fails
``urls`` of foreign layers (CVE-2020-15157)
    test_pull_answers: test_urls_of_foreign_layers_are_never_followed;
    here: test_urls_of_a_missing_layer_are_not_followed
Authorization across origins (GHSA-vh4v-2xq2-g5cg, CVE-2026-50151)
    test_tokens: test_another_origin_receives_no_credentials (other port, other scheme);
    test_credentials: test_a_redirect_to_another_origin_drops_credentials,
    test_an_upload_location_on_another_host_receives_no_credentials,
    test_upload_location: test_where_a_registry_may_send_an_upload;
    e2e/test_upload_faults: test_a_location_on_another_host_gets_no_password (all methods);
    e2e/test_download_faults: test_blobs_are_fetched_from_a_cdn;
    here: test_a_redirect_back_to_the_origin_sends_no_credentials
Client certificate and debug log (GHSA-h3wm-jjqf-8jm2, GHSA-whvf-jp7m-59f3, GHSA-5jhf-2qmf-m8c5)
    test_mtls: test_another_origin_receives_no_client_certificate;
    test_tokens: test_no_secret_is_logged_at_any_level;
    here: test_no_secret_of_an_upload_is_logged
Huge sizes (GHSA-f36w-mj3v-6jqv, CVE-2020-1702)
    test_pull_answers: test_an_absurd_size_is_refused, test_an_invalid_manifest_is_refused,
    test_wrong_blob_bytes_fail_verification;
    e2e/test_download_faults: test_a_manifest_of_another_size_than_in_its_index_is_refused,
    test_a_wrong_manifest_fetches_nothing;
    here: test_a_huge_descriptor_size_allocates_no_memory
Writing outside the store (GHSA-8xwf-rjm4-xvhv, CVE-2026-50163)
    not applicable: nothing is unpacked, and a layer's title names no file. A link in place of a
    lock: tests/layout/test_layout_files: test_a_symlinked_lock_is_refused
Compressed answers (CVE-2024-12886)
    test_pull_answers: test_a_compressed_manifest_is_refused; e2e/test_download_faults:
    test_a_compressed_token_response_is_not_decompressed,
    test_a_compressed_blob_is_not_decompressed, test_a_wrong_manifest_fetches_nothing (``packed``)
Manifest or index (CVE-2021-41190)
    test_pull_answers: test_an_invalid_manifest_is_refused;
    e2e/test_download_faults: test_a_wrong_manifest_fetches_nothing (``other_kind``)
"""

from __future__ import annotations

import base64
import json
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import AImageError, FormatError, UnauthorizedError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.session import Session
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving, skip_waiting

if TYPE_CHECKING:
    from clowder_aimage.registry.auth import Authenticator


MANIFEST, BLOBS = artifact(b"{}", b"weights")
BASIC = base64.b64encode(b"operator:pa55word").decode()
INDEX = "application/vnd.oci.image.index.v1+json"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the delay between retries."""
    skip_waiting(monkeypatch)


def log_in(tmp_path: Path, host: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": BASIC}}}))


def guarded(inner: Callable[[Seen], Answer]) -> Callable[[Any], Answer]:
    """Return a registry that requires the password."""

    def script(seen: Any) -> Answer:
        if seen.headers.get("Authorization") == f"Basic {BASIC}":
            return inner(seen)
        return Answer(401, {"WWW-Authenticate": 'Basic realm="test"'})

    return script


def pull(
    registry: ScriptedRegistry, tmp_path: Path, store: ImageLayout | None = None, **options: Any
) -> Descriptor:
    name = Reference.parse(f"{registry.host}/team/x:v1")
    with Repository(name, ClientOptions(docker_config=tmp_path, **options)) as source:
        return copy(source, name, store or MemoryStore())


@pytest.mark.parametrize(
    "digest", ["sha256:../../../x", "sha256-" + "a" * 64, "sha256:" + "A" * 64, "x", "\0", None]
)
def test_a_bad_digest_in_an_index_or_among_referrers(digest: str | None, tmp_path: Path) -> None:
    entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": 9}
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}).encode()
    with ScriptedRegistry(lambda _: Answer(200, {"Content-Type": INDEX}, index)).running() as it:
        with pytest.raises(FormatError):
            pull(it, tmp_path, ImageLayout(tmp_path / "store"))
        assert len(it.seen) == 1
        with Repository(
            Reference.parse(f"{it.host}/x"), ClientOptions(docker_config=tmp_path)
        ) as at:
            try:
                found = at.list_referrers(Digest.of(b"x"))
            except AImageError:
                found = []
        assert found == []
        assert all("%" not in seen.path and ".." not in seen.path for seen in it.seen)
    assert not list(tmp_path.rglob("x"))


def authenticator(tmp_path: Path, host: str) -> Authenticator:
    """Return the authenticator of a registry that need not exist."""
    connection = ClientOptions(docker_config=tmp_path)
    with Session(Reference.parse(f"{host}/x"), connection) as session:
        return session._auth


@pytest.mark.parametrize("host", ["registry.example.com", "auth.example.com"])
def test_a_realm_without_encryption_is_refused(host: str, tmp_path: Path) -> None:
    """Even the registry's own realm, and even without credentials."""
    asked = authenticator(tmp_path, "registry.example.com")
    with pytest.raises(UnauthorizedError, match="does not use HTTPS"):
        asked.answer("pull", f'Bearer realm="http://{host}/token",service="x"', None)


@pytest.mark.parametrize("host", ["169.254.169.254", "127.0.0.1:1", "10.0.0.1", "[::1]:1", "127.1"])
def test_an_internal_realm_of_a_public_registry_fails(host: str, tmp_path: Path) -> None:
    """A public registry must not direct requests into this network."""
    asked = authenticator(tmp_path, "registry.example.com")
    with pytest.raises(UnauthorizedError, match="internal address"):
        asked.answer("pull", f'Bearer realm="https://{host}/token",service="x"', None)


def test_urls_of_a_missing_layer_are_not_followed(tmp_path: Path) -> None:
    """The registry lacks the layer and gives its URL, a host that challenges for credentials."""
    challenge = {"WWW-Authenticate": 'Basic realm="give"'}
    with ScriptedRegistry(lambda _: Answer(401, challenge)).running() as other:
        document = json.loads(MANIFEST)
        document["layers"][0] |= {
            "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
            "urls": [f"http://{other.host}/layer"],
        }
        inner = serving(json.dumps(document).encode(), {str(Digest.of(b"{}")): b"{}"})
        with ScriptedRegistry(guarded(inner)).running() as registry:
            log_in(tmp_path, registry.host)
            with pytest.raises(AImageError):
                pull(registry, tmp_path)
    assert other.seen == []


def test_a_redirect_back_to_the_origin_sends_no_credentials(tmp_path: Path) -> None:
    """From the registry to another host and back: dropped credentials stay dropped."""
    with ScriptedRegistry(lambda seen: answer(seen)).running() as other:
        inner = serving(MANIFEST, BLOBS)

        def script(seen: Seen) -> Answer:
            if "/blobs/" in seen.path:
                return Answer(307, {"Location": f"http://{other.host}{seen.path}"})
            return inner(seen)

        with ScriptedRegistry(guarded(script)).running() as registry:

            def answer(seen: Seen) -> Answer:
                return Answer(307, {"Location": f"http://{registry.host}/stolen{seen.path}"})

            log_in(tmp_path, registry.host)
            with pytest.raises(AImageError):
                pull(registry, tmp_path)
    assert other.seen
    back = [seen for seen in registry.seen if seen.path.startswith("/stolen")]
    assert back
    assert not any("Authorization" in seen.headers for seen in [*other.seen, *back])


def test_no_secret_of_an_upload_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Including the signature in an upload location on another host."""
    caplog.set_level(logging.DEBUG)
    with ScriptedRegistry(lambda _: Answer(500)).running() as other:
        where = {"Location": f"http://{other.host}/up?X-Amz-Signature=s1gnature"}
        script = guarded(lambda seen: Answer(202, where) if seen.method == "POST" else Answer(404))
        with ScriptedRegistry(script).running() as registry:
            log_in(tmp_path, registry.host)
            name = Reference.parse(f"{registry.host}/x")
            settings = {registry.host: HostSettings(trusted_hosts=frozenset({"127.0.0.1"}))}
            connection = ClientOptions(docker_config=tmp_path, registries=settings)
            with Repository(name, connection) as target, pytest.raises(AImageError) as raised:
                target.push(Descriptor.of("text/plain", b"abc"), build_bytes_body(b"abc"))
    assert any("s1gnature" in seen.path for seen in other.seen)
    said = f"{caplog.text}{raised.value}{raised.value.hint}"
    assert "/up" in caplog.text  # urllib3 logs requests
    for secret in ("pa55word", BASIC, "s1gnature"):
        assert secret not in said
        assert not any(secret in repr(record.__dict__) for record in caplog.records)


def test_a_huge_descriptor_size_allocates_no_memory(tmp_path: Path) -> None:
    """The size in a descriptor is not used to allocate memory."""
    layer = {"mediaType": "text/plain", "digest": str(Digest.of(b"weights")), "size": 1 << 50}
    raw = json.dumps(json.loads(MANIFEST) | {"layers": [layer]}).encode()
    with ScriptedRegistry(serving(raw, BLOBS)).running() as registry:
        tracemalloc.start()
        try:
            with pytest.raises(AImageError):
                pull(registry, tmp_path, ImageLayout(tmp_path / "store"))
            assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
        finally:
            tracemalloc.stop()
    assert not [seen for seen in registry.seen if "/blobs/" in seen.path]
