"""The doors by which content comes in, is used and goes out, and the table of all of them.

A door is tried in a world, by a client: it returns what came of it. The table names every verb and
every route, with the doors that try it, or why it gives out no content of a model.
"""

from __future__ import annotations

import contextlib
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.content.gate import unchecked
from clowder_aimage.distribution.upstream import UpstreamRegistry
from clowder_aimage.engine.model_fetch import find
from clowder_aimage.engine.variant import find_variant
from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import lease_manifest, read_aimage, read_stored
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from tests.node.nodes import TOKEN, Node
from tests.process import Aimage
from tests.registry_app import RegistryThread
from tests.trust.world import REGISTRY, STORE, Outcome, World

Try = Callable[[World, Aimage], Outcome]


@dataclass(frozen=True)
class Door:
    """A way to the content of a model, which it reads from a registry or from a store.

    ``reaches`` is in the text of a door that has passed the policy, and fails afterwards, because
    the model of these tests has one tensor of each network, and cannot be run.
    """

    name: str
    attempt: Try
    reads: str
    reaches: str = ""
    is_local: bool = False
    # It begins with the store of another machine, or with a damaged one
    is_elsewhere: bool = False

    def passes(self, outcome: Outcome) -> bool:
        if self.reaches:
            return self.reaches in outcome.text
        return outcome.code in (0, -200, -206)


def _verb(*words: str, lora: bool = False) -> Try:
    """Return the attempt of a verb. Its words in capitals are names of the world."""

    def attempt(world: World, here: Aimage) -> Outcome:
        known = {
            "NAME": world.name,
            "oci://NAME": f"oci://{world.name}",
            "MODEL": str(world.model),
            "ADAPTER": str(world.adapter),
            "PICTURE": str(world.picture),
            "OTHER": f"{world.registry.host}/elsewhere/{world.label}:v1",
            "DIGEST": f"{world.repository}@{world.subject.digest}",
            "BLOB": f"{world.repository}@{world.manifest.config.digest}",
            "LAYER": f"{world.name}@{world.layers[-1].digest}",
        }
        done = here.attempt(*(known.get(word, word) for word in words))
        return Outcome(done.code, done.out + done.err)

    return attempt


def _call(call: Callable[[World, ImageLayout], object]) -> Try:
    """Return the attempt of a function in a server of the policy, on a store."""

    def attempt(world: World, here: Aimage) -> Outcome:
        world.use_policy()
        try:
            call(world, ImageLayout(here.store))
        except AImageError as error:
            return Outcome(error.exit_code, error.message)
        return Outcome(0, "")

    return attempt


def _lease(world: World, store: ImageLayout) -> None:
    with store.lease() as lease:
        lease_manifest(store, Reference.parse(world.name), lease)


def _find_variant(world: World, _: ImageLayout) -> None:
    connection = ClientOptions(docker_config=world.home)
    find_variant(Reference.parse(world.name), connection, "int8")


