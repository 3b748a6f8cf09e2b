"""A registry leads only to addresses that are as public as its own."""

from __future__ import annotations

import ast
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.errors import AImageError, UnauthorizedError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.reach import Boundary, OutsideError, Reach, reach, reach_of_name
from clowder_aimage.registry.session import Session
from tests.scripted import Answer, ScriptedRegistry, Seen

PACKAGE = Path(__file__).parents[2] / "clowder_aimage"
ADDRESSES = {
    Reach.INTERNET: ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"],
    Reach.NETWORK: [
        *("10.0.0.1", "192.168.1.1", "100.64.0.1", "fd00::1", "64:ff9b::a00:1"),
        *("64:ff9b:1::101:101", "fec0::1", "3fff::1", "5f00::1", "::ffff:0:a00:1"),
    ],
    Reach.MACHINE: [
        *("127.0.0.1", "::1", "127.255.0.9", "0.0.0.0", "::"),  # noqa: S104
        *("::ffff:127.0.0.9", "::127.0.0.1"),
        *("2002:7f00:1::", "64:ff9b::7f00:1", "::ffff:0:7f00:1"),
    ],
    Reach.NOWHERE: ["169.254.169.254", "fe80::1%2", "224.0.0.1", "ff02::1", "64:ff9b::a9fe:a9fe"],
}


@pytest.mark.parametrize("found", Reach, ids=lambda found: found.name)
def test_the_reach_of_an_address(found: Reach) -> None:
    assert {address: reach(address) for address in ADDRESSES[found]} == dict.fromkeys(
        ADDRESSES[found], found
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *((name, Reach.MACHINE) for name in ("localhost", "LOCALHOST.", "a.localhost", "127.1")),
        *((name, Reach.MACHINE) for name in ("ip6-localhost", "2130706433", "0x7f000001", "0")),
        *(("017700000001", Reach.MACHINE), ("10.0.0.1", Reach.NETWORK)),
        *(("169.254.169.254.", Reach.NOWHERE), ("1.1.1.1", Reach.INTERNET)),
        *(("auth.example.com", None), ("a1.example.com", None)),
    ],
)
def test_the_reach_of_a_name(name: str, found: Reach | None) -> None:
    assert reach_of_name(name) == found


def peer(address: str) -> Any:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SimpleNamespace(family=family, getpeername=lambda: (address, 443))


@given(st.data())
def test_no_registry_leads_further_inside_than_itself(data: st.DataObject) -> None:
    own, other = (data.draw(st.sampled_from(list(Reach))) for _ in range(2))
    boundary = Boundary("Registry.example.com", frozenset({"trusted.example.com"}))
    boundary.check("registry.example.com", peer(data.draw(st.sampled_from(ADDRESSES[own][:2]))))
    target = data.draw(st.sampled_from(ADDRESSES[other][2 if own in (2, 3) else 0 :]))
    boundary.check("trusted.example.com", peer(target))
    if other is Reach.INTERNET or other is own is Reach.NETWORK:
        boundary.check("other.example.com", peer(target))
    else:
        with pytest.raises(OutsideError, match=r"registry.example.com leads to other.example.com"):
            boundary.check("other.example.com", peer(target))


def test_a_registry_on_this_machine_leads_to_its_own_address_only() -> None:
    boundary = Boundary("127.0.0.1")
    boundary.check("127.0.0.1", peer("127.0.0.1"))
    for address in ("127.0.0.1", "::1"):
        boundary.check_name("localhost")
        boundary.check("localhost", peer(address))
    for address in ("127.0.0.2", "10.0.0.1"):
        with pytest.raises(OutsideError):
            boundary.check("other.example.com", peer(address))


def test_the_registry_itself_may_not_move_inside() -> None:
    """Its name may resolve to another address the next time (DNS rebinding)."""
    boundary = Boundary("r.example.com")
    boundary.check("r.example.com", peer("1.1.1.1"))
    for address in ("127.0.0.1", "10.0.0.1", "169.254.169.254"):
        with pytest.raises(OutsideError):
            boundary.check("r.example.com", peer(address))


DATA = b"0123456789" * 10
BLOB = Descriptor.of("text/plain", DATA)


@pytest.mark.parametrize(
    "doing",
    [
        lambda repository: repository.open(BLOB).read(1000),
        lambda repository: repository.resolve(Reference.parse("h/x:v1")),
        lambda repository: repository.push(BLOB, build_bytes_body(DATA)),
    ],
    ids=["blob", "manifest", "upload"],
)
@pytest.mark.parametrize("is_trusted", [False, True])
def test_nothing_is_sent_to_an_address_inside(
    doing: Callable[[Repository], object],
    is_trusted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = Boundary.check

    def checked(self: Boundary, host: str, sock: socket.socket) -> None:
        if host == "127.0.0.1":  # the registry, as if it were on the internet
            self._registry_reach = Reach.INTERNET
        else:
            check(self, host, sock)

    monkeypatch.setattr(Boundary, "check", checked)
    with ScriptedRegistry(lambda _: Answer(404)).running() as inside:
        target = f"http://{inside.host.replace('127.0.0.1', 'localhost')}/secret"

        def script(seen: Seen) -> Answer:
            if seen.method == "POST":
                return Answer(202, {"Location": target})
            if seen.method == "HEAD" and "/blobs/" in seen.path:
                return Answer(404)
            return Answer(307, {"Location": target})

        with ScriptedRegistry(script).running() as registry:
            trusted = frozenset({"localhost"}) if is_trusted else frozenset()
            settings = {registry.host: HostSettings(trusted_hosts=trusted)}
            connection = ClientOptions(docker_config=tmp_path, registries=settings)
            with (
                Repository(Reference.parse(f"{registry.host}/x"), connection) as repository,
                pytest.raises(AImageError) as caught,
            ):
                doing(repository)
        assert bool(inside.seen) == is_trusted, caught.value
        assert isinstance(caught.value, OutsideError) != is_trusted, caught.value


def test_a_private_realm_is_for_private_registries(tmp_path: Path) -> None:
    connection = ClientOptions(docker_config=tmp_path)
    with Session(Reference.parse("registry.example.com/x"), connection) as session:
        for own, is_allowed in ((Reach.INTERNET, False), (Reach.NETWORK, True)):
            session._pools.boundary._registry_reach = own
            if is_allowed:
                assert session._auth._parse_realm("https://10.0.0.1/token") == "10.0.0.1"
                assert not session._auth._is_trusted("10.0.0.1")
            else:
                with pytest.raises(UnauthorizedError, match="internal address"):
                    session._auth._parse_realm("https://10.0.0.1/token")


def test_a_proxy_is_not_asked_for_an_address_inside() -> None:
    boundary = Boundary("registry.example.com")
    boundary.check_name("cdn.example.com")
    for host in ("127.0.0.1", "localhost", "169.254.169.254", "::1"):
        with pytest.raises(OutsideError):
            boundary.check_name(host)


def test_every_pool_of_connections_to_a_registry_has_a_boundary() -> None:
    """Other modules do not open connections to hosts that a registry names."""
    makers = {"PoolManager", "ProxyManager", "HTTPConnectionPool", "create_connection", "urlopen"}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        # Parsing all modules takes seconds.
        if not any(f"{name}(" in text for name in (*makers, "requests.Session")):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in makers or ast.unparse(node.func) == "requests.Session":
                found.add(str(path.relative_to(PACKAGE)))
    # connection_pool: with a boundary; peer: the nodes of the configuration
    pools = {"registry/connection.py", "registry/connection_pool.py", "registry/peer.py"}
    assert found <= pools, found
