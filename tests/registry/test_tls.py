"""TLS and proxies: precedence of the command line over the environment."""

from __future__ import annotations

import json
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from clowder_aimage.content import copy
from clowder_aimage.errors import NetworkError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository
from tests.memory_store import MemoryStore
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry, artifact, serving

MANIFEST, BLOBS = artifact(b"{}", b"weights")
HOST = "0.0.0.0"  # noqa: S104


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secured(authority: trustme.CA) -> Iterator[str]:
    """Return a registry behind TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    registry = ScriptedRegistry(serving(MANIFEST, BLOBS))
    registry.wrap(context)
    with registry.running():
        yield f"{HOST}:{registry.host.rpartition(':')[2]}"


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def other_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an environment that trusts another authority."""
    path = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(path))
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)


def pull(host: str, tmp_path: Path, **options: Any) -> Descriptor:
    reference = Reference.parse(f"{host}/x")
    with Repository(reference, ClientOptions(docker_config=tmp_path, **options)) as repository:
        return copy(repository, reference, MemoryStore())


def test_an_unknown_authority_is_not_trusted(secured: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="cannot verify the certificate") as raised:
        pull(secured, tmp_path)
    assert raised.value.remedy == "ca_file"  # no fallback to plain HTTP
    assert "_ssl.c" not in raised.value.message and "[SSL" not in raised.value.message


def test_tls_to_a_plain_http_registry_fails(tmp_path: Path) -> None:
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        host = f"{HOST}:{registry.host.rpartition(':')[2]}"
        with pytest.raises(NetworkError, match=f"TLS handshake with {host} failed") as raised:
            pull(host, tmp_path)
        assert raised.value.remedy == "plain_http"
        assert not registry.seen
        pull(host, tmp_path, plain_http=True)


@pytest.mark.usefixtures("other_bundle")
def test_a_ca_file_takes_precedence_over_the_environment(
    secured: str, tmp_path: Path, ca_file: Path
) -> None:
    pull(secured, tmp_path, ca_file=ca_file)


def test_the_ca_bundle_of_the_environment_is_used(
    secured: str, tmp_path: Path, ca_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(ca_file))
    pull(secured, tmp_path)


@pytest.mark.usefixtures("other_bundle")
def test_insecure_takes_precedence_over_the_environment_without_warnings(
    secured: str, tmp_path: Path
) -> None:
    pull(secured, tmp_path, insecure=True)


def test_plain_http_to_a_tls_registry_fails(secured: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkError):
        pull(secured, tmp_path, plain_http=True)


def test_loopback_bypasses_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        pull(registry.host, tmp_path)
        port = registry.host.rpartition(":")[2]
        with pytest.raises(NetworkError):  # other addresses use the proxy
            pull(f"{HOST}:{port}", tmp_path, plain_http=True)


