"""An upload stays at its registry, or goes to a host of the internet."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import AImageError, NetworkError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository, upload
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.reach import OutsideError, UploadBoundary
from clowder_aimage.registry.session import Session
from tests.registry.test_reach import peer
from tests.scripted import Answer, ScriptedRegistry, Seen, skip_waiting

DATA = b"0123456789" * 10
BLOB = Descriptor.of("text/plain", DATA)
INTERNAL = "an internal address"
# the registry, the Location of an upload, and the URL that is used or a part of the error
HERE = "http://127.0.0.1:5000"
INSIDE = "http://10.0.0.5:5000"
PUBLIC = "https://r.example.com"
LOCATIONS = [
    (HERE, "/up?x=1", f"{HERE}/up?x=1"),
    (HERE, "up", f"{HERE}/v2/x/blobs/uploads/up"),
    (HERE, f"{HERE}/another/path", f"{HERE}/another/path"),
    (HERE, "http://localhost:5000/up", f"{HERE}/up"),
    (HERE, "http://[::1]:5000/up", f"{HERE}/up"),
    (HERE, "http://LOCALHOST:5000/up", f"{HERE}/up"),
    (HERE, "http://127.0.0.1:5001/up", "leads to 127.0.0.1:5001, " + INTERNAL),
    (HERE, "//127.0.0.1:5001/up", INTERNAL),
    (HERE, "http://localhost:5001/up", INTERNAL),
    (HERE, "http://127.0.0.1/up", "leads to 127.0.0.1:80, " + INTERNAL),
    (HERE, "https://127.0.0.1/up", INTERNAL),
    (HERE, "https://127.0.0.1:5000/up", INTERNAL),
    (HERE, "http://127.0.0.2:5000/up", INTERNAL),
    (HERE, "http://2130706433:6379/", INTERNAL),
    (HERE, "http://0.0.0.0:5000/up", INTERNAL),
    (HERE, "http://10.0.0.1/up", INTERNAL),
    (HERE, "http://169.254.169.254/latest", INTERNAL),
    (HERE, "https://[fd00::1]/up", INTERNAL),
    (HERE, "http://s.example.com/up", "to s.example.com:80 without TLS"),
    (HERE, "http://other:5000/up", "without TLS"),
    (HERE, "ftp://s.example.com/up", "without TLS"),
    (HERE, "file:///etc/passwd", "without TLS"),
    (HERE, "https://s.example.com/up?sig=1", "https://s.example.com/up?sig=1"),
    (HERE, "https://1.1.1.1/up", "https://1.1.1.1/up"),
    # A token service may be there, but no content is sent to it.
    (HERE, "http://realm.lan/up", "without TLS"),
    (HERE, "http://trusted.lan:9000/up", "http://trusted.lan:9000/up"),
    (INSIDE, "/up", f"{INSIDE}/up"),
    (INSIDE, "http://10.0.0.5:9000/up", "leads to 10.0.0.5:9000, " + INTERNAL),
    (INSIDE, "http://10.0.0.6:5000/up", INTERNAL),
    (INSIDE, "https://10.0.0.6/up", INTERNAL),
    (INSIDE, "http://127.0.0.1:5000/up", INTERNAL),
    (INSIDE, "https://s.example.com/up", "https://s.example.com/up"),
    ("https://10.0.0.5:5000", "http://10.0.0.5/up", "https://10.0.0.5:5000/up"),
    (PUBLIC, "/up?x=1", f"{PUBLIC}/up?x=1"),
    (PUBLIC, "http://r.example.com/up", f"{PUBLIC}/up"),
    (PUBLIC, "https://r.example.com:443/up", f"{PUBLIC}/up"),
    (f"{PUBLIC}:8443", "http://r.example.com:80/up", f"{PUBLIC}:8443/up"),
    (PUBLIC, "https://s.example.com/up", "https://s.example.com/up"),
    (PUBLIC, "http://s.example.com/up", "without TLS"),
    (PUBLIC, "http://trusted.lan/up", "without TLS"),
    (PUBLIC, "https://trusted.lan/up", "https://trusted.lan/up"),
    (PUBLIC, "https://10.0.0.1/up", INTERNAL),
    (PUBLIC, "https://localhost/up", INTERNAL),
]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the delay between retries."""
    skip_waiting(monkeypatch)


