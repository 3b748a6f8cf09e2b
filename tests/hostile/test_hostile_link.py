"""Links planted in a store: what lies elsewhere is never read as content, and never written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout, LayeredStore
from clowder_aimage.oci import Descriptor, Reference, mediatype
from tests.hostile.hostile_server import serving
from tests.hostile.hostile_world import (
    SECRET,
    World,
    described,
    digest_of,
    entry,
    plant,
    snapshot,
    write_index,
)
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry
from tests.store import copy_store

CONFIG = json.dumps({"schemaVersion": 1, "components": {}}).encode()
LAYER = SECRET  # the hash of what is outside fits
ANNOTATIONS = {mediatype.NAME: "a.json"}
MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": described(CONFIG, mediatype.AIMAGE_CONFIG),
        "layers": [{**described(LAYER, mediatype.AIMAGE_FILE), "annotations": ANNOTATIONS}],
    }
).encode()
PARTS = {"manifest": MANIFEST, "config": CONFIG, "layer": LAYER}
PRIVATE = ("names", "used", "listing", "ingest", "lease", "pins")


def name_of(registry: ScriptedRegistry) -> str:
    return f"{registry.host}/x:v1"


def stored(world: World, *names: str) -> None:
    for data in PARTS.values():
        plant(world.store, data)
    write_index(world.store, *(entry(MANIFEST, name) for name in names))


def make_link(world: World, part: str, target: str) -> Path:
    """Replace a blob by a link: to a file outside with the right content, or to worse."""
    path = plant(world.store, PARTS[part])
    path.unlink()
    outside = world.outside / part
    if target == "same":
        outside.write_bytes(PARTS[part])
    leads_to = {
        "same": outside,
        "absent": world.outside / "absent",
        "directory": world.outside,
        "loop": path,
        "endless": Path("/dev/zero"),
    }[target]
    path.symlink_to(leads_to)
    return path


TARGETS = ["same", "loop", "endless"]


@pytest.mark.parametrize(
    ("part", "target"),
    [*(("layer", target) for target in TARGETS), ("config", "same"), ("manifest", "same")],
)
def test_a_linked_file_is_not_content(world: World, part: str, target: str) -> None:
    """A push would send a file of the user to a registry, and others may change it after a verify.

    The content is missing, and verify reports it.
    """
    with ScriptedRegistry(
        lambda seen: Answer(404 if seen.method != "POST" else 202)
    ).running() as it:
        stored(world, "x:v1", name_of(it))
        path = make_link(world, part, target)
        world.aimage("show", "x:v1", code=0 if part == "layer" else 3)
        world.aimage("push", name_of(it), code=1 if part == "layer" else 3)
        assert all(LAYER not in seen.body for seen in it.seen)
    world.aimage("run", "x:v1", "a prompt", code=3)
    world.aimage("save", "x:v1", "-o", world.home / "x.tar", code=3)
    assert not (world.home / "x.tar").exists()
    for names in ((), ("x:v1",)):
        problems = json.loads(world.aimage("verify", "--json", *names, code=5).out)["problems"]
        wrong = {problem["what"] for problem in problems if problem["kind"] == "missing"}
        assert wrong == {digest_of(PARTS[part])}
    for verb in ("ls", "du", "df"):
        world.aimage(verb)
    world.aimage("gc", "--grace", "0", code=5 if part == "manifest" else 0)
    assert path.is_symlink()
    assert len(list(path.parent.iterdir())) == 3


@pytest.mark.parametrize(
    ("part", "target", "verb"),
    [
        ("layer", "absent", "pull"),
        ("layer", "loop", "verify"),
        ("config", "directory", "pull"),
        ("manifest", "endless", "pull"),
    ],
)
def test_a_fetched_blob_replaces_a_link(world: World, part: str, target: str, verb: str) -> None:
    with ScriptedRegistry(serving(MANIFEST, CONFIG, LAYER)).running() as registry:
        name = name_of(registry)
        stored(world, name)
        path = make_link(world, part, target)
        world.aimage(verb, *(["--repair"] if verb == "verify" else []), name)
    assert path.is_file()
    assert not path.is_symlink()
    assert path.read_bytes() == PARTS[part]
    world.aimage("verify")


def test_the_registry_does_not_serve_links(
    world: World, running_registry: Callable[[Path], Callable[..., tuple[int, bytes]]]
) -> None:
    stored(world, "x:v1")
    path = make_link(world, "layer", "same")
    ask = running_registry(world.store)
    with world.watched():
        for method in ("GET", "HEAD", "DELETE"):
            assert ask(method, f"/v2/x/blobs/{digest_of(LAYER)}")[0] == 404
        status, _ = ask("PUT", "/v2/y/manifests/v1", MANIFEST, mediatype.OCI_MANIFEST)
        assert status == 400
        status, _ = ask("POST", f"/v2/y/blobs/uploads/?digest={digest_of(LAYER)}", LAYER)
        assert status == 201
        assert ask("GET", f"/v2/x/blobs/{digest_of(LAYER)}") == (200, LAYER)
    assert not path.is_symlink()


def test_a_second_store_is_asked_for_a_linked_blob(world: World) -> None:
    """A link in the first store does not keep the second from being asked."""
    stored(world, "x:v1")
    other = world.home / "other"
    copy_store(world.store, other)
    make_link(world, "layer", "same")
    layout = LayeredStore([world.store, other])
    content = Descriptor(mediatype.AIMAGE_FILE, Descriptor.of("", LAYER).digest, len(LAYER))
    assert layout.exists(content)
    with layout.open(content) as file:
        assert file.read() == LAYER


def test_a_link_that_comes_between_the_look_and_the_reading(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(world, "x:v1")
    layout = ImageLayout(world.store)
    content = Descriptor.of(mediatype.AIMAGE_FILE, LAYER)
    locate = ImageLayout.locate

    def path(self: ImageLayout, wanted: Descriptor) -> str:
        found = locate(self, wanted)
        make_link(world, "layer", "same")
        return found

    monkeypatch.setattr(ImageLayout, "locate", path)
    with pytest.raises(NotFoundError), layout.open(content):
        pass


@pytest.mark.parametrize("part", list(PARTS))
def test_a_directory_in_the_place_of_a_blob(world: World, part: Any) -> None:
    stored(world, "x:v1")
    path = plant(world.store, PARTS[part])
    path.unlink()
    path.mkdir()
    world.aimage("show", "x:v1", code=0 if part == "layer" else 3)
    world.aimage("verify", code=5)
    world.aimage("save", "x:v1", "-o", world.home / "x.tar", code=3)
    for verb in ("ls", "du", "df"):
        world.aimage(verb)
    world.aimage("gc", "--grace", "0", code=5 if part == "manifest" else 0)


# -- what an operator may choose


@pytest.mark.parametrize("where", ["blobs/sha256", "."])
def test_blobs_may_lie_on_another_disk(world: World, where: str) -> None:
    disk = world.home.parent / "disk"
    with ScriptedRegistry(serving(MANIFEST, CONFIG, LAYER)).running() as registry:
        name = name_of(registry)
        stored(world, name, "x:v1")
        (world.store / where).rename(disk)
        (world.store / where).symlink_to(disk)
        world.allowed.append(disk)
        for verb in ("show", "verify", "push", "pull"):
            world.aimage(verb, name)
    world.aimage("rm", name)
    world.aimage("rm", "x:v1")
    world.aimage("gc", "--grace", "0")
    assert not [path for path in disk.rglob("*") if len(path.name) == 64 and path.is_file()]


@pytest.mark.parametrize(("name", "dangling"), [("index.json", False), ("oci-layout", True)])
def test_a_linked_layout_file_is_not_written_through(
    world: World, name: str, dangling: bool
) -> None:
    stored(world, "x:v1")
    shelf = world.home.parent / "shelf"
    shelf.mkdir()
    world.allowed.append(shelf)  # it may be read
    path = world.store / name
    path.rename(shelf / name)
    if dangling:
        (shelf / name).unlink()
    path.symlink_to(shelf / name)
    before = snapshot(shelf)
    with ScriptedRegistry(serving(MANIFEST, CONFIG, LAYER)).running() as registry:
        world.aimage("pull", name_of(registry))
        assert name_of(registry) in world.aimage("ls").out
    world.aimage("verify")
    assert snapshot(shelf) == before


def test_an_index_without_an_end_is_not_read_to_it(world: World) -> None:
    stored(world, "x:v1")
    (world.store / "index.json").unlink()
    (world.store / "index.json").symlink_to("/dev/zero")
    world.aimage("ls", code=1)
    world.aimage("gc", code=1)


# -- private files


def everything(world: World, **codes: int) -> None:
    """Run the verbs that read and write private files of the store.

    ``codes`` are the exit codes of verbs other than 0.
    """
    with ScriptedRegistry(serving(MANIFEST, CONFIG, LAYER)).running() as registry:
        name = name_of(registry)
        plant(world.store, LAYER).unlink()
        for arguments in (
            ("ls",),
            ("pull", name),
            ("tag", name, "y"),
            ("show", "y"),
            ("push", name),
            ("pin", "y"),
            ("unpin", "y"),
            ("gc", "--grace", "0"),
            ("gc", "--grace", "0", "--max-age", "1h"),
            ("ls",),
            ("verify",),
            ("rm", name),
            ("df",),
        ):
            world.aimage(*arguments, code=codes.get(arguments[0], 0))


# The pull fails, and the names that it would have set are missing.
NOT_PULLED = {"pull": 1, **dict.fromkeys(("tag", "show", "push", "pin", "unpin", "rm"), 3)}
REFUSED = dict.fromkeys(("ls", "pull", "tag", "show", "push", "pin", "gc", "verify", "rm", "df"), 1)


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        ("names", {**REFUSED, "unpin": 3}),
        ("ingest", {**NOT_PULLED, "gc": 1, "verify": 5, "df": 1}),
        ("lease", {**NOT_PULLED, "gc": 1, "verify": 1}),
    ],
    ids=["names", "ingest", "lease"],
)
def test_a_linked_directory_in_the_private_one_is_left_alone(
    world: World, kind: str, codes: dict[str, int]
) -> None:
    """A collection removes only files in its own directories."""
    stored(world, "x:v1")
    for name in ("letter.txt", "letter", "letter.txt.0123456789abcdef", "old.journal"):
        path = world.outside / name
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))
    (world.store / ".aimage").mkdir()
    (world.store / ".aimage" / kind).symlink_to(world.outside)
    everything(world, **codes)


def test_a_linked_private_directory_is_refused(world: World) -> None:
    stored(world, "x:v1")
    for kind in ("", *PRIVATE):
        (world.outside / kind).mkdir(exist_ok=True)
        for name in ("letter", "letter.txt.0123456789abcdef"):
            (world.outside / kind / name).write_bytes(b"mine")
            os.utime(world.outside / kind / name, (1, 1))
    (world.store / ".aimage").symlink_to(world.outside)
    everything(world, **REFUSED, unpin=1)
    assert "is a link" in world.aimage("gc", code=1).err


@pytest.mark.parametrize(
    ("name", "codes"),
    [("lock", NOT_PULLED), ("gc.lock", {**NOT_PULLED, "gc": 1, "verify": 1})],
    ids=["lock", "gc.lock"],
)
def test_a_linked_lock_is_left_alone(world: World, name: str, codes: dict[str, int]) -> None:
    stored(world, "x:v1")
    (world.store / ".aimage").mkdir()
    (world.store / ".aimage" / name).symlink_to(world.outside / "secret")
    everything(world, **codes)


@pytest.mark.parametrize(
    ("kind", "dangling", "codes"),
    [
        ("used", False, {}),
        ("listing", True, {}),
        ("ingest", True, {**NOT_PULLED, "verify": 5}),
        ("ingest.journal", False, {}),
        ("lease", False, {"gc": 1}),
    ],
    ids=["used", "listing", "ingest", "journal", "lease"],
)
def test_a_linked_private_file_is_left_alone(
    world: World, kind: str, dangling: bool, codes: dict[str, int]
) -> None:
    stored(world, "x:v1")
    victim = world.outside / ("absent" if dangling else "victim")
    if not dangling:
        victim.write_bytes(b"mine")
        os.utime(victim, (1, 1))
    kind, _, suffix = kind.partition(".")
    directory = world.store / ".aimage" / kind
    directory.mkdir(parents=True)
    for data in PARTS.values():
        name = digest_of(data).partition(":")[2] + (suffix and f".{suffix}")
        (directory / name).symlink_to(victim)
    everything(world, **codes)


@pytest.mark.parametrize("kind", ["names", "pins"])
def test_a_linked_record_is_replaced(world: World, kind: str) -> None:
    stored(world, "x:v1")
    world.aimage("tag", "x:v1", "y")
    world.aimage("pin", "y")
    directory = world.store / ".aimage" / kind
    for path in list(directory.iterdir()):
        path.rename(world.outside / path.name)
        path.symlink_to(world.outside / path.name)
    world.aimage("tag", "x:v1", "y")
    world.aimage("pin", "y")
    assert not any(path.is_symlink() for path in directory.iterdir())


@pytest.mark.parametrize(
    ("place", "verb", "code"),
    [
        ("index.json", "ls", 1),
        (".aimage/names/" + "0" * 40, "ls", 0),
        ("blobs/sha256/" + digest_of(LAYER)[7:], "verify", 5),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    world: World, aimage: Callable[..., Aimage], place: str, verb: str, code: int
) -> None:
    stored(world, "x:v1")
    path = world.store / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    process = aimage().start(verb)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code, errors


def test_a_hard_link_in_the_place_of_an_unfinished_download(world: World) -> None:
    """It is the same file as one outside: it is neither written nor made read-only."""
    stored(world)
    victim = world.outside / "victim"
    victim.write_bytes(b"mine")
    directory = world.store / ".aimage" / "ingest"
    directory.mkdir(parents=True)
    for data in PARTS.values():
        os.link(victim, directory / digest_of(data).partition(":")[2])
        plant(world.store, data).unlink()
    before = victim.stat().st_mode, victim.read_bytes()
    with ScriptedRegistry(serving(MANIFEST, CONFIG, LAYER)).running() as registry:
        world.aimage("pull", name_of(registry))
    assert (victim.stat().st_mode, victim.read_bytes()) == before


def test_all_verbs_work_without_links(world: World) -> None:
    stored(world, "x:v1")
    everything(world)
    assert (
        world.layout.resolve(Reference.parse("x:v1")).digest == Descriptor.of("", MANIFEST).digest
    )
