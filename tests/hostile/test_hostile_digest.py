"""Invalid digests at each place for one: they become neither requests nor paths.

The corpus of the parser is in tests/oci/test_oci_digest.py; here is one bad value for each place.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.oci import mediatype
from tests.hostile.hostile_corpus import HEX, TEXTS
from tests.hostile.hostile_server import serving
from tests.hostile.hostile_world import World, described, digest_of, entry, plant, write_index
from tests.scripted import Answer, ScriptedRegistry, Seen

CONFIG, LAYER = b"{}", b"weights"
SUBJECT = {"mediaType": mediatype.OCI_MANIFEST, "digest": f"sha256:{HEX}", "size": 2}
NAME = "local/x:v1"
BAD = TEXTS["climbs"]


def manifest(**fields: Any) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": described(CONFIG, mediatype.AIMAGE_CONFIG),
        "layers": [described(LAYER)],
        **fields,
    }


def index(**fields: Any) -> dict[str, Any]:
    child = json.dumps(manifest()).encode()
    return {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_INDEX,
        "manifests": [described(child, mediatype.OCI_MANIFEST)],
        **fields,
    }


def documents(bad: object) -> dict[str, bytes]:
    """Return a document for each field that may hold a digest, with ``bad`` there."""
    wrong = {**described(LAYER), "digest": bad}
    wrong_child = {**wrong, "mediaType": mediatype.OCI_MANIFEST}
    good_child = index()["manifests"]
    return {
        field: json.dumps(document).encode()
        for field, document in {
            "config": manifest(config={**wrong, "mediaType": mediatype.AIMAGE_CONFIG}),
            "layers": manifest(layers=[described(LAYER), wrong]),
            "subject": manifest(subject={**SUBJECT, "digest": bad}),
            "blobs": {
                **manifest(mediaType="application/vnd.oci.artifact.manifest.v1+json"),
                "blobs": [wrong],
            },
            "manifests": index(manifests=[*good_child, wrong_child]),
            "manifests_only": index(manifests=[wrong_child]),
            "index_subject": index(subject={**SUBJECT, "digest": bad}),
        }.items()
    }


def kind_of(raw: bytes) -> str:
    return str(json.loads(raw)["mediaType"])


def store_with(world: Any, raw: bytes, kind: str = "") -> None:
    """Write the document into the store, as another tool may do."""
    for data in (raw, CONFIG, LAYER, json.dumps(manifest()).encode()):
        plant(world.store, data)
    write_index(world.store, entry(raw, NAME, kind or kind_of(raw)))


def test_a_pull_refuses_a_manifest_with_a_bad_digest(world: World) -> None:
    """Every document is refused before anything else is asked for."""
    found = documents(BAD)

    def script(seen: Seen) -> Answer:
        raw = found[seen.path.rpartition("/")[2]]
        return Answer(200, {"Content-Type": kind_of(raw)}, raw)

    with ScriptedRegistry(script).running() as registry:
        for field in found:
            for options in ((), ("--whole",)):
                registry.seen.clear()
                done = world.aimage("pull", f"{registry.host}/x:{field}", *options, code=5)
                assert "Traceback" not in done.err
                assert [seen.path for seen in registry.seen] == [f"/v2/x/manifests/{field}"]
    assert not (world.store / "index.json").exists()


def test_verbs_refuse_a_stored_manifest_with_a_bad_digest(world: World) -> None:
    for field, raw in documents(BAD).items():
        store_with(world, raw)
        with ScriptedRegistry(lambda _: Answer(500)).running() as registry:
            name = f"{registry.host}/x:v1"
            write_index(world.store, entry(raw, NAME, kind_of(raw)), entry(raw, name, kind_of(raw)))
            world.aimage("push", name, code=5)
            assert registry.seen == [], field
        for verb in ("show", "diff"):
            names = (NAME,) if verb == "show" else (NAME, name)
            world.aimage(verb, *names, code=5)
        world.aimage("tag", NAME, "y", code=5)
        world.aimage("save", NAME, "-o", world.home / "x.tar", code=5)
        if field != "blobs":  # of a kind that nobody knows, it is a blob like others
            world.aimage("verify", code=5)
            world.aimage("verify", NAME, code=5)
        for verb in ("ls", "du", "df"):
            world.aimage(verb)
        world.aimage("gc", "--grace", "0")
        assert NAME in world.aimage("ls").out


def test_an_index_entry_with_a_bad_digest_is_skipped_and_kept(world: World) -> None:
    """It is another tool's: passed over by all but verify, and it stays."""
    good = json.dumps(manifest()).encode()
    store_with(world, good)
    wrong = {**entry(good, "bad/x:v1"), "digest": BAD}
    write_index(world.store, wrong, entry(good, NAME))
    listed = world.aimage("ls").out
    assert NAME in listed
    assert "bad/x" not in listed
    for verb in (("show",), ("rm",), ("save", "-o", world.home / "x.tar")):
        world.aimage(*verb, "bad/x:v1", code=3)
    world.aimage("tag", NAME, "y")
    for words in (("gc", "--grace", "0"), ("du",), ("df",)):
        world.aimage(*words)
    world.aimage("verify", code=5)
    world.aimage("rm", "y")
    assert json.loads((world.store / "index.json").read_bytes())["manifests"][0] == wrong


