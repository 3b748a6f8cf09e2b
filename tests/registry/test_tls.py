"""TLS, proxies, and what the command line says against what the environment says."""

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
    """A registry behind TLS."""
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
    """An environment that trusts somebody else."""
    path = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(path))
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)


def pull(host, tmp_path, **options):
    reference = Reference.parse(f"{host}/x")
    with Repository(reference, ClientOptions(docker_config=tmp_path, **options)) as repository:
        return copy(repository, reference, MemoryStore())


def test_an_unknown_authority_is_not_trusted(secured, tmp_path):
    with pytest.raises(NetworkError, match="cannot trust the certificate") as raised:
        pull(secured, tmp_path)
    assert raised.value.remedy == "ca_file"  # not plain HTTP: it does speak TLS


def test_tls_to_a_registry_without(tmp_path):
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        host = f"{HOST}:{registry.host.rpartition(':')[2]}"
        with pytest.raises(NetworkError, match=f"cannot speak TLS with {host}") as raised:
            pull(host, tmp_path)
        assert raised.value.remedy == "plain_http"
        assert not registry.seen
        pull(host, tmp_path, plain_http=True)


@pytest.mark.usefixtures("other_bundle")
def test_a_ca_file_wins_over_the_environment(secured, tmp_path, ca_file):
    pull(secured, tmp_path, ca_file=ca_file)


def test_the_environment_s_bundle_is_used(secured, tmp_path, ca_file, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(ca_file))
    pull(secured, tmp_path)


@pytest.mark.usefixtures("other_bundle")
def test_insecure_wins_over_the_environment_and_says_nothing_of_its_own(secured, tmp_path):
    pull(secured, tmp_path, insecure=True)


def test_plain_http_to_a_registry_with_tls(secured, tmp_path):
    with pytest.raises(NetworkError):
        pull(secured, tmp_path, plain_http=True)


def test_loopback_is_reached_without_a_proxy(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        pull(registry.host, tmp_path)
        port = registry.host.rpartition(":")[2]
        with pytest.raises(NetworkError):  # an address that is not loopback's goes to the proxy
            pull(f"{HOST}:{port}", tmp_path, plain_http=True)
