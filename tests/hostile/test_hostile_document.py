"""Documents that are too deep, too large, two things at once, or numbers that are none."""

from __future__ import annotations

import codecs
import gc
import gzip
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.layout.index_file import MAX_INDEX_SIZE
from clowder_aimage.oci import mediatype, parse_document, read_json
from tests.hostile.hostile_corpus import HEX
from tests.hostile.hostile_server import serving
from tests.hostile.hostile_world import World, described, digest_of, entry, plant, write_index
from tests.scripted import Answer, ScriptedRegistry

CONFIG, LAYER = json.dumps({"schemaVersion": 1, "components": {}}).encode(), b"weights"
LAYERS = [{**described(LAYER, mediatype.AIMAGE_FILE), "annotations": {mediatype.NAME: "a.json"}}]
MANIFEST: dict[str, Any] = {
    "schemaVersion": 2,
    "mediaType": mediatype.OCI_MANIFEST,
    "config": described(CONFIG, mediatype.AIMAGE_CONFIG),
    "layers": LAYERS,
}
RAW = json.dumps(MANIFEST).encode()
INDEX = {
    "schemaVersion": 2,
    "mediaType": mediatype.OCI_INDEX,
    "manifests": [described(RAW, mediatype.OCI_MANIFEST)],
}
NAME = "x:v1"


def deep(depth: int, kind: str = "list") -> bytes:
    """Return a valid nested value."""
    start, end = {"list": (b"[", b"]"), "object": (b'{"a":', b"}")}[kind]
    return start * depth + b"1" + end * depth


def with_field(document: dict[str, Any], value: bytes, key: str = "x") -> bytes:
    """Return the document with one more field of that spelling."""
    return json.dumps(document).encode()[:-1] + b',"%s":%s}' % (key.encode(), value)


def in_layer(value: bytes, key: str = "x") -> bytes:
    layer = with_field(LAYERS[0], value, key)
    return with_field(
        {k: v for k, v in MANIFEST.items() if k != "layers"}, b"[%s]" % layer, "layers"
    )


def swapped(raw: bytes, old: bytes, new: bytes) -> bytes:
    assert old in raw
    return raw.replace(old, new, 1)


SIZE = b'"size": %d' % len(LAYER)
NUMBERS = {
    "infinite": b"1e400",
    "minus_infinite": b"-1e400",
    "huge": b"1" + b"0" * 5000,
    "large": b"1" + b"0" * 4000,
    "too_large": b"%d" % (2**63),
    "negative": b"-1",
    "minus_zero_point": b"-0.0",
    "float": b"7.0",
    "exponent": b"7e0",
    "string": b'"7"',
    "true": b"true",
    "null": b"null",
    "nan": b"NaN",
    "infinity": b"Infinity",
    "list": b"[7]",
    "hex": b"0x7",
    "octal": b"07",
    "plus": b"+7",
}
BOTH = {
    "layers": with_field(INDEX, json.dumps(LAYERS).encode(), "layers"),
    "no_layers": with_field(INDEX, b"[]", "layers"),
    "null_layers": with_field(INDEX, b"null", "layers"),
    "config": with_field(INDEX, json.dumps(MANIFEST["config"]).encode(), "config"),
    "manifests": with_field(MANIFEST, b"[]", "manifests"),
    "null_manifests": with_field(MANIFEST, b"null", "manifests"),
    "Layers": with_field(INDEX, json.dumps(LAYERS).encode(), "Layers"),
    "MANIFESTS": with_field(MANIFEST, json.dumps(INDEX["manifests"]).encode(), "MANIFESTS"),
    "long_s": with_field(INDEX, json.dumps(LAYERS).encode(), "layer\\u017f"),
    "mediaType_twice": with_field(MANIFEST, b'"%s"' % mediatype.OCI_INDEX.encode(), "mediaType"),
    "MediaType": with_field(MANIFEST, b'"%s"' % mediatype.OCI_INDEX.encode(), "MediaType"),
    "layers_twice": with_field(MANIFEST, b"[]", "layers"),
    "digest_twice": in_layer(b'"sha256:%s"' % HEX.encode(), "digest"),
    "Digest": in_layer(b'"sha256:%s"' % HEX.encode(), "Digest"),
    "SIZE": in_layer(b"8", "SIZE"),
}
TEXTS = {
    "utf16": json.dumps(MANIFEST).encode("utf-16"),
    "utf16_le": json.dumps(MANIFEST).encode("utf-16-le"),
    "utf32": json.dumps(MANIFEST).encode("utf-32-be"),
    "bom": codecs.BOM_UTF8 + RAW,
    "latin1": with_field(MANIFEST, b'"\xe9"'),
    "surrogate": with_field(MANIFEST, b'"\xed\xa0\x80"'),
    "overlong": with_field(MANIFEST, b'"\xc0\xaf"'),
    "nan": with_field(MANIFEST, b"NaN"),
    "infinity": with_field(MANIFEST, b"-Infinity"),
    "comment": RAW + b"// and more",
    "twice": RAW + RAW,
    "cut": RAW[:-1],
    "gzip": gzip.compress(RAW),
    "nul": RAW + b"\0",
    "control": with_field(MANIFEST, b'"\n"'),
    "deep_list": deep(100_000),
    "deep_object": deep(100_000, "object"),
    "deep_open": b"[" * 100_000,
    "deep_in_a_field": with_field(MANIFEST, deep(100_000)),
    "deep_in_a_layer": in_layer(deep(100_000, "object")),
    "deep_in_annotations": with_field(MANIFEST, b'{"a":%s}' % deep(100_000), "annotations"),
    "deep_index": with_field(INDEX, deep(100_000)),
    **{f"deep_by_{depth}": in_layer(deep(depth)) for depth in (98, 300, 900, 950, 990)},
}
SIZES = {f"size_{name}": swapped(RAW, SIZE, b'"size": ' + text) for name, text in NUMBERS.items()}
DOCUMENTS = {**BOTH, **TEXTS, **SIZES}
DOORS = ["layers", "deep_in_a_layer", "size_infinite"]  # one of each kind for the verbs


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Run no finalizers of objects of earlier tests where the stack is nearly full."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def accepts(raw: bytes, kind: str) -> bool:
    try:
        parse_document(raw, kind)
    except FormatError:
        return False
    return True