def test_a_name_record_with_a_bad_digest_is_ignored(world: World) -> None:
    """Records beside the index may have been written by another program."""
    good = json.dumps(manifest()).encode()
    store_with(world, good)
    world.aimage("tag", NAME, "y")
    for path in (world.store / ".aimage" / "names").iterdir():
        record = json.loads(path.read_bytes())
        for elsewhere in (False, True):
            record["entry"]["digest"] = BAD
            path.write_text(json.dumps(record | {"elsewhere": elsewhere}))
            write_index(world.store, entry(good, NAME))
            assert world.aimage("ls").out.count("v1") == 1
            world.aimage("gc", "--grace", "0")
            world.aimage("tag", NAME, "z")
            world.aimage("rm", "z")


def test_a_collection_ignores_a_bad_digest_in_a_lease(world: World) -> None:
    good = json.dumps(manifest()).encode()
    store_with(world, good)
    leases = world.store / ".aimage" / "lease"
    leases.mkdir(parents=True)
    (leases / "a").write_bytes(f"\n{BAD}\n".encode("utf-8", "surrogatepass"))
    world.aimage("gc", "--grace", "0")


def container(**change: Any) -> bytes:
    config: dict[str, Any] = {
        "rootfs": {"type": "layers", "diff_ids": [digest_of(LAYER)]},
        "vnd.clowder.aimage.layers": [{**described(LAYER, mediatype.AIMAGE_FILE), "name": "a"}],
    }
    return json.dumps(config | change).encode()


@pytest.mark.parametrize("where", ["diff_ids", "layers"])
def test_an_image_config_with_a_bad_digest_is_stored_and_not_read(world: World, where: str) -> None:
    """Of a container image, as which an AImage may travel."""
    row = {**described(LAYER, mediatype.AIMAGE_FILE), "name": "a"}
    config = {
        "diff_ids": container(rootfs={"type": "layers", "diff_ids": [BAD]}),
        "layers": container(**{"vnd.clowder.aimage.layers": [{**row, "digest": BAD}]}),
    }[where]
    raw = json.dumps(manifest(config=described(config, mediatype.OCI_CONFIG))).encode()
    with ScriptedRegistry(serving(raw, config, LAYER)).running() as registry:
        name = f"{registry.host}/x:v1"
        world.aimage("pull", name)  # kept as it is: it may be an image of another kind
        assert {seen.path for seen in registry.seen} == {
            "/v2/x/manifests/v1",
            *(f"/v2/x/blobs/{digest_of(data)}" for data in (config, LAYER)),
        }
    world.aimage("show", name, code=5)
    world.aimage("run", name, "a prompt", code=5)
    world.aimage("verify")
    for verb in (("ls",), ("du",), ("gc", "--grace", "0")):
        world.aimage(*verb)
    world.aimage("verify")


