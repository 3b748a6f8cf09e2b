"""Certificates of single hosts: authorities and client certificates in certs.d."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from clowder_aimage.cli.console import option
from clowder_aimage.content import copy
from clowder_aimage.errors import NetworkError, StoreError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.host_settings import list_certificates
from tests.memory_store import MemoryStore
from tests.process import run
from tests.scripted import Answer, ScriptedRegistry, artifact, serving

MANIFEST, BLOBS = artifact(b"{}", b"weights")
HOST = "0.0.0.0"  # noqa: S104


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def clients() -> trustme.CA:
    """Return the authority that signs client certificates."""
    return trustme.CA()


@pytest.fixture(autouse=True)
def no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


def secured(
    authority: trustme.CA,
    clients: trustme.CA | None = None,
    script: Callable[[Any], Answer] | None = None,
    optional: bool = False,
) -> ScriptedRegistry:
    """Return a TLS registry that requires a certificate signed by ``clients``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    if clients is not None:
        clients.configure_trust(context)
        context.verify_mode = ssl.CERT_OPTIONAL if optional else ssl.CERT_REQUIRED
    registry = ScriptedRegistry(script or serving(MANIFEST, BLOBS))
    registry.wrap(context)
    registry.host = f"{HOST}:{registry.host.rpartition(':')[2]}"
    return registry


def place(
    directory: Path,
    host: str,
    authority: trustme.CA | None = None,
    clients: trustme.CA | None = None,
) -> Path:
    """Write the certs.d files of a host."""
    where = directory / host
    where.mkdir(parents=True, exist_ok=True)
    if authority is not None:
        authority.cert_pem.write_to_path(str(where / "ca.crt"))
    if clients is not None:
        leaf = clients.issue_cert("client@example.com")
        leaf.cert_chain_pems[0].write_to_path(str(where / "client.cert"))
        leaf.private_key_pem.write_to_path(str(where / "client.key"))
    return where


def pull(host: str, tmp_path: Path, **options: Any) -> Descriptor:
    reference = Reference.parse(f"{host}/x")
    connection = ClientOptions(
        docker_config=tmp_path, cert_dirs=(tmp_path / "none", tmp_path / "certs.d"), **options
    )
    with Repository(reference, connection) as repository:
        return copy(repository, reference, MemoryStore())


def test_a_host_authority_is_trusted(authority: trustme.CA, tmp_path: Path) -> None:
    with secured(authority).running() as registry, secured(authority).running() as other:
        place(tmp_path / "certs.d", registry.host, authority)
        pull(registry.host, tmp_path)
        with pytest.raises(NetworkError, match="cannot verify"):
            pull(other.host, tmp_path)


def test_a_client_certificate_is_sent(
    authority: trustme.CA, clients: trustme.CA, tmp_path: Path
) -> None:
    with secured(authority, clients).running() as registry:
        place(tmp_path / "certs.d", registry.host, authority)
        with pytest.raises(NetworkError):
            pull(registry.host, tmp_path)
        place(tmp_path / "certs.d", registry.host, authority, clients)
        pull(registry.host, tmp_path)


def test_a_client_certificate_of_an_unknown_authority_is_refused(
    authority: trustme.CA, clients: trustme.CA, tmp_path: Path
) -> None:
    with secured(authority, clients).running() as registry:
        place(tmp_path / "certs.d", registry.host, authority, trustme.CA())
        with pytest.raises(NetworkError):
            pull(registry.host, tmp_path)


def test_a_ca_file_takes_precedence_and_keeps_the_client_certificate(
    authority: trustme.CA, clients: trustme.CA, tmp_path: Path
) -> None:
    right, wrong = tmp_path / "right.pem", tmp_path / "wrong.pem"
    authority.cert_pem.write_to_path(str(right))
    trustme.CA().cert_pem.write_to_path(str(wrong))
    with secured(authority, clients).running() as registry:
        place(tmp_path / "certs.d", registry.host, authority, clients)
        with pytest.raises(NetworkError, match="cannot verify"):
            pull(registry.host, tmp_path, ca_file=wrong)
        place(tmp_path / "certs.d", registry.host, trustme.CA(), clients)
        pull(registry.host, tmp_path, ca_file=right)


@pytest.mark.parametrize("trusted", [None, "right", "wrong", "nonsense"])
def test_insecure_skips_verification_and_keeps_the_client_certificate(
    trusted: Any, authority: trustme.CA, clients: trustme.CA, tmp_path: Path
) -> None:
    """The authority in certs.d is ignored."""
    told = {"right": authority, "wrong": trustme.CA()}.get(trusted)
    with secured(authority, clients).running() as registry:
        where = place(tmp_path / "certs.d", registry.host, told, clients)
        if trusted == "nonsense":
            (where / "ca.crt").write_text("nonsense")
        pull(registry.host, tmp_path, insecure=True)


def test_insecure_with_an_authority_only(authority: trustme.CA, tmp_path: Path) -> None:
    with secured(authority).running() as registry:
        place(tmp_path / "certs.d", registry.host, trustme.CA())
        with pytest.raises(NetworkError, match="cannot verify"):
            pull(registry.host, tmp_path)
        pull(registry.host, tmp_path, insecure=True)