def test_parse_document_refuses() -> None:
    for kind in (mediatype.OCI_MANIFEST, "application/json"):
        assert [name for name, raw in DOCUMENTS.items() if accepts(raw, kind)] == []


def answering(raw: bytes, kind: str) -> Any:
    return lambda _: Answer(200, {"Content-Type": kind}, raw)


@pytest.mark.parametrize("raw", [DOCUMENTS[name] for name in DOORS], ids=DOORS)
def test_a_malformed_document_is_refused_by_every_verb(
    world: World, raw: Any, running_registry: Callable[[Path], Callable[..., tuple[int, bytes]]]
) -> None:
    """Pulled, listed, stored, named and pushed: it is refused in words, and harms nobody."""
    for kind in (mediatype.OCI_MANIFEST, "application/json"):
        with ScriptedRegistry(answering(raw, kind)).running() as registry:
            world.aimage("pull", f"{registry.host}/x:v1", code=5)
            world.aimage("referrers", f"{registry.host}/x@sha256:{HEX}", code=5)
            world.aimage("tags", f"{registry.host}/x", code=5)
    ask = running_registry(world.store)
    with world.watched():
        status, body = ask("PUT", "/v2/x/manifests/v1", raw, mediatype.OCI_MANIFEST)
    assert (status, json.loads(body)["errors"][0]["code"]) == (400, "MANIFEST_INVALID")
    for data in (raw, RAW, CONFIG, LAYER):
        plant(world.store, data)
    for kind in (mediatype.OCI_INDEX, mediatype.OCI_MANIFEST):
        write_index(world.store, entry(raw, NAME, kind))
        for verb in (("show", NAME), ("verify",), ("tag", NAME, "y")):
            world.aimage(*verb, code=5)
    world.aimage("save", NAME, "-o", world.home / "x.tar", code=5)
    for arguments in ("ls", "du", "df", "gc --grace 0 --dry-run"):
        world.aimage(*arguments.split())
    world.aimage("run", NAME, "a prompt", code=5)


@pytest.mark.parametrize("kind", [mediatype.OCI_INDEX, mediatype.DOCKER_MANIFEST])
def test_another_content_type_is_refused(world: World, kind: str) -> None:
    with ScriptedRegistry(answering(RAW, kind)).running() as registry:
        world.aimage("pull", f"{registry.host}/x:v1", code=5)
        assert len(registry.seen) == 1


@pytest.mark.parametrize("coding", ["x", "gzip"])
def test_an_answer_of_an_unknown_or_endless_compression_is_refused(
    world: World, coding: str
) -> None:
    def script(seen: Any) -> Answer:
        headers = {"Content-Type": mediatype.OCI_MANIFEST, "Content-Encoding": coding}
        return Answer(200, headers, gzip.compress(bytes(1 << 25)))

    with ScriptedRegistry(script).running() as registry:
        for verb in ("pull", "tags", "referrers"):
            world.aimage(verb, f"{registry.host}/x", code=5)


# -- what is not a document of its own