def test_referrers_with_a_bad_digest_are_refused(world: World) -> None:
    """From the API, and from the index under a tag."""
    raw = json.dumps(manifest()).encode()
    wrong = {**SUBJECT, "digest": BAD}
    listed = json.dumps({**index(), "manifests": [wrong]}).encode()
    kind = {"Content-Type": mediatype.OCI_INDEX}

    state = {"has_api": True}

    def script(seen: Seen) -> Answer:
        if "/referrers/" in seen.path:
            return Answer(200, kind, listed) if state["has_api"] else Answer(404)
        if seen.path.endswith("/v1"):
            return Answer(200, {"Content-Type": mediatype.OCI_MANIFEST}, raw)
        return Answer(200, kind, listed)

    for state["has_api"] in (True, False):
        with ScriptedRegistry(script).running() as registry:
            world.aimage("referrers", f"{registry.host}/x:v1", code=5)
            allowed = ("/v2/x/manifests/v1", f"/v2/x/referrers/{digest_of(raw)}")
            tag = f"/v2/x/manifests/{digest_of(raw).replace(':', '-')}"
            assert {seen.path for seen in registry.seen} <= {*allowed, tag}


DECLARED = [BAD, TEXTS["other"]]


@pytest.mark.parametrize("bad", DECLARED, ids=["climbs", "other"])
def test_a_wrong_digest_header_fails_a_pull(world: World, bad: str) -> None:
    """It is compared, where it is a digest of a kind that we know, and otherwise means nothing."""
    raw = json.dumps(manifest()).encode()

    def script(seen: Seen) -> Answer:
        answer = serving(raw, CONFIG, LAYER)(seen)
        answer.headers["Docker-Content-Digest"] = bad[:9000]
        return answer

    with ScriptedRegistry(script).running() as registry:
        code = 5 if bad.strip().startswith("sha256:") else 0
        world.aimage("pull", f"{registry.host}/x:v1", code=code)
        assert all(seen.path.count("/") == 4 and ".." not in seen.path for seen in registry.seen)


LOCATIONS = ["../../../outside/secret", "file:///etc/passwd", "http://[::1"]


@pytest.mark.parametrize("where", LOCATIONS, ids=lambda where: where[:30])
def test_an_invalid_upload_location_fails_a_push(world: World, where: str) -> None:
    raw = json.dumps(manifest()).encode()
    store_with(world, raw)

    def script(seen: Seen) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": where})
        return Answer(404 if seen.method in ("HEAD", "GET") else 400)

    with ScriptedRegistry(script).running() as registry:
        write_index(world.store, entry(raw, f"{registry.host}/x:v1"))
        world.aimage("push", f"{registry.host}/x:v1", "--jobs", "1", code=1)


@pytest.mark.parametrize(
    ("of", "where", "code"),
    [
        ("manifests", LOCATIONS[0], 3),  # 404 of the same host
        ("manifests", LOCATIONS[1], 1),
        ("manifests", LOCATIONS[2], 1),
        ("blobs", LOCATIONS[0], 3),
    ],
)
def test_an_invalid_redirect_fails_a_pull(world: World, of: str, where: str, code: int) -> None:
    raw = json.dumps(manifest()).encode()

    def script(seen: Seen) -> Answer:
        if f"/{of}/" in seen.path:
            return Answer(307, {"Location": where})
        return serving(raw, CONFIG, LAYER)(seen)

    with ScriptedRegistry(script).running() as registry:
        world.aimage("pull", f"{registry.host}/x:v1", "--jobs", "1", code=code)
    assert not (world.store / "index.json").exists()


def test_a_bad_digest_on_the_command_line_is_a_usage_error(world: World) -> None:
    with ScriptedRegistry(lambda _: Answer(500)).running() as registry:
        for verb in ("pull", "push", "show", "rm", "referrers"):
            world.aimage(verb, f"{registry.host}/x@{BAD}", code=2)
        assert registry.seen == []


