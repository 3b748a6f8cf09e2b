"""Remember the dialects that a registry refused, and skip them at the next push."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.config import user_directory
from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.errors import ManifestRefusedError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions, DialectCache
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry

FILE = b"{}"
DAY = 24 * 3600.0
NOW = 20_000 * DAY


def dialect_of(seen: Any) -> str:
    """Return the dialect of a manifest in a request, by its distinguishing fields."""
    if seen.headers["Content-Type"] == mediatype.DOCKER_MANIFEST:
        return "ollama"
    if seen.headers["Content-Type"] == mediatype.AIMAGE_MANIFEST:
        return "custom"
    return "clowder" if "artifactType" in json.loads(seen.body) else "container"


class Picky:
    """A registry that accepts some dialects only, and records those that were offered."""

    host = ""

    def __init__(self, *takes: str) -> None:
        self.takes = set(takes)
        self.offered: list[Any] = []
        self.blobs: set[Any] = set()

    def __call__(self, seen: Any) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload/1"})
        if "/manifests/" in seen.path and seen.method == "PUT":
            self.offered.append(dialect_of(seen))
            return Answer(201 if self.offered[-1] in self.takes else 415)
        if seen.method == "PUT":
            self.blobs.add(seen.path.rpartition("%3A")[2])
            return Answer(201)
        return Answer(200 if seen.path.rpartition(":")[2] in self.blobs else 404)


class Client:
    """A store with one small AImage, and one machine's dialect cache."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.now = NOW
        self.ladder = DialectCache(tmp_path / "state" / "registries.json", lambda: self.now)
        self.layout = ImageLayout(tmp_path / "store")

    def push(
        self,
        picky: Picky,
        dialect_there: Any = "clowder",
        *,
        by_digest: bool = False,
        **options: Any,
    ) -> tuple[list[Any], list[tuple[str, str]]]:
        """Push the AImage; return the dialects offered and the substitutions reported."""
        reference = Reference.parse(f"{picky.host}/team/x:v1")
        layer = Layer(Descriptor.of(mediatype.AIMAGE_FILE, FILE), "model_index.json")
        aimage = AImage(b'{"schemaVersion":1,"components":{}}', (layer,))
        manifest, config = DIALECTS[dialect_there].write(aimage)
        self.layout.push(layer.descriptor, build_bytes_body(FILE))
        self.layout.push(manifest.config, build_bytes_body(config))
        self.layout.push(manifest.descriptor, build_bytes_body(manifest.raw), reference)
        if by_digest:
            reference = reference.with_digest(manifest.digest)
        said = []
        del picky.offered[:]
        push(
            self.layout,
            reference,
            ClientOptions(docker_config=self.tmp_path),
            ladder=self.ladder,
            on_remembered=lambda name, refused: said.append((name, refused)),
            **options,
        )
        return picky.offered, said


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


@pytest.fixture
def picky() -> Iterator[Picky]:
    picky = Picky("container")
    with ScriptedRegistry(picky).running() as registry:
        picky.host = registry.host
        yield picky


def test_the_next_push_begins_with_the_accepted_dialect(client: Client, picky: Picky) -> None:
    assert client.push(picky) == (["clowder", "ollama", "container"], [])
    assert client.push(picky) == (["container"], [("container", "clowder")])
    assert client.push(picky)[0] == ["container"]


def test_the_usual_order_is_restored_after_a_month(client: Client, picky: Picky) -> None:
    client.push(picky)
    client.now += 30 * DAY - 60
    assert client.push(picky)[0] == ["container"]
    client.now += 120
    picky.takes.add("clowder")
    assert client.push(picky) == (["clowder"], [])


def test_a_clock_set_back_discards_the_entry(client: Client, picky: Picky) -> None:
    client.push(picky)
    client.now -= DAY
    assert client.push(picky)[0] == ["clowder", "ollama", "container"]


def test_a_requested_dialect_is_tried(client: Client, picky: Picky) -> None:
    """If it is accepted now, it comes first again."""
    client.push(picky)
    assert client.push(picky, dialect="clowder") == (["clowder", "ollama", "container"], [])
    picky.takes.add("clowder")
    assert client.push(picky, dialect="clowder") == (["clowder"], [])
    assert client.push(picky) == (["clowder"], [])


def test_a_registry_that_refuses_an_accepted_dialect(client: Client, picky: Picky) -> None:
    """The remaining dialects follow, and those refused before come last."""
    picky.takes = {"ollama"}
    client.push(picky)
    picky.takes = {"clowder"}
    assert client.push(picky)[0] == ["ollama", "container", "clowder"]
    assert client.push(picky) == (["clowder"], [])


def test_a_registry_that_refuses_all_dialects_is_removed(client: Client, picky: Picky) -> None:
    client.push(picky)
    picky.takes = set()
    with pytest.raises(ManifestRefusedError, match="415") as caught:
        client.push(picky)
    assert "no other dialect" in (caught.value.hint or "")
    assert client.ladder.list_refused(picky.host) == frozenset()