ODD = {
    "deep": deep(30_000),
    "list": b"[]",
    "null": b"null",
    "bytes": b"\xff\xfe\0",
    "deep_detail": b'{"errors":[{"code":"UNKNOWN","detail":%s}]}' % deep(10_000),
    "deepish_message": b'{"errors":[{"code":"X","message":%s}]}' % deep(880, "object"),
    "expires": b'{"token":"x","expires_in":1e400}',
    "token_line": b'{"token":"x\\r\\nX-Injected: yes"}',
    "token_wide": b'{"token":"\\u0100\\ud800"}',
}
TOKENS = ["deep", "list", "bytes", "expires", "token_line", "token_wide"]


@pytest.mark.parametrize("raw", [ODD[name] for name in TOKENS], ids=TOKENS)
def test_a_malformed_token_is_an_error(world: World, raw: Any) -> None:
    def script(seen: Any) -> Answer:
        if seen.path.startswith("/token"):
            return Answer(200, {"Content-Type": "application/json"}, raw)
        realm = f'Bearer realm="http://{registry.host}/token",service="x",scope="a:b:pull"'
        return Answer(401, {"WWW-Authenticate": realm})

    with ScriptedRegistry(script).running() as registry:
        world.aimage("pull", f"{registry.host}/x:v1", code=4)
        assert not any("X-Injected" in seen.headers for seen in registry.seen)


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("bytes", 400, 1),
        ("deep_detail", 400, 1),
        ("deepish_message", 400, 1),
        ("list", 401, 4),
        ("deep", 404, 3),
    ],
)
def test_a_malformed_body_of_an_error(world: World, name: str, status: int, code: int) -> None:
    raw = ODD.get(name, b"")
    stored = RAW
    for data in (RAW, CONFIG, LAYER):
        plant(world.store, data)
    kind = {"Content-Type": "application/json"}
    with ScriptedRegistry(lambda _: Answer(status, kind, raw)).running() as registry:
        write_index(world.store, entry(stored, f"{registry.host}/x:v1"))
        world.aimage("pull", f"{registry.host}/y:v1", code=code)
        world.aimage("push", f"{registry.host}/x:v1", code=code)


@pytest.mark.parametrize("raw", [ODD["deep"], ODD["null"]], ids=["deep", "null"])
def test_a_malformed_list_of_tags(world: World, raw: bytes) -> None:
    with ScriptedRegistry(answering(raw, "application/json")).running() as registry:
        world.aimage("tags", f"{registry.host}/x", code=5)


@pytest.mark.parametrize(
    ("dialect", "depth"),
    [
        ("clowder", 50),
        ("clowder", 930),
        pytest.param("ollama", 930, marks=pytest.mark.integration),
        pytest.param("container", 100_000, marks=pytest.mark.integration),
    ],
)
def test_a_deep_config(world: World, depth: int, dialect: str) -> None:
    """A config that can just be read may be too deep to be written again."""
    gc.collect()  # of what others left: a finalizer that runs this deep fails
    config = with_field({"schemaVersion": 1, "components": {}}, deep(depth, "object"))
    kind, layers = mediatype.AIMAGE_CONFIG, LAYERS
    if dialect == "container":
        carried = {"vnd.clowder.aimage.config": config.decode(), "rootfs": {"type": "layers"}}
        carried["rootfs"]["diff_ids"] = [digest_of(LAYER)]  # type: ignore[index]
        named = {**described(LAYER, mediatype.AIMAGE_FILE), "name": "a.json"}
        config = json.dumps({**carried, "vnd.clowder.aimage.layers": [named]}).encode()
        kind = mediatype.OCI_CONFIG
    if dialect == "ollama":
        config = json.dumps({"vnd.clowder.aimage.config": config.decode()}).encode()
        kind = mediatype.DOCKER_CONFIG
        layers = [{**described(LAYER, mediatype.OLLAMA_JSON), "name": "a.json"}]
    raw = json.dumps({**MANIFEST, "config": described(config, kind), "layers": layers}).encode()
    with ScriptedRegistry(serving(raw, config, LAYER)).running() as registry:
        name = f"{registry.host}/x:v1"
        world.aimage("pull", name)
        is_refused = depth > 100
        for verb in (("show",), ("show", "--json"), ("diff", "--json", name)):
            world.aimage(*verb, name, code=5 if is_refused else 0)
        world.aimage("run", name, "a prompt", code=5 if is_refused else 1)  # it is not a model
        for dialect_ in ("clowder", "ollama", "container"):
            world.aimage("push", name, "--dialect", dialect_)
        for verb in (("verify",), ("ls",), ("du",), ("df",), ("gc", "--grace", "0")):
            world.aimage(*verb)


# -- index.json