def fetch(url: str, method: str = "GET", **headers: str) -> Outcome:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return Outcome(-answer.status, "", answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Outcome(-error.code, error.read().decode())


@contextlib.contextmanager
def serve_registry(world: World, root: Path, *, has_upstream: bool = False) -> Iterator[str]:
    """Serve a store, or a cache in it; yield the address of the model's repository."""
    world.use_policy()
    upstream = None
    if has_upstream:
        connection = ClientOptions(docker_config=root.parent)
        upstream = UpstreamRegistry.parse(world.registry.host, connection)
    server = RegistryThread(ImageLayout(root), upstream)
    try:
        yield f"http://{server.host}/v2/{world.path}"
    finally:
        server.close()


def _registry(path: str, method: str = "GET") -> Try:
    """Return the attempt of a route of ``registry serve``."""

    def attempt(world: World, here: Aimage) -> Outcome:
        with serve_registry(world, here.store) as base:
            return fetch(f"{base}/{place(world, path)}", method)

    return attempt


def _cache(*paths: str) -> Try:
    """Return the attempt of routes of a pull-through cache, one after another."""

    def attempt(world: World, here: Aimage) -> Outcome:
        with serve_registry(world, here.store, has_upstream=True) as base:
            outcomes = [fetch(f"{base}/{place(world, path)}") for path in paths]
            refused = [outcome for outcome in outcomes if outcome.is_refused]
            # One that opens is not hidden by another that does not
            return outcomes[0] if len(refused) == len(paths) else outcomes[-1]

    return attempt


def place(world: World, path: str) -> str:
    digests = {"DIGEST": world.subject, "CONFIG": world.manifest.config, "LAYER": world.layers[-1]}
    for word, content in digests.items():
        path = path.replace(word, str(content.digest))
    return path


def _node(path: str, **headers: str) -> Try:
    """Return the attempt of another node, at a node with the model."""

    def attempt(world: World, here: Aimage) -> Outcome:
        world.use_policy()
        node = Node(here.store).start()
        try:
            url = f"http://{node.address}/v2/{world.path}/{place(world, path)}"
            url += f"?ns={world.registry.host}&size={world.layers[-1].size}"
            return fetch(url, Authorization=f"Bearer {TOKEN}", **headers)
        finally:
            node.stop()

    return attempt


def _pull_as_node(world: World, here: Aimage) -> Outcome:
    """Pull with other nodes before the registry."""
    world.use_policy()
    node = Node(here.store).start()
    try:
        node.pull(Reference.parse(world.name))
    except AImageError as error:
        return Outcome(error.exit_code, error.message)
    finally:
        node.stop()
    return Outcome(0, "")


def _load(*options: str) -> Try:
    """Return the attempt to load an archive that another machine has saved, into an empty store."""

    def attempt(world: World, here: Aimage) -> Outcome:
        archive = here.home / "model.tar"
        if not archive.exists():
            with unchecked():
                saved = here.attempt("save", world.name, "-o", archive, "-q")
            if saved.code:
                return Outcome(saved.code, saved.err)
            shutil.rmtree(here.store)
        done = here.attempt("load", archive, *options)
        return Outcome(done.code, done.out + done.err)

    return attempt


def _repair(world: World, here: Aimage) -> Outcome:
    """Let a layer be missing, which is fetched again."""
    layer = here.store / "blobs/sha256" / world.layers[-1].digest.encoded
    layer.unlink(missing_ok=True)
    done = here.attempt("verify", "--repair", world.name)
    return Outcome(0 if layer.exists() else done.code, done.out + done.err)


# Of a request for the first bytes of a range
_OF_A_NODE = {"Range": "bytes=0-0", "Aimage-Node": "9" * 32}
_NO_RUN = "missing tensors"
_CHILD = ("run", "base", "a", "picture", "--local", "--steps", "1")

DOORS = [
    # From a registry
    *(
        Door(" ".join(words), _verb(*words), REGISTRY)
        for words in (
            ("pull", "NAME"),
            ("pull", "DIGEST"),
            ("pull", "NAME", "--dry-run"),
            ("copy", "NAME", "OTHER"),
            ("copy", "-r", "DIGEST", "OTHER"),
            ("show", "NAME", "--remote"),
            ("bom", "NAME", "--remote"),
            ("bom", "NAME", "--attach"),
            ("diff", "NAME", "NAME", "--remote"),
            ("manifest", "fetch", "NAME"),
            ("manifest", "fetch", "DIGEST"),
            ("manifest", "fetch", "--config", "NAME"),
            ("tag", "--remote", "NAME", "moved"),
        )
    ),
    Door(
        "attach --get",
        _verb("attach", "DIGEST", "--get", "-o", "out"),
        REGISTRY,
        "no files with names",
    ),
    Door("blob fetch", _verb("blob", "fetch", "LAYER", "-o", "out"), REGISTRY),
    Door("run, which pulls", _verb("run", "NAME", "a", "picture"), REGISTRY, _NO_RUN),
    Door("embed, which pulls", _verb("embed", "NAME", "text"), REGISTRY, "is not a language model"),
    Door("picture of a run", _verb(*_CHILD, "--image", "oci://NAME"), REGISTRY, "no picture"),
    Door("replay", _verb("replay", "oci://NAME"), REGISTRY, "no picture"),
    Door("first variant", _call(_find_variant), REGISTRY),
    Door("cache, manifest", _cache("manifests/v1"), REGISTRY),
    Door("cache, manifest by digest", _cache("manifests/DIGEST"), REGISTRY),
    Door("cache, blob", _cache("manifests/v1", "blobs/LAYER"), REGISTRY),
    Door("node, pull", _pull_as_node, REGISTRY),
    # From a store
    *(
        Door(" ".join(words), _verb(*words), STORE)
        for words in (
            ("export", "NAME", "out"),
            ("save", "NAME", "-o", "out.tar"),
            ("convert", "NAME", "out-converted", "--dtype", "f16"),
            ("show", "NAME"),
            ("bom", "NAME"),
            ("diff", "NAME", "base"),
            ("validate", "NAME"),
        )
    ),
    Door("run", _verb("run", "NAME", "a", "picture"), STORE, _NO_RUN),
    Door("embed", _verb("embed", "NAME", "text"), STORE, "is not a language model"),
    Door("adapter of a run", _verb(*_CHILD, "--lora", "NAME"), STORE, "is not an adapter"),
    Door(
        "control network of a run",
        _verb(*_CHILD, "--controlnet", "NAME", "--control", "PICTURE"),
        STORE,
        "is not a ControlNet",
    ),
    Door(
        "enhancer of a run",
        _verb(*_CHILD, "--enhance", "--enhancer", "NAME"),
        STORE,
        "is not a language model",
    ),
    Door(
        "create --like",
        _verb("create", "out-like", "MODEL", "--like", "NAME"),
        STORE,
        "another layout",
    ),
    Door(
        "create --base",
        _verb("create", "out-adapter", "ADAPTER", "--base", "NAME"),
        STORE,
        "does not match",
    ),
    Door(
        "create --from",
        _verb("create", "out-from", "--from", "NAME", "--lora", "NAME"),
        STORE,
        "is not an adapter",
    ),
    Door(
        "create --enhancer",
        _verb("create", "out-enhancer", "--from", "NAME", "--enhancer"),
        STORE,
        "has no text encoder",
    ),
    Door("verify --repair", _repair, STORE, is_elsewhere=True),
    Door("load", _load(), STORE, is_elsewhere=True),
    Door("load --as", _load("--as", "out-loaded"), STORE, is_elsewhere=True),
    Door("find", _call(lambda world, store: find(store, Reference.parse(world.name))), STORE),
    Door(
        "read", _call(lambda world, store: read_aimage(store, Reference.parse(world.name))), STORE
    ),
    Door("read by digest", _call(lambda world, store: read_stored(store, world.subject)), STORE),
    Door("lease", _call(_lease), STORE),
    Door("node, manifest", _node("manifests/v1"), STORE),
    Door("node, manifest by digest", _node("manifests/DIGEST"), STORE),
    Door("node, blob", _node("blobs/LAYER"), STORE),
    Door("node, range", _node("blobs/LAYER", **_OF_A_NODE), STORE),
    Door("registry, manifest", _registry("manifests/v1"), STORE, is_local=True),
    Door("registry, manifest by digest", _registry("manifests/DIGEST"), STORE, is_local=True),
    Door("registry, head", _registry("manifests/v1", "HEAD"), STORE, is_local=True),
    Door("registry, blob", _registry("blobs/LAYER"), STORE, is_local=True),
    Door("registry, config", _registry("blobs/CONFIG"), STORE, is_local=True),
]
