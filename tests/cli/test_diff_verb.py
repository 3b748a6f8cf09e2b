"""``aimage diff``: compare manifests and configs without reading weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.oci.manifest import encode
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.scripted import Answer, ScriptedRegistry

TITLE = "org.opencontainers.image.title"


def tensor(
    name: str, data: bytes = b"", dtype: str = "BF16", shape: tuple[int, ...] = (4,)
) -> tuple[Layer, bytes]:
    found = Descriptor.of(mediatype.AIMAGE_SAFETENSORS, data or name.encode())
    return Layer(found, name, dtype, shape), data or name.encode()


def file(name: str, data: bytes) -> tuple[Layer, bytes]:
    return Layer(Descriptor.of(mediatype.AIMAGE_FILE, data), name), data


def put(store: Path, data: bytes, media_type: str) -> Descriptor:
    content = Descriptor.of(media_type, data)
    ImageLayout(store).push(content, build_bytes_body(data))
    return content


def name(store: Path, raw: bytes, media_type: str, called: str) -> Descriptor:
    content = put(store, raw, media_type)
    ImageLayout(store).tag(content, Reference.parse(called))
    return content


def make(
    store: Any, called: str, *layers: tuple[Layer, bytes], dialect: str = "clowder", **config: Any
) -> str:
    """Store an AImage of those layers; return its digest."""
    for layer, data in layers:
        put(store, data, layer.descriptor.media_type)
    aimage = AImage(encode({"schemaVersion": 1} | config), tuple(layer for layer, _ in layers))
    manifest, raw = DIALECTS[dialect].write(aimage)
    put(store, raw, manifest.config.media_type)
    return str(name(store, manifest.raw, manifest.media_type, called).digest)


def artifact(
    store: Path, called: str, config: bytes, *layers: tuple[str | None, bytes], **fields: Any
) -> Descriptor:
    """Store an artifact of another kind."""
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": put(store, config, "application/vnd.example.config").to_json(),
        "layers": [
            put(store, data, "application/vnd.example").to_json()
            | ({"annotations": {TITLE: title}} if title else {})
            for title, data in layers
        ],
    }
    return name(store, encode(document | fields), mediatype.OCI_MANIFEST, called)


@pytest.fixture
def here(aimage: Callable[..., Aimage]) -> Aimage:
    return aimage()


@pytest.fixture
def pair(here: Aimage) -> Aimage:
    """Return a store with two AImages that differ in every kind of entry."""
    same = [tensor(f"vae/same{number}") for number in range(3)]
    make(
        here.store,
        "a",
        *same,
        tensor("vae/quantized", b"x" * 100),
        tensor("vae/retrained", b"y" * 100),
        tensor("vae/old", b"z" * 60),
        file("vae/config.json", b"{}"),
        file("README", b"words"),
        license="apache-2.0",
        components={"vae": {"tensors": 6, "dtype": "BF16"}},
    )
    make(
        here.store,
        "b",
        *same,
        tensor("vae/quantized", b"x" * 50, "I8", (2, 2)),
        tensor("vae/retrained", b"w" * 100),
        tensor("vae/new", b"n" * 7),
        tensor("vae/moved", b"z" * 60),
        file("vae/config.json", b'{"a": 1}'),
        components={"vae": {"tensors": 7, "dtype": "BF16"}},
    )
    return here


def test_each_kind_of_difference_is_listed(pair: Aimage) -> None:
    value = pair("--json", "diff", "a", "b").value
    counts = {
        kind: {word: list(one.values())[:3] for word, one in value[kind].items()}
        for kind in ("tensors", "files")
    }
    assert counts == {
        "tensors": {
            "shared": [3, 27, 27],
            "changed": [2, 200, 150],
            "added": [2, 0, 67],
            "removed": [1, 60, 0],
        },
        "files": {
            "shared": [0, 0, 0],
            "changed": [1, 2, 8],
            "added": [0, 0, 0],
            "removed": [1, 5, 0],
        },
    }
    quantized = value["tensors"]["changed"]["layers"][0]
    assert quantized == {
        "name": "vae/quantized",
        "a": {"digest": str(Digest.of(b"x" * 100)), "size": 100, "dtype": "BF16", "shape": [4]},
        "b": {"digest": str(Digest.of(b"x" * 50)), "size": 50, "dtype": "I8", "shape": [2, 2]},
    }
    (removed,) = value["files"]["removed"]["layers"]
    digest = str(Digest.of(b"words"))
    assert removed == {"name": "README", "a": {"digest": digest, "size": 5}}
    assert value["config"] == [
        {"path": ["components", "vae", "tensors"], "a": 6, "b": 7},
        {"path": ["license"], "a": "apache-2.0"},
    ]
    assert value["annotations"] == []  # the annotations repeat the licence
    assert value["differ"] is True


def test_the_text_output(pair: Aimage) -> None:
    lines = pair("diff", "a", "b").out.splitlines()
    assert lines[0].split("  ")[:2] == ["a", "a:latest"]
    assert lines[1].endswith("clowder, in the store")
    assert lines[3:] == [
        "tensors: 3 shared (27 B), 2 changed (150 B, were 200 B), 2 added (67 B), 1 removed (60 B)",
        "files: 0 shared, 1 changed (8 B, were 2 B), 0 added, 1 removed (5 B)",
        "config: 2 fields differ",
        f"pulling b:latest where a:latest is present fetches {fetched(pair)} B in 5 blobs",
        "",
        "changed:",
        "  vae/config.json  2 B -> 8 B",
        "  vae/quantized  BF16 4 -> I8 2x2  100 B -> 50 B",
        "  vae/retrained  BF16 4  100 B",
        "",
        "added:",
        "  vae/moved  BF16 4  60 B",
        "  vae/new  BF16 4  7 B",
        "",
        "removed:",
        "  README  5 B",
        "  vae/old  BF16 4  60 B",
        "",
        "config:",
        "  components.vae.tensors: 6 -> 7",
        '  license: "apache-2.0" -> (none)',
    ]


def fetched(pair: Aimage) -> Any:
    value = pair("--json", "diff", "a", "b").value
    config = value["fetch"]["size"] - 50 - 100 - 7 - 8  # renamed files are not counted
    assert 0 < config < 200
    return value["fetch"]["size"]


@pytest.mark.parametrize("arguments", [("a", "b"), ("b", "a")])
def test_the_bytes_to_pull_equal_those_of_a_pull(
    arguments: tuple[str, str], pair: Aimage, aimage: Callable[..., Aimage], registry: RealRegistry
) -> None:
    old, new = (f"{registry.host}/diff/{name}-{arguments[0]}:v1" for name in arguments)
    for short, name in zip(arguments, (old, new), strict=True):
        pair("tag", short, name)
        pair("push", "-q", name)
    there = aimage("other")
    there("pull", "-q", old)
    planned = there("--json", "pull", "--dry-run", new).value["fetch"]
    value = there("--json", "diff", old, new).value
    assert value["fetch"] == planned
    assert (value["a"]["where"], value["b"]["where"]) == ("store", "registry")
    assert pair("--json", "diff", *arguments).value["fetch"] == planned


@pytest.mark.parametrize("dialect", ["custom", "ollama", "container"])
def test_dialects_do_not_differ(dialect: str, here: Aimage) -> None:
    layers = [tensor("vae/x"), file("vae/config.json", b"{}")]
    make(here.store, "a", *layers, license="mit")
    make(here.store, "b", *layers, dialect=dialect, license="mit")
    value = here("--json", "diff", "a", "b", "--exit-code").value
    assert value["differ"] is False
    assert (value["a"]["dialect"], value["b"]["dialect"]) == ("clowder", dialect)
    assert [value[kind]["shared"]["count"] for kind in ("tensors", "files")] == [1, 1]
    assert value["config"] == value["annotations"] == []


def test_differences_set_the_exit_code_only_on_request(pair: Aimage) -> None:
    pair("diff", "a", "b")
    pair("diff", "a", "b", "--exit-code", code=1)
    pair("diff", "a", "a", "--exit-code")
    text = pair("diff", "a", "a").out
    assert "pulling a:latest where a:latest is present fetches 0 B in 0 blobs" in text
    assert text.endswith("0 blobs\n")  # no lists


def test_lists_are_shortened_without_the_option(here: Aimage) -> None:
    make(here.store, "a", *(tensor(f"t/{number:04}", b"a%d" % number) for number in range(30)))
    make(here.store, "b", *(tensor(f"t/{number:04}", b"b%d" % number) for number in range(30)))
    lines = here("diff", "a", "b").out.splitlines()
    assert "tensors: 0 shared, 30 changed (80 B), 0 added, 0 removed" in lines
    listed = [line for line in lines if line.startswith("  t/")]
    assert listed[0].startswith("  t/0000  ") and listed[-1].startswith("  t/0019  ")
    assert lines[-1] == "  ... and 10 more (--all lists them)"
    assert len(here("diff", "--all", "a", "b").out.splitlines()) > 30
    value = here("--json", "diff", "a", "b").value
    assert len(value["tensors"]["changed"]["layers"]) == 30


# -- sources


@contextmanager
def serving(
    store: Path, called: str, *, script: Callable[[Any], Answer] | None = None
) -> Iterator[ScriptedRegistry]:
    """Serve the content of a store under one tag."""
    layout = ImageLayout(store)
    root = layout.resolve(Reference.parse(called))
    kinds = {str(content.digest): content.media_type for _, content in layout.iter_entries()}

    def answer(seen: Any) -> Answer:
        wanted = seen.path.rpartition("/")[2]
        wanted = str(root.digest) if wanted == "v1" else wanted
        path = store / "blobs" / "sha256" / wanted.removeprefix("sha256:")
        if not path.is_file():
            return Answer(404)
        kind = {"Content-Type": kinds.get(wanted, "application/octet-stream")}
        return Answer(200, kind, path.read_bytes())

    with ScriptedRegistry(script or answer).running() as registry:
        yield registry


def test_diff_fetches_no_weights(pair: Aimage, aimage: Callable[..., Aimage]) -> None:
    there = aimage("empty")
    with serving(pair.store, "b") as registry:
        value = there(
            "--json", "diff", f"{registry.host}/team/x:v1", f"{registry.host}/team/y:v1"
        ).value
        asked = registry.asked("GET")
    assert value["differ"] is False
    assert value["b"]["where"] == "registry"
    manifest = json.loads(blob(pair, value["b"]["digest"]))
    blobs = [path.rpartition("/")[2] for path in asked if "/blobs/" in path]
    assert blobs == [manifest["config"]["digest"]] * 2
    assert not there.store.exists()


def blob(here: Aimage, digest: str) -> bytes:
    return (here.store / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()


def test_the_store_takes_precedence_over_the_registry(pair: Aimage) -> None:
    with serving(pair.store, "b") as registry:
        name = f"{registry.host}/team/x:v1"
        pair("tag", "a", name)
        value = pair("--json", "diff", "b", name).value
        assert value["b"]["where"] == "store" and value["differ"]
        assert not registry.seen
        value = pair("--json", "diff", name, name, "--remote").value
        assert (value["a"]["where"], value["differ"]) == ("registry", False)
        by_digest = f"{registry.host}/elsewhere@{value['a']['digest']}"
        asked = len(registry.seen)
        assert pair("--json", "diff", name, by_digest).value["b"]["where"] == "store"
        assert len(registry.seen) == asked


def test_unknown_names_fail(pair: Aimage) -> None:
    assert "c:latest not found in the store" in pair("diff", "a", "c", code=3).err
    assert "has no registry host" in pair("diff", "a", "b", "--remote", code=2).err
    with serving(pair.store, "b", script=lambda seen: Answer(404)) as registry:
        pair("diff", "a", f"{registry.host}/x", code=3)
    with serving(pair.store, "b", script=lambda seen: Answer(401)) as registry:
        pair("diff", "a", f"{registry.host}/x", code=4)


def test_a_config_missing_in_the_store_fails(pair: Aimage) -> None:
    value = pair("--json", "diff", "a", "b").value
    manifest = json.loads(blob(pair, value["b"]["digest"]))
    encoded = manifest["config"]["digest"].removeprefix("sha256:")
    (pair.store / "blobs" / "sha256" / encoded).unlink()
    assert "pull the AImage again" in pair("diff", "a", "b", code=3).err


def test_missing_layers_do_not_fail_a_diff(pair: Aimage) -> None:
    before = pair("diff", "a", "b").out
    value = pair("--json", "diff", "a", "b").value
    for side in ("a", "b"):
        for layer in json.loads(blob(pair, value[side]["digest"]))["layers"]:
            encoded = layer["digest"].removeprefix("sha256:")
            (pair.store / "blobs" / "sha256" / encoded).unlink(missing_ok=True)
    assert pair("diff", "a", "b").out == before


@pytest.mark.parametrize("where", ["store", "registry"])
def test_an_index_resolves_to_one_manifest(where: str, pair: Aimage) -> None:
    a, b = (Digest.parse(pair("--json", "show", name).value["digest"]) for name in "ab")
    children = [
        Descriptor(mediatype.OCI_MANIFEST, digest, len(blob(pair, str(digest)))).to_json()
        for digest in (a, b)
    ]
    for called, some in (("only", children[:1]), ("both", children)):
        index = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": some}
        name(pair.store, encode(index), mediatype.OCI_INDEX, called)
    with serving(pair.store, "only") as registry:
        only = "only" if where == "store" else f"{registry.host}/x:v1"
        value = pair("--json", "diff", only, "b").value
    assert (value["a"]["digest"], value["a"]["where"]) == (str(a), where)
    with serving(pair.store, "both") as registry:
        both = "both" if where == "store" else f"{registry.host}/x:v1"
        done = pair("diff", both, "b", code=2)
        assert "several of its manifests match" in done.err
        assert "select one by digest" in done.err
        if where == "registry":
            value = pair("--json", "diff", f"{registry.host}/x@{b}", "b", "--exit-code").value
            assert value["a"]["digest"] == str(b)


# -- other artifacts, and odd content


def test_artifacts_of_other_kinds_are_compared(here: Aimage) -> None:
    artifact(here.store, "a", b'{"k": {"x": 1}}', ("one", b"1"), ("two", b"22"), (None, b"333"))
    artifact(
        here.store,
        "b",
        b'{"k": {"x": true}}',
        ("one", b"1"),
        ("two", b"2222"),
        (None, b"333"),
        ("twice", b"55555"),
        ("twice\nover", b"55555"),
        annotations={"org.example.x": "1", mediatype.LICENSES: "mit"},
    )
    value = here("--json", "diff", "a", "b").value
    assert value["a"]["dialect"] == "foreign"
    assert value["tensors"]["shared"]["count"] == 0
    files = value["files"]
    assert [files[word]["count"] for word in files] == [2, 1, 2, 0]
    assert files["changed"]["layers"][0]["name"] == "two"
    assert value["config"] == [{"path": ["k", "x"], "a": 1, "b": True}]
    paths = [field["path"] for field in value["annotations"]]
    assert paths == [["org.example.x"], [mediatype.LICENSES]]
    lines = here("diff", "a", "b").out.splitlines()
    assert "annotations: 2 fields differ" in lines
    assert "  twice over  5 B" in lines


def test_ambiguous_titles_are_compared_by_digest(here: Aimage) -> None:
    artifact(here.store, "a", b"{}", ("same", b"1"), ("same", b"2"))
    artifact(here.store, "b", b"{}", ("same", b"2"), ("same", b"3"), ("same", b"3"))
    files = here("--json", "diff", "a", "b").value["files"]
    assert [files[word]["count"] for word in files] == [1, 0, 1, 1]


def test_configs_that_are_not_objects_are_compared(here: Aimage) -> None:
    artifact(here.store, "a", b"\x00binary", (None, b"1"))
    artifact(here.store, "b", b"[1]", (None, b"1"))
    artifact(here.store, "c", b"[" * 100_000, (None, b"1"))
    assert here("--json", "diff", "a", "a").value["config"] == []
    digests = [str(Digest.of(data)) for data in (b"\x00binary", b"[1]")]
    value = here("--json", "diff", "a", "b").value
    assert value["config"] == [{"path": ["digest"], "a": digests[0], "b": digests[1]}]
    here("diff", "a", "c", "--exit-code", code=1)


def test_an_aimage_is_compared_with_another_kind(here: Aimage) -> None:
    make(here.store, "a", tensor("vae/x", b"data"))
    artifact(here.store, "b", b"{}", ("vae/x", b"data"))
    value = here("--json", "diff", "a", "b").value
    assert value["files"]["shared"]["count"] == 1
    assert value["fetch"]["blobs"] == 1  # the config


@pytest.mark.parametrize("depth", [15, 20_000])
def test_deeply_nested_configs_are_compared(depth: int, here: Aimage) -> None:
    """Comparison stops at a maximum depth and never fails."""
    deep = [b'{"x":' * depth + value + b"}" * depth for value in (b"1", b"2")]
    artifact(here.store, "a", deep[0], (None, b"1"))
    artifact(here.store, "b", deep[1], (None, b"1"))
    done = here("--json", "diff", "a", "b")
    assert done.value["differ"] is True
    (field,) = done.value["config"]
    assert field["path"] == (["x"] * min(depth, 17) if depth < 1000 else ["digest"])


def test_config_values_of_different_types_differ(here: Aimage) -> None:
    make(here.store, "a", file("x", b"x"), n=1, m=1, o={}, p=[1, 2], same={"k": []})
    make(here.store, "b", file("x", b"x"), n=True, m=1.0, p=[2, 1], q=None, same={"k": []})
    fields = here("--json", "diff", "a", "b").value["config"]
    assert [field["path"] for field in fields] == [["m"], ["n"], ["o"], ["p"], ["q"]]
    assert fields[2] == {"path": ["o"], "a": {}}
    assert fields[4] == {"path": ["q"], "b": None}
    assert "  q: (none) -> null" in here("diff", "a", "b").out.splitlines()


def test_a_long_value_is_shortened_in_the_text(here: Aimage) -> None:
    make(here.store, "a", file("x", b"x"), text="l" * 1000)
    make(here.store, "b", file("x", b"x"), text="m" * 1000)
    assert all(len(line) < 150 for line in here("diff", "a", "b").out.splitlines())
    assert len(here("--json", "diff", "a", "b").value["config"][0]["a"]) == 1000


def test_one_changed_tensor_of_a_model_is_one_difference(
    here: Aimage, tiny: Path, tmp_path: Path
) -> None:
    """One bit of one tensor: only that tensor's blob differs."""
    other = tmp_path / "model"
    shutil.copytree(tiny, other)
    path = sorted((other / "vae").glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    here("create", "a", tiny)
    here("create", "b", other)
    value = here("--json", "diff", "a", "b").value
    (changed,) = value["tensors"]["changed"]["layers"]
    assert value["fetch"] == {"blobs": 1, "size": changed["b"]["size"]}
    assert value["tensors"]["shared"]["count"] == 283
    assert value["config"] == []