def test_the_registry_refuses_a_manifest_with_a_bad_digest(
    world: World, running_registry: Callable[[Path], Callable[..., tuple[int, bytes]]]
) -> None:
    """A manifest, by HTTP: refused as the specification says, and nothing is kept of it."""
    ask = running_registry(world.store)
    for field, raw in documents(BAD).items():
        with world.watched():
            status, body = ask("PUT", "/v2/x/manifests/v1", raw, kind_of(raw))
        assert (status, json.loads(body)["errors"][0]["code"]) == (400, "MANIFEST_INVALID"), field
    assert not list(world.store.glob("blobs/*/*"))


# -- archives


def archive(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_an_archive_with_a_bad_digest_is_not_loaded(world: World) -> None:
    good = json.dumps(manifest()).encode()
    path = world.home / "x.tar"
    wrong_entry = json.dumps(
        {"schemaVersion": 2, "manifests": [{**entry(good, NAME), "digest": BAD}]}
    ).encode()
    found = documents(BAD)
    blobs = {f"blobs/{digest_of(data).replace(':', '/')}": data for data in (good, CONFIG, LAYER)}
    cases = [(wrong_entry, good)]
    for field, raw in found.items():
        if field != "blobs":
            listed = {"schemaVersion": 2, "manifests": [entry(raw, NAME, kind_of(raw))]}
            cases.append((json.dumps(listed).encode(), raw))
    for listing, raw in cases:
        members = {
            "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
            "index.json": listing,
            f"blobs/{digest_of(raw).replace(':', '/')}": raw,
            **blobs,
        }
        path.write_bytes(archive(**members))
        world.aimage("load", path, code=5)
    assert NAME not in world.aimage("ls").out


# -- names of layers


@pytest.mark.parametrize("dialect", ["clowder", "ollama", "container"])
def test_a_layer_name_that_leaves_the_directory_is_kept_and_not_used(
    world: World, dialect: str, name: str = "../x"
) -> None:
    """It is kept as it came, for it harms nobody; it is no AImage, and cannot be run."""
    annotations = {mediatype.NAME: name, mediatype.MEDIATYPE: mediatype.AIMAGE_FILE}
    row = {**described(LAYER, mediatype.OLLAMA_JSON), "name": name}
    config = (
        CONFIG
        if dialect != "container"
        else container(
            **{"vnd.clowder.aimage.layers": [{**row, "mediaType": mediatype.AIMAGE_FILE}]}
        )
    )
    kind, layer = {
        "clowder": (mediatype.AIMAGE_CONFIG, {**described(LAYER), "annotations": annotations}),
        "ollama": (mediatype.DOCKER_CONFIG, row),
        "container": (mediatype.OCI_CONFIG, {**described(LAYER), "annotations": annotations}),
    }[dialect]
    raw = json.dumps(manifest(config=described(config, kind), layers=[layer])).encode()
    with ScriptedRegistry(serving(raw, config, LAYER)).running() as registry:
        target = f"{registry.host}/x:v1"
        world.aimage("pull", target)
        world.aimage("push", target)
    world.aimage("show", "--layers", target, code=5)
    world.aimage("run", target, "a prompt", code=5)
    world.aimage("diff", target, target)
    world.aimage("verify")


def test_a_title_is_not_used_as_a_file_name(world: World) -> None:
    annotations = {mediatype.TITLE: "../../outside/x"}
    raw = json.dumps(manifest(layers=[{**described(LAYER), "annotations": annotations}])).encode()
    with ScriptedRegistry(serving(raw, CONFIG, LAYER)).running() as registry:
        target = f"{registry.host}/x:v1"
        world.aimage("pull", target)
    world.aimage("diff", target, target)
    world.aimage("save", target, "-o", world.home / "x.tar")
    with tarfile.open(world.home / "x.tar") as tar:
        assert all(n.split("/")[0] in ("blobs", "oci-layout", "index.json") for n in tar.getnames())
