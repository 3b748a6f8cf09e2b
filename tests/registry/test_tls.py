"""TLS and proxies: precedence of the command line over the environment."""

from __future__ import annotations

import ssl

import pytest
import trustme

from clowder_aimage.content import copy
from clowder_aimage.errors import NetworkError
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository
from tests.memory_store import MemoryStore
from tests.scripted import ScriptedRegistry, artifact, serving

MANIFEST, BLOBS = artifact(b"{}", b"weights")
HOST = "0.0.0.0"  # noqa: S104


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def secured(authority):
    """Return a registry behind TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    registry = ScriptedRegistry(serving(MANIFEST, BLOBS))
    registry.wrap(context)
    with registry.running():
        yield f"{HOST}:{registry.host.rpartition(':')[2]}"


@pytest.fixture
def ca_file(authority, tmp_path):
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def other_bundle(tmp_path, monkeypatch):
    """Set an environment that trusts another authority."""
    path = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(path))
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)


def pull(host, tmp_path, **options):
    reference = Reference.parse(f"{host}/x")
    with Repository(reference, ClientOptions(docker_config=tmp_path, **options)) as repository:
        return copy(repository, reference, MemoryStore())


def test_an_unknown_authority_is_not_trusted(secured, tmp_path):
    with pytest.raises(NetworkError, match="cannot verify the certificate") as raised:
        pull(secured, tmp_path)
    assert raised.value.remedy == "ca_file"  # no fallback to plain HTTP


def test_tls_to_a_plain_http_registry_fails(tmp_path):
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        host = f"{HOST}:{registry.host.rpartition(':')[2]}"
        with pytest.raises(NetworkError, match=f"TLS handshake with {host} failed") as raised:
            pull(host, tmp_path)
        assert raised.value.remedy == "plain_http"
        assert not registry.seen
        pull(host, tmp_path, plain_http=True)


@pytest.mark.usefixtures("other_bundle")
def test_a_ca_file_takes_precedence_over_the_environment(secured, tmp_path, ca_file):
    pull(secured, tmp_path, ca_file=ca_file)


def test_the_ca_bundle_of_the_environment_is_used(secured, tmp_path, ca_file, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(ca_file))
    pull(secured, tmp_path)


@pytest.mark.usefixtures("other_bundle")
def test_insecure_takes_precedence_over_the_environment_without_warnings(secured, tmp_path):
    pull(secured, tmp_path, insecure=True)


def test_plain_http_to_a_tls_registry_fails(secured, tmp_path):
    with pytest.raises(NetworkError):
        pull(secured, tmp_path, plain_http=True)


def test_loopback_bypasses_the_proxy(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        pull(registry.host, tmp_path)
        port = registry.host.rpartition(":")[2]
        with pytest.raises(NetworkError):  # other addresses use the proxy
            pull(f"{HOST}:{port}", tmp_path, plain_http=True)