@pytest.mark.parametrize(("registry", "location", "expected"), LOCATIONS)
def test_where_a_registry_may_send_an_upload(
    registry: str, location: str, expected: str, tmp_path: Path
) -> None:
    parts = urlsplit(registry)
    settings = HostSettings(
        plain_http=parts.scheme == "http", trusted_hosts=frozenset({"trusted.lan"})
    )
    connection = ClientOptions(
        docker_config=tmp_path,
        registries={parts.netloc: settings},
        trusted_realms=frozenset({"127.0.0.1", "realm.lan"}),
    )
    with Session(Reference(parts.netloc, "x"), connection) as session:
        base = session.build_url("blobs/uploads/")
        if expected.startswith(("http://", "https://")):
            assert session.join_upload(location, base) == expected
        else:
            with pytest.raises(AImageError, match=re.escape(expected)) as caught:
                session.join_upload(location, base)
            assert "trustedHosts" in (caught.value.hint or "trustedHosts")


def test_the_addresses_of_uploads_elsewhere() -> None:
    boundary = UploadBoundary("r.example.com", frozenset({"trusted.lan"}))
    for host, address in (("s.example.com", "1.1.1.1"), ("trusted.lan", "10.0.0.1")):
        boundary.check(host, peer(address))
    for address in ("127.0.0.1", "::1", "10.0.0.1", "169.254.169.254", "::ffff:10.0.0.1"):
        # Also that of the registry itself: this is another port of it.
        for host in ("s.example.com", "r.example.com"):
            with pytest.raises(OutsideError, match=rf"{host}:443, an internal"):
                boundary.check(host, peer(address))


# The step of an upload that leads elsewhere: the answer to each request, by method.
STEPS = ["POST", "PATCH", "GET", "redirect"]


@pytest.mark.parametrize("step", STEPS)
def test_no_request_of_an_upload_reaches_another_port_of_this_machine(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "RESUMABLE", 10)
    monkeypatch.setattr(upload, "LARGEST_PUT", 10)
    accept = {"Range": "0-49", "Location": "/up"}
    with ScriptedRegistry(lambda _: Answer(204, accept)).running() as other:
        there = f"http://{other.host}/up"

        def script(seen: Seen) -> Answer:
            here = {"Location": "/up"}
            if seen.method == "POST":
                return Answer(202, {"Location": there} if step == "POST" else here)
            if seen.method == "PATCH" and step != "PATCH":
                return Answer(500)
            if seen.method == "GET" and step == "redirect":
                return Answer(307, {"Location": there})
            return Answer(202, {"Location": there, "Range": "0-49"})

        with (
            ScriptedRegistry(script).running() as registry,
            pytest.raises(NetworkError, match=INTERNAL),
        ):
            connection = ClientOptions(docker_config=tmp_path)
            with Repository(Reference.parse(f"{registry.host}/x"), connection) as repository:
                repository.push(BLOB, build_bytes_body(DATA))
    # A GET may be redirected: it has no content, and no credentials.
    assert [seen.method for seen in other.seen] == (["GET"] if step == "redirect" else [])


def test_a_public_name_with_an_internal_address_gets_no_upload(tmp_path: Path) -> None:
    with ScriptedRegistry(lambda _: Answer(201)).running() as other:
        port = int(other.host.rpartition(":")[2])

        def script(seen: Seen) -> Answer:
            return Answer(202, {"Location": f"https://s.example.com:{port}/up"})

        with (
            ScriptedRegistry(script).running() as registry,
            pytest.raises(OutsideError, match=f"leads to s.example.com:{port}"),
        ):
            connection = ClientOptions(
                docker_config=tmp_path, addresses={("s.example.com", port): "127.0.0.1"}
            )
            with Repository(Reference.parse(f"{registry.host}/x"), connection) as repository:
                repository.push(BLOB, build_bytes_body(DATA))
    assert other.seen == []