@pytest.mark.parametrize(
    ("where", "depth"),
    [("entry", 50), ("platform", 930), ("top", 100_000)],
)
def test_a_deep_index(world: World, depth: int, where: str) -> None:
    """It can be read and written again, or it is refused."""
    for data in (RAW, CONFIG, LAYER):
        plant(world.store, data)
    good = json.dumps(entry(RAW, NAME)).encode()
    value = deep(depth, "object" if where == "platform" else "list")
    other = json.dumps(entry(RAW, "z")).encode()
    other = {
        "top": other,
        "entry": other[:-1] + b',"x":%s}' % value,
        "annotation": other.replace(b'"annotations": {', b'"annotations": {"x": %s, ' % value),
        "platform": other[:-1] + b',"platform":%s}' % value,
    }[where]
    head = b'"x":%s,' % value if where == "top" else b""
    write_index(world.store)
    raw = b'{"schemaVersion":2,%s"manifests":[%s,%s]}' % (head, other, good)
    (world.store / "index.json").write_bytes(raw)
    os.utime(world.store / "index.json", (1, 1))  # nobody is in the middle of writing it
    code = 1 if depth > 100 else 0
    verbs = (
        "ls --json",
        f"show {NAME}",
        f"tag {NAME} y",
        "rm y",
        "gc --dry-run",
        "du",
        f"verify {NAME}",
    )
    for verb in map(str.split, verbs):
        world.aimage(*verb, code=code)
    listed = {name for name, _ in world.layout.list_tags()} if not code else set()
    assert listed in (set(), {NAME, "z"}, {NAME})
    text = (world.store / "index.json").read_bytes().replace(b" ", b"").replace(b"\n", b"")
    assert value in text


def test_an_index_of_100_megabytes(world: World) -> None:
    """It is refused at once, in words, and not read."""
    write_index(world.store, entry(RAW, NAME))
    with (world.store / "index.json").open("r+b") as file:
        file.truncate(100 * 1024 * 1024)
    verbs: list[tuple[str, ...]] = [("ls",), ("tag", NAME, "y"), ("gc",), ("show", NAME)]
    for verb in verbs:
        tracemalloc.start()
        done = world.aimage(*verb, code=1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert "index.json" in done.err
        assert str(MAX_INDEX_SIZE) in done.err
        assert peak < 16 * 1024 * 1024
    assert (world.store / "index.json").stat().st_size == 100 * 1024 * 1024


@pytest.mark.parametrize("name", ["nan", "huge", "bom"])
def test_an_index_that_is_not_json(world: World, name: str) -> None:
    for data in (RAW, CONFIG, LAYER):
        plant(world.store, data)
    write_index(world.store, entry(RAW, NAME))
    raw = (world.store / "index.json").read_bytes()
    broken = {
        "bom": codecs.BOM_UTF8 + raw,
    }.get(name) or raw[:-1] + b',"x":%s}' % NUMBERS[name]
    (world.store / "index.json").write_bytes(broken)
    os.utime(world.store / "index.json", (1, 1))
    for verb in (("ls",), ("gc", "--dry-run"), ("tag", NAME, "y")):
        world.aimage(*verb, code=1)
    assert (world.store / "index.json").read_bytes() == broken


@pytest.mark.parametrize(("number", "code"), [("infinite", 1), ("negative", 0)])
def test_an_entry_without_a_valid_size(world: World, number: str, code: int) -> None:
    """The entry of another tool is skipped, unless the index is not JSON."""
    for data in (RAW, CONFIG, LAYER):
        plant(world.store, data)
    write_index(world.store, entry(RAW, NAME), entry(RAW, "z"))
    raw = (world.store / "index.json").read_bytes()
    (world.store / "index.json").write_bytes(
        swapped(raw, b'"size": %d' % len(RAW), b'"size":' + NUMBERS[number])
    )
    os.utime(world.store / "index.json", (1, 1))
    assert NAME not in world.aimage("ls", code=code).out
    world.aimage("gc", "--dry-run", code=code)
    world.aimage("verify", code=code or 5)


# -- the values themselves


def test_a_key_that_occurs_twice() -> None:
    with pytest.raises(FormatError, match="duplicate key 'a'"):
        read_json(b'[{"b":{"a":1,"c":2,"a":1}}]', "it")
    assert read_json(b'{"a":{"a":1}}', "it") == {"a": {"a": 1}}


@pytest.mark.parametrize("depth", [1, 100])
def test_nesting_up_to_100_levels_is_read(depth: int) -> None:
    for kind in ("list", "object"):
        assert json.loads(deep(depth, kind)) == read_json(deep(depth, kind), "it")
        with pytest.raises(FormatError, match="more than 100 levels deep"):
            read_json(deep(101, kind), "it")


def test_other_keys_may_differ_in_case() -> None:
    annotations = b'{"a":"1","A":"2","digest":"x","Digest":"y"}'
    document = parse_document(with_field(MANIFEST, annotations, "annotations"))
    assert len(document.annotations) == 4