@pytest.fixture
def local(authority: trustme.CA) -> Iterator[str]:
    """Return a loopback registry behind TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    registry = ScriptedRegistry(serving(MANIFEST, BLOBS))
    registry.wrap(context)
    with registry.running():
        yield registry.host


def configured(here: Aimage, host: str, **entry: Any) -> None:
    """Write the configuration of one host."""
    file = here.home / "config.json"
    file.write_text(json.dumps({"registries": {host: entry}}))
    here.environment["AIMAGE_CONFIG"] = str(file)


def shown(here: Aimage, name: str) -> tuple[Any, Any]:
    """Return a setting of ``config show`` and its source."""
    (found,) = (e for e in here("config", "show", "--json").value["settings"] if e["name"] == name)
    return found["value"], found["origin"]


def test_options_and_configuration_enable_tls_for_a_loopback_host(
    aimage: Callable[..., Aimage], local: str, ca_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(variable, raising=False)
    here, name = aimage(), f"{local}/x"
    for entry in ({"caFile": str(ca_file)}, {"insecure": True}):
        configured(here, local, **entry)
        here("pull", name)
        assert shown(here, f"registries.{local}.plainHttp") == (False, "default")
    configured(here, local, plainHttp=False)
    assert "cannot verify the certificate" in here("pull", name, code=1).err
    assert shown(here, f"registries.{local}.plainHttp")[0] is False
    here.environment["SSL_CERT_FILE"] = str(ca_file)
    here("pull", name)
    here.environment.clear()
    here("pull", name, "--insecure")
    here("pull", name, "--ca-file", ca_file)


def test_http_remains_the_default_for_loopback_hosts(
    aimage: Callable[..., Aimage], ca_file: Path
) -> None:
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        here, name = aimage(), f"{registry.host}/x"
        here.environment["SSL_CERT_FILE"] = str(ca_file)
        configured(here, registry.host, jobs=2)
        here("pull", name)
        assert shown(here, f"registries.{registry.host}.plainHttp") == (True, "default")
        failed = here("pull", name, "--ca-file", ca_file, code=1).err
        assert "TLS handshake with" in failed
        assert "may expect HTTP: use --plain-http" in failed
        configured(here, registry.host, plainHttp=True, caFile=str(ca_file))
        here("pull", name)


def test_a_client_certificate_enables_tls_for_a_loopback_host(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    file = tmp_path / "client.pem"
    trustme.CA().issue_cert("ann@example.com").private_key_and_cert_chain_pem.write_to_path(file)
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        failed = aimage()("resolve", f"{registry.host}/x", "--cert-file", file, code=1).err
        assert "TLS handshake with" in failed and not registry.seen


def test_http_to_a_loopback_tls_registry_has_a_hint(
    aimage: Callable[..., Aimage], local: str
) -> None:
    failed = aimage()("pull", f"{local}/x", code=1).err
    assert f"connection to {local} lost" in failed
    assert "the registry may expect HTTPS: omit --plain-http" in failed


def test_a_tls_alert_is_recognised(aimage: Callable[..., Aimage]) -> None:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"\x15\x03\x01\x00\x02\x02\x46")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        name = f"127.0.0.1:{server.server_address[1]}/x"
        failed = aimage()("pull", name, code=1).err
        server.shutdown()
    assert "answered an HTTP request with a TLS alert" in failed
    assert "the registry may expect HTTPS" in failed


@pytest.mark.parametrize(
    ("status", "body", "line", "hint"),
    [
        (
            400,
            "Client sent an HTTP request to an HTTPS server.\n",
            "for manifest HOST/x:latest: Client sent an HTTP request to an HTTPS server.",
            "the registry may expect HTTPS",
        ),
        (
            400,
            "<html>\r\n<head><title>400 The plain HTTP request was sent to HTTPS port</title>\r\n",
            "for manifest HOST/x:latest: 400 The plain HTTP request was sent to HTTPS port",
            "the registry may expect HTTPS",
        ),
        (403, "denied\x1b[2J by a proxy\nmore", "(403): denied[2J by a proxy\n", ""),
        (418, "x" * 300, "418 I'm a Teapot for manifest HOST/x:latest: " + "x" * 200 + "\n", ""),
        (
            418,
            '{"errors": []}',
            '418 I\'m a Teapot for manifest HOST/x:latest: {"errors": []}\n',
            "",
        ),
        (418, "", "418 I'm a Teapot for manifest HOST/x:latest\n", ""),
    ],
)
def test_the_first_line_of_another_body_is_shown(
    aimage: Callable[..., Aimage], status: int, body: str, line: str, hint: str
) -> None:
    with ScriptedRegistry(lambda _: Answer(status, {}, body.encode())).running() as registry:
        code = 4 if status == 403 else 1
        failed = aimage()("pull", f"{registry.host}/x", code=code).err
    assert line.replace("HOST", registry.host) in failed
    assert hint in failed
    assert "more" not in failed