def test_insecure_accepts_the_certificate_of_another_host(
    authority: trustme.CA, clients: trustme.CA, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("elsewhere.example.com").configure_cert(context)
    registry = ScriptedRegistry(serving(MANIFEST, BLOBS))
    registry.wrap(context)
    with registry.running():
        host = f"{HOST}:{registry.host.rpartition(':')[2]}"
        place(tmp_path / "certs.d", host, authority, clients)
        with pytest.raises(NetworkError, match="cannot verify"):
            pull(host, tmp_path)
        pull(host, tmp_path, insecure=True)


def test_another_origin_receives_no_client_certificate(
    authority: trustme.CA, clients: trustme.CA, tmp_path: Path
) -> None:
    """Blobs are redirected to another port, which requests a certificate from a trusted CA."""
    shown = []

    class Recording(ssl.SSLSocket):
        def read(self, *args: Any) -> bytes:
            try:
                return super().read(*args)
            finally:
                shown.append(self.getpeercert())

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslsocket_class = Recording
    authority.issue_cert(HOST).configure_cert(context)
    clients.configure_trust(context)
    context.verify_mode = ssl.CERT_OPTIONAL
    cdn = ScriptedRegistry(serving(MANIFEST, BLOBS))
    cdn.wrap(context)
    address = f"{HOST}:{cdn.host.rpartition(':')[2]}"
    right = serving(MANIFEST, BLOBS)

    def script(seen: Any) -> Answer:
        if "/blobs/" in seen.path:
            return Answer(307, {"Location": f"https://{address}{seen.path}"})
        return right(seen)

    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    with cdn.running(), secured(authority, clients, script).running() as registry:
        place(tmp_path / "certs.d", registry.host, None, clients)
        pull(registry.host, tmp_path, ca_bundle=bundle)
        assert cdn.asked("GET")
        assert shown
        assert not any(shown)
        place(tmp_path / "certs.d", address, None, clients)
        pull(address, tmp_path, ca_bundle=bundle)  # its own certificate is sent
        assert shown[-1]


@pytest.mark.parametrize("broken", ["ca.crt", "client.cert", "client.key"])
def test_an_invalid_certificate_file_is_refused(
    authority: trustme.CA, clients: trustme.CA, tmp_path: Path, broken: str
) -> None:
    where = place(tmp_path / "certs.d", "r.example.com", authority, clients)
    (where / broken).write_text("nonsense")
    with pytest.raises(StoreError, match=r"cannot load the certificate .*c"):
        pull("r.example.com", tmp_path)


def test_a_client_certificate_without_a_key_is_refused(
    authority: trustme.CA, clients: trustme.CA, tmp_path: Path
) -> None:
    where = place(tmp_path / "certs.d", "r.example.com", authority, clients)
    (where / "client.key").unlink()
    with pytest.raises(StoreError) as raised:
        pull("r.example.com", tmp_path)
    assert "x.key" in str(raised.value.hint)


def test_the_first_directory_with_the_host_is_used(tmp_path: Path) -> None:
    for name in ("a", "b"):
        where = tmp_path / name / "r.example.com:5000"
        where.mkdir(parents=True)
        for file in ("one.crt", "two.crt", "me.cert", "me.key", "README"):
            (where / file).touch()
    (tmp_path / "empty" / "r.example.com:5000").mkdir(parents=True)
    directories = tuple(tmp_path / name for name in ("none", "empty", "b", "a"))
    (tmp_path / "file").touch()
    directories = (tmp_path / "file", *directories)
    where = tmp_path / "b" / "r.example.com:5000"
    assert list_certificates(directories, "r.example.com:5000") == sorted(where.iterdir())
    assert list_certificates(directories, "r.example.com") == []


def test_ssl_cert_file_is_trusted(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = tmp_path / "right.pem", tmp_path / "wrong.pem"
    authority.cert_pem.write_to_path(str(right))
    trustme.CA().cert_pem.write_to_path(str(wrong))
    with secured(authority).running() as registry:
        pull(registry.host, tmp_path, ca_bundle=right)
        with pytest.raises(NetworkError, match="cannot verify"):
            pull(registry.host, tmp_path, ca_bundle=wrong)
        pull(registry.host, tmp_path, ca_bundle=wrong, ca_file=right)
        pull(registry.host, tmp_path, ca_bundle=wrong, insecure=True)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(right))
        pull(registry.host, tmp_path, ca_bundle=wrong)
        with pytest.raises(NetworkError, match="absent"):
            pull(registry.host, tmp_path, ca_file=tmp_path / "absent.pem")


def test_ssl_cert_dir_is_trusted(authority: trustme.CA, tmp_path: Path) -> None:
    """Authorities are named by the hash of their subject, as by ``openssl rehash``."""
    directory = tmp_path / "certs"
    directory.mkdir()
    pem = directory / "authority.pem"
    authority.cert_pem.write_to_path(str(pem))
    command = ["openssl", "x509", "-hash", "-noout", "-in", str(pem)]
    found = run(command, text=True, check=True).stdout.strip()
    pem.rename(directory / f"{found}.0")
    (tmp_path / "empty").mkdir()
    with secured(authority).running() as registry:
        pull(registry.host, tmp_path, ca_bundle=directory)
        with pytest.raises(NetworkError, match="cannot verify"):
            pull(registry.host, tmp_path, ca_bundle=tmp_path / "empty")


def test_the_command_line_reads_ssl_cert_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL accepts a list there and skips missing directories; a file takes precedence."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", f"{tmp_path}/absent:{first}:{second}")
    assert option.VerbSettings().build_client_options().ca_bundle == first
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert option.VerbSettings().build_client_options().ca_bundle == tmp_path / "ca.pem"
    monkeypatch.delenv("SSL_CERT_FILE")
    for none in ("", ":", f"{tmp_path}/absent"):
        monkeypatch.setenv("SSL_CERT_DIR", none)
        assert option.VerbSettings().build_client_options().ca_bundle is None
