"""Deadlines of exchanges: no response lasts, whichever part of it is sent slowly or without end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import AImageError, NetworkError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Manifest, Reference
from clowder_aimage.pull import pull
from clowder_aimage.registry import (
    ClientOptions,
    Repository,
    download,
    repository,
    response,
    session,
)
from clowder_aimage.registry.peer import PeerClient, PeerError, PeerReader, PeerTimeouts
from tests.hostile_registry import BLOB_TIME, FORM, TIME, HostileRegistry
from tests.scripted import skip_waiting

PACKAGE = Path(download.__file__).parents[1]
# The content is right: its bytes decide, not the headers.
GOOD = {"neglen", "biglen", "ctype"}


@pytest.fixture(scope="module")
def registry() -> Iterator[HostileRegistry]:
    with HostileRegistry().running() as running:
        yield running


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the delay between retries."""
    skip_waiting(monkeypatch)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the deadlines: their base, and the time for the bytes of a document."""
    for name in ("FIRST_READ_TIMEOUT", "READ_TIMEOUT"):
        monkeypatch.setattr(session, name, 0.15)
    monkeypatch.setattr(session.Session.request, "__kwdefaults__", {
        **(session.Session.request.__kwdefaults__ or {}), "read_timeout": 0.15,
    })  # fmt: skip
    monkeypatch.setattr(repository, "STALL", 0.15)
    monkeypatch.setattr(download, "_WINDOW", 0.1)
    monkeypatch.setattr(response.RegistryResponse.read, "__defaults__", (1 << 40,))


def fetch(registry: HostileRegistry, scenario: str, store: Path) -> None:
    reference = Reference.parse(f"{registry.host}/{scenario}:v1")
    pull(reference, ImageLayout(store), ClientOptions(docker_config=store))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("scenario", [*TIME, "dripauth"])
def test_an_endless_answer_ends_as_late(
    scenario: str, registry: HostileRegistry, tmp_path: Path
) -> None:
    late = "does not answer in time|Read timed out"  # the latter: a pause on a busy machine
    reason = "500" if scenario == "driperror" else late
    with pytest.raises(AImageError, match=reason):
        fetch(registry, scenario, tmp_path)
    assert list(ImageLayout(tmp_path).list_tags()) == []


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("scenario", BLOB_TIME)
def test_an_endless_blob_ends(scenario: str, registry: HostileRegistry, tmp_path: Path) -> None:
    with pytest.raises(NetworkError):
        fetch(registry, scenario, tmp_path)


@pytest.mark.usefixtures("hurried")
def test_a_slow_blob_is_given_up_after_a_few_connections(
    registry: HostileRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part arrives in time, and all of them too slowly."""
    monkeypatch.setattr(download, "_WINDOW", 0.0)
    monkeypatch.setattr(download, "_MIN_SPEED", 1 << 40)
    reference = Reference.parse(f"{registry.host}/blobdrip:v1")
    with Repository(reference, ClientOptions(docker_config=Path("/nonexistent"))) as source:
        root = source.resolve(reference)
        layer = Manifest.parse(read_all(source.open(root), root)).layers[0]
        with (
            closing(source.open(layer)) as stream,
            pytest.raises(NetworkError, match="does not answer in time"),
        ):
            while stream.readinto(memoryview(bytearray(1))):
                pass


@pytest.mark.parametrize("scenario", FORM)
def test_a_malformed_answer_is_an_error(
    scenario: str, registry: HostileRegistry, tmp_path: Path
) -> None:
    try:
        fetch(registry, scenario, tmp_path)
    except AImageError:
        assert scenario not in GOOD
    else:
        assert scenario in GOOD
        assert len(list(ImageLayout(tmp_path).list_tags())) == 1


@pytest.mark.parametrize("scenario", ["driphead", "cont", "trailer"])
def test_a_node_does_not_wait_for_a_slow_one(scenario: str, registry: HostileRegistry) -> None:
    client = PeerClient("0" * 32, None, timeouts=PeerTimeouts(0.15, 0.15, 0.15))
    path = f"/v2/{scenario}/manifests/v1"
    with closing(client), pytest.raises(PeerError) as raised:
        found = client._send("GET", f"http://{registry.host}", path, {}, 0.15)
        with closing(PeerReader("x", found, 1 << 20, 0.15)) as reader:
            reader.read()
    assert raised.value.is_late


MADE_BY = {  # the modules that set the class of the responses
    "registry/connection.py": {"urlopen"},
    "registry/connection_pool.py": {"PoolManager"},
    "registry/peer.py": {"PoolManager"},
    "engine/worker_client.py": {"HTTPConnection", "HTTPSConnection"},
}
CALLS = {
    *set().union(*MADE_BY.values()),
    "create_connection",
    "HTTPConnectionPool",
    "requests.Session",
}
CALLS |= {f"requests.{name}" for name in ("get", "post", "put", "patch", "head", "request")}


def test_only_timed_connections_are_opened() -> None:
    """Another way to send a request would have no deadline."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        if not any(name in text for name in CALLS):
            continue
        for node in ast.walk(ast.parse(text)):
            used = [node.func] if isinstance(node, ast.Call) else []
            used += [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
            for name in (
                ast.unparse(one) for one in used if isinstance(one, ast.Attribute | ast.Name)
            ):
                if name in CALLS or name.rpartition(".")[2] in CALLS:
                    found.setdefault(str(path.relative_to(PACKAGE)), set()).add(
                        name.rpartition(".")[2]
                    )
    assert found == MADE_BY
