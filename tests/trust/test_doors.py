"""Every door against every trap: what is not signed as the policy demands does not pass.

The doors are those of all verbs and all routes: a new one has to be in their tables.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
import pytest

from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.cli.console.option import UNCHECKED
from clowder_aimage.cli.main import cli
from clowder_aimage.content.gate import GATES
from clowder_aimage.http.route import Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.daemon import Daemon
from clowder_aimage.registry import ClientOptions
from clowder_aimage.trust import collection
from tests.api_listing import gateway_routes, worker_routes
from tests.cli.every_verb import iter_commands
from tests.node.node_run import _settings as read_node_settings
from tests.process import Aimage
from tests.registry_app import registry_app
from tests.scripted import skip_waiting
from tests.trust.door_table import (
    NODE_ROUTES,
    REGISTRY_ROUTES,
    VERBS,
    WORKER,
    WORKER_TRIED,
    Tried,
    Without,
)
from tests.trust.doors import DOORS, Door, fetch, place, serve_registry
from tests.trust.key_files import write_key
from tests.trust.memory_registry import Content, MemoryRegistry
from tests.trust.traps import TRAPS, Trap, nothing
from tests.trust.worker_doors import ROUTES
from tests.trust.world import REGISTRY, STORE, Outcome, World
from tests.wait import until
from tests.worker.conftest import LocalWorker

# The expression of a parameter in a path
_PARAMETER = re.compile(r":[^}]*\}")
MakeWorld = Callable[[str], World]
FROM_REGISTRY = [door for door in DOORS if door.reads == REGISTRY]
# Tried again when a trap is mended
_FEW = ("pull NAME", "manifest fetch DIGEST", "cache, blob", "export NAME out", "find")
# Tried with each door in the fast ring
_REPRESENTATIVE = ("unsigned", "dressed as a bundle", "renamed")


@pytest.fixture(scope="module")
def memory_registry() -> Iterator[MemoryRegistry]:
    registry = MemoryRegistry()
    with registry.running():
        yield registry


@pytest.fixture
def make_world(
    memory_registry: MemoryRegistry,
    small_store: Path,
    tmp_path: Path,
    without_machine_policy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeWorld]:
    skip_waiting(monkeypatch)
    # A trap may change it
    monkeypatch.setattr(collection.run_bounded, "__defaults__", (collection.DEADLINE,))

    def make(label: str) -> World:
        name = re.sub(r"[^a-z0-9]+", "-", label.lower())
        store = ImageLayout(small_store)
        return World(memory_registry, store, tmp_path, without_machine_policy, name)

    yield make
    memory_registry.reset()


def start(world: World, door: Door, trap: Trap | None = None) -> Aimage:
    """Return a client for a door: with an empty store, or with the model."""
    if door.reads != STORE:
        return world.start()
    world.close_name()
    world.locate(is_local=door.is_local)
    here = world.start(has_model=True)
    if trap is not None:
        trap.arrange(world, here)
    return here


def attempt(world: World, door: Door, here: Aimage) -> Outcome:
    """Try a door in a process of its own: nothing has been accepted in it before."""
    world.locate(is_local=door.is_local)
    GATES.clear()
    return door.attempt(world, here)


# The tables


def test_each_verb_is_in_the_table_of_doors() -> None:
    verbs = {" ".join(words) for words, _ in iter_commands(cli, click.Context(cli))}
    assert len(verbs) > 50
    assert verbs == set(VERBS)
    # The product leaves these verbs unasked.
    assert {verb for verb in UNCHECKED if not isinstance(VERBS[verb], Without)} == set()


def test_each_route_is_in_the_table_of_doors(tmp_path: Path) -> None:
    worker = {*WORKER, *WORKER_TRIED}
    assert list_routes(worker_routes()) | list_routes(gateway_routes()) == worker
    registry = registry_app(ImageLayout(tmp_path / "registry"))
    served = {
        f"{route.method} {route.resource.canonical}"
        for route in registry.router.routes()
        if route.resource is not None
    }
    assert served == set(REGISTRY_ROUTES)
    node = list_routes(node_routes(tmp_path))
    assert node - worker == set(NODE_ROUTES)


def list_routes(routes: Iterable[Route]) -> set[str]:
    return {f"{route.method} {_PARAMETER.sub('}', route.path)}" for route in routes}


def node_routes(directory: Path) -> list[Route]:
    settings = read_node_settings()
    service = make_service(settings, ImageLayout(directory / "node"), ClientOptions())
    worker = WorkerRole(service, makes_pictures=False)
    return [*Daemon(service, settings, {}).build_routes(), *worker.build_routes()]


def test_each_door_is_tried() -> None:
    tables = (VERBS, WORKER, REGISTRY_ROUTES, NODE_ROUTES)
    named = {name for table in tables for tried in table.values() for name in list_doors(tried)}
    own = {door.name for door in DOORS} | {route.route for route in ROUTES}
    assert named | set(WORKER_TRIED) == own
    assert len(own) == len(DOORS) + len({route.route for route in ROUTES})


def list_doors(tried: Tried) -> tuple[str, ...]:
    return () if isinstance(tried, Without) else tried


# The doors


@pytest.mark.parametrize("name", _REPRESENTATIVE)
def test_no_door_is_opened_by(name: str, make_world: MakeWorld) -> None:
    (trap,) = (trap for trap in TRAPS if trap.name == name)
    try_doors(trap, make_world(name))


@pytest.mark.integration
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name.replace(" ", "-"))
def test_no_door_at_all_is_opened_by(trap: Trap, make_world: MakeWorld) -> None:
    try_doors(trap, make_world(trap.name))


def try_doors(trap: Trap, world: World) -> None:
    """Fail the test unless doors are closed for a trap, and open once it is mended."""
    world.enforce()
    trap.prepare(world)
    world.has_signatures = not trap.is_remote
    open_doors = list[tuple[str, Outcome]]()
    # A refusal leaves nothing behind, so that doors share what they may read.
    clients = dict[tuple[str, bool], Aimage]()
    for door in DOORS:
        if door.reads not in trap.at or (door.is_elsewhere and trap.arrange is not nothing):
            continue
        key = door.reads, door.is_local
        here = (None if door.is_elsewhere else clients.get(key)) or start(world, door, trap)
        before = world.look(here)
        world.registry.seen.clear()
        outcome = attempt(world, door, here)
        is_closed = trap.refuses(outcome) and before.includes(world.look(here))
        if door.name == "pull NAME":
            assert trap.says in outcome.text
        # Nor was anything of it fetched.
        is_closed = is_closed and not world.list_fetched()
        if not door.is_elsewhere:
            clients[key] = here
        if not is_closed:
            open_doors.append((door.name, outcome))
    assert not open_doors
    if trap.mend is None:
        return
    world.close_name()
    world.locate(is_local=False)
    world.has_signatures = True
    trap.mend(world)
    for door in DOORS:
        if door.name in _FEW and door.reads in trap.at:
            outcome = attempt(world, door, start(world, door, trap))
            assert door.passes(outcome), (door.name, outcome)


@pytest.mark.integration
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name.replace(" ", "-"))
def test_a_door_opens_for_what_is_signed(door: Door, make_world: MakeWorld) -> None:
    """It is closed again when the policy names another key, also to what came in before."""
    world = make_world(door.name)
    world.enforce()
    world.attach(world.sign())
    here = start(world, door)
    outcome = attempt(world, door, here)
    assert door.passes(outcome), outcome
    world.enforce(keys=[str(write_key(world.policy.parent, "other")[1])])
    again = start(world, door) if door.is_elsewhere else here
    outcome = attempt(world, door, again)
    assert outcome.is_refused, outcome


# Routes of a worker

_WORKER_TRAPS = ("unsigned", "key of another repository", "used before", "policy that is malformed")


@pytest.mark.parametrize("name", _WORKER_TRAPS)
def test_no_route_of_a_worker_is_opened_by(name: str, make_world: MakeWorld) -> None:
    (trap,) = (trap for trap in TRAPS if trap.name == name)
    world = make_world(f"worker {name}")
    full, empty = world.start(has_model=True), world.start()
    world.enforce()
    trap.arrange(world, full)
    trap.prepare(world)
    open_routes = list[tuple[str, Outcome]]()
    for here in (full, empty):
        before = world.look(here)
        with serving(world, here) as worker:
            for route in ROUTES:
                if route.pulls == (here is empty):
                    outcome = route.attempt(world, worker)
                    if not trap.refuses(outcome):
                        open_routes.append((route.route, outcome))
        # A copy has another name, by which it is refused, too.
        named = world.look(here).names - before.names - {"open/copied:v1"}
        assert not named
    assert not open_routes


def test_the_routes_of_a_worker_open_for_what_is_signed(make_world: MakeWorld) -> None:
    """Models that were refused before are described and listed once they are signed."""
    world = make_world("worker")
    world.enforce()
    full, empty = world.start(has_model=True), world.start()
    with serving(world, full) as worker, serving(world, empty) as pulling:
        for is_signed in (False, True):
            if is_signed:
                world.attach(world.sign())
            for route in ROUTES:
                outcome = route.attempt(world, pulling if route.pulls else worker)
                is_right = route.passes(outcome) if is_signed else outcome.is_refused
                assert is_right, (is_signed, route.route, outcome)
        world.enforce(keys=[str(write_key(world.policy.parent, "other")[1])])
        for route in ROUTES:
            outcome = route.attempt(world, pulling if route.pulls else worker)
            assert outcome.is_refused, (route.route, outcome)


@contextlib.contextmanager
def serving(world: World, here: Aimage) -> Iterator[LocalWorker]:
    world.use_policy()
    worker = LocalWorker(here)
    try:
        yield worker
    finally:
        worker.end()


# What changes while something runs


@pytest.mark.integration
@pytest.mark.parametrize("door", FROM_REGISTRY, ids=lambda door: door.name.replace(" ", "-"))
def test_a_tag_that_moves_brings_what_was_decided_about(door: Door, make_world: MakeWorld) -> None:
    """The manifest that is fetched is the one whose signature was seen, whatever the tag means."""
    world = make_world(f"moved {door.name}")
    world.enforce()
    world.attach(world.sign())
    other = world.add_unsigned()
    signed, unsigned = str(world.root.digest), str(other.digest)
    # The first request of the tag has the signed manifest, or the other one.
    for moves in ([signed, unsigned], [unsigned, signed]):
        world.registry.moves = [*moves]
        here = start(world, door)
        outcome = attempt(world, door, here)
        assert moves[0] == signed or outcome.is_refused or "NAME" not in door.name
        assert not (here.store / "blobs/sha256" / other.digest.encoded).exists()
        assert unsigned.encode() not in outcome.data
        copied = world.registry.repositories[f"elsewhere/{world.label}"]
        assert unsigned not in copied.documents


@pytest.mark.parametrize("kind", ["registry", "cache"])
def test_a_server_asks_again_for_what_it_has_served(kind: str, make_world: MakeWorld) -> None:
    """A policy that appears while it runs holds for what is in its memory, too."""
    world = make_world(kind)
    world.locate(is_local=kind == "registry")
    here = world.start(has_model=kind == "registry")
    paths = ("manifests/v1", "manifests/DIGEST", "blobs/CONFIG", "blobs/LAYER")
    with serve_registry(world, here.store, has_upstream=kind == "cache") as base:

        def fetch_all() -> set[int]:
            return {fetch(f"{base}/{place(world, path)}").code for path in paths}

        assert fetch_all() == {-200}
        world.enforce()
        assert fetch_all() == {-403}
        world.attach(world.sign())
        if kind == "registry":
            world.content.fill(ImageLayout(here.store), world.name)
        assert fetch_all() == {-200}


def test_a_cache_gives_out_no_blob_that_it_is_fetching(make_world: MakeWorld) -> None:
    """It began to fetch it before the policy held."""
    world = make_world("fetching")
    here, layer = world.start(), world.layers[-1].digest
    with serve_registry(world, here.store, has_upstream=True) as base:
        assert fetch(f"{base}/manifests/v1").code == -200
        world.registry.stalls.add(str(layer))
        first = threading.Thread(target=fetch, args=(f"{base}/blobs/{layer}",))
        first.start()
        until(world.list_fetched)
        world.enforce()
        assert fetch(f"{base}/blobs/{layer}").code == -403
        world.registry.stalls.clear()
        world.registry.release()
        first.join()


def test_no_weight_is_fetched_before_the_decision(make_world: MakeWorld) -> None:
    """Also not by a run, which loads the model while it arrives."""
    world = make_world("arriving")
    world.enforce()
    world.attach(world.sign())
    for words in (("pull", world.name), ("run", world.name, "a", "picture")):
        world.registry.seen.clear()
        world.start().attempt(*words)
        order = [seen.path for seen in world.registry.seen]
        decided = next(i for i, path in enumerate(order) if "/referrers/" in path)
        layers = {str(child.digest) for child in world.manifest.children}
        fetched = [i for i, path in enumerate(order) if path.rpartition("/")[2] in layers]
        assert fetched and min(fetched) > decided


def test_a_mirror_that_withholds_a_signature_opens_no_door(
    make_world: MakeWorld,
) -> None:
    """It is asked first, for tags too, and its registry has no signature either."""
    world = make_world("mirrored")
    mirror = MemoryRegistry()
    mirror.repositories[world.path] = world.content
    world.registry.repositories[world.path] = Content()
    words = ("pull", world.name)
    with mirror.running():
        world.enforce()
        here = world.start()
        config = here.home / "config" / "aimage" / "config.json"
        config.parent.mkdir(parents=True)
        settings = {"mirrors": [mirror.host], "trustTags": True}
        config.write_text(json.dumps({"registries": {world.registry.host: settings}}))
        GATES.clear()
        assert here.attempt(*words).code == 5
        assert not world.look(here).names
        # Signatures are those that the registry lists.
        world.attach(world.sign())
        world.registry.repositories[world.path] = world.content
        GATES.clear()
        done = here.attempt(*words)
        assert done.code == 0, done