def test_dialects_that_were_not_refused_are_not_replaced(client: Client, picky: Picky) -> None:
    """Only the custom type was refused: a clowder manifest is pushed unchanged."""
    picky.takes = {"clowder", "ollama", "container"}
    assert client.push(picky, "custom")[0] == ["custom", "clowder"]
    assert client.push(picky, "custom") == (["clowder"], [("clowder", "custom")])
    assert client.push(picky, "clowder") == (["clowder"], [])
    assert client.push(picky, "ollama") == (["ollama"], [])


def test_push_by_digest_or_without_fallback_keeps_the_dialect(client: Client, picky: Picky) -> None:
    client.push(picky)
    for options in ({"by_digest": True}, {"fallback": False}):
        with pytest.raises(ManifestRefusedError):
            client.push(picky, **options)
        assert picky.offered == ["clowder"]
    assert client.push(picky)[0] == ["container"]  # and the cache is unchanged


def test_refusals_are_kept_per_registry(client: Client, picky: Picky) -> None:
    client.push(picky)
    other = Picky("clowder", "container")
    with ScriptedRegistry(other).running() as elsewhere:
        other.host = elsewhere.host
        assert client.push(other) == (["clowder"], [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"registries": []}',
        '{"registries": {"h:1": {"refused": {"clowder": "yesterday"}}}}',
        '{"registries": {"h:1": {"refused": {"clowder": 1%s}}}}' % ("0" * 400),
        '{"registries": {"h:1": {"refused": {"clowder": NaN}}}}',
    ],
)
def test_a_damaged_cache_is_empty(text: str, tmp_path: Path) -> None:
    path = tmp_path / "registries.json"
    path.write_text(text)
    ladder = DialectCache(path, lambda: NOW)
    assert ladder.list_refused("h:1") == frozenset()
    ladder.record("h:1", ["clowder"], "ollama")
    assert ladder.list_refused("h:1") == {"clowder"}
    assert [path.name for path in tmp_path.iterdir()] == ["registries.json"]


def test_an_unknown_dialect_is_ignored(client: Client, picky: Picky) -> None:
    client.ladder.record(picky.host, ["klingon"], "clowder")
    picky.takes.add("clowder")
    assert client.push(picky) == (["clowder"], [])


def test_expired_entries_are_removed(tmp_path: Path) -> None:
    path, clock = tmp_path / "registries.json", [NOW]
    ladder = DialectCache(path, lambda: clock[0])
    ladder.record("old.example.com", ["clowder"], "ollama")
    clock[0] += 31 * DAY
    ladder.record("new.example.com", ["clowder"], "ollama")
    assert list(json.loads(path.read_text())["registries"]) == ["new.example.com"]


def test_an_unwritable_cache_does_not_fail_a_push(client: Client, picky: Picky) -> None:
    (client.tmp_path / "state").write_text("a file where the directory should be")
    assert client.push(picky)[0] == ["clowder", "ollama", "container"]
    assert client.push(picky)[0] == ["clowder", "ollama", "container"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_does_not_fail_a_push(client: Client, picky: Picky) -> None:
    (client.tmp_path / "state").mkdir(mode=0o500)
    assert client.push(picky)[0][-1] == "container"


def test_the_cache_file_is_replaced_atomically(tmp_path: Path) -> None:
    """A concurrent reader sees either the old content or the new."""
    path = tmp_path / "registries.json"
    writer, reader = DialectCache(path, lambda: NOW), DialectCache(path, lambda: NOW)
    writer.record("h:1", ["clowder"], "ollama")
    seen, done = set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(reader.list_refused("h:1"))

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(200):
        writer.record(f"h:{i + 2}", ["clowder"], "ollama")
    done.set()
    thread.join()
    assert seen == {frozenset({"clowder"})}


@pytest.mark.integration
def test_the_second_push_skips_the_refused_dialect(
    aimage: Callable[..., Aimage], tiny: Path, repository: str
) -> None:
    """docker-registry refuses the custom type; the second push does not offer it again."""
    here, name = aimage(), f"{repository}:v1"
    here("create", name, tiny, "--whole-files", "--manifest-type", "custom")
    first = here("push", name)
    assert "rejected this type of manifest" in first.err
    second = here("push", name)
    assert "refuses" not in second.err
    assert "rejected the custom dialect recently; starting with the clowder dialect" in second.err
    assert second.out == first.out
    third = here("push", name, "--manifest-type", "custom")
    assert "rejected this type of manifest" in third.err
    state = here.home / "state" / "aimage" / "registries.json"
    assert list(json.loads(state.read_text())["registries"]) == [name.partition("/")[0]]


@pytest.mark.parametrize(
    ("platform", "named", "place"),
    [
        ("linux", "{}/state", "state/aimage/registries.json"),
        ("linux", "", ".local/state/aimage/registries.json"),
        ("linux", "relative", ".local/state/aimage/registries.json"),  # per the XDG specification
        ("darwin", "{}/state", "Library/Application Support/aimage-state/registries.json"),
    ],
)
def test_the_cache_is_in_the_state_directory(
    platform: str, named: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never in the store, which is a layout that other tools read."""
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", named.format(tmp_path))
    monkeypatch.delenv("AIMAGE_STORE", raising=False)
    user_directory.open_dialect_cache().record("h:1", ["clowder"], "ollama")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")] == [place]
    assert not user_directory.list_default_stores()[0].exists()
