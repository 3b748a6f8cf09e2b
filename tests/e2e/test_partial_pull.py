"""Partial pulls from a real registry, with every transferred byte counted."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Dialect, Layer
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Descriptor, Manifest, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.tensor import encode_header
from tests.process import Aimage
from tests.proxy import Proxy
from tests.real_registry import RealRegistry
from tests.store import unshare

MIB = 1024 * 1024
BUFFERS = 4 * MIB  # bytes that may be in flight when a connection ends
PATH = "tests/partial:v1"
RUNNABLE = "tests/partial-tensors:v1"
TOP_LEVEL = ("README.md", "model_index.json")
CONFIG = b'{"schemaVersion":1,"components":{"vae":{},"net":{}}}'


@dataclass
class Pushed:
    """The files of the embedded model in the registry: digest, config, and layers by name."""

    digest: str
    config: dict[str, Any]
    layers: dict[str, dict[str, Any]]

    def blobs(self, *starts: str) -> dict[str, int]:
        """Return the sizes of the blobs under these names, each once, and of the config."""
        found = {self.config["digest"]: self.config["size"]}
        for name, layer in self.layers.items():
            if name.startswith(starts):
                found[layer["digest"]] = layer["size"]
        return found


@pytest.fixture(scope="module")
def pushed(registry: RealRegistry, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    home = tmp_path_factory.mktemp("made")
    return push(Aimage(home, home / "store"), f"{registry.host}/{PATH}", tiny, "--whole-files")


@pytest.fixture
def runnable(aimage: Callable[..., Aimage], registry: RealRegistry, tiny: Path) -> Pushed:
    """Push the embedded model by tensors, which are 294 blobs."""
    return push(aimage("made"), f"{registry.host}/{RUNNABLE}", tiny)


def push(here: Aimage, name: str, tiny: Path, *options: str) -> Pushed:
    digest = here("create", name, tiny, *options).line
    here("push", name)
    layout = ImageLayout(here.store)
    document = json.loads(layout.read(layout.resolve(Reference.parse(name))))
    layers = {layer["name"]: layer for layer in here("show", name, "--json").value["layers"]}
    return Pushed(digest, document["config"], layers)


@pytest.fixture
def proxy(registry: RealRegistry) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as running:
        yield running


@pytest.fixture
def name(proxy: Proxy) -> str:
    return f"{proxy.host}/{PATH}"


def got(proxy: Proxy, since: int = 0) -> dict[str, int]:
    """Return the bytes sent of each requested blob."""
    asked = [passed for passed in proxy.seen[since:] if passed.is_blob]
    found = dict.fromkeys((passed.path.rpartition("/")[2] for passed in asked), 0)
    for passed in asked:
        found[passed.path.rpartition("/")[2]] += passed.sent
    return found


def row(here: Aimage, name: str) -> Any:
    (found,) = [row for row in here("ls", "--json").value if row["reference"] == name]
    return found


def is_marked(here: Aimage, name: str) -> bool:
    layout = ImageLayout(here.store)
    return layout.resolve(Reference.parse(name)).annotations.get(mediatype.PARTIAL) == "true"


# -- selection


def test_a_component_is_fetched_with_top_level_files_only(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    here = aimage()
    done = here("pull", name, "--component", "vae", "--component", "scheduler", "--json")
    assert got(proxy) == pushed.blobs("vae/", "scheduler/", *TOP_LEVEL)
    assert done.value["digest"] == pushed.digest
    left = pushed.blobs("").items() - got(proxy).items()
    assert done.value["partial"] is True
    assert done.value["missing"] == {"blobs": len(left), "size": sum(size for _, size in left)}
    assert row(here, name)["partial"] is True
    assert is_marked(here, name)
    assert "MB (partial)" in here("ls").out
    here("verify")


def test_a_full_pull_completes_a_part_and_removes_its_mark(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    here = aimage()
    said = here("pull", name, "--component", "vae").err
    assert f"left out; to complete it: aimage pull {name}" in said
    first, mark = got(proxy), len(proxy.seen)
    here("gc", "--grace", "0s")
    assert here("pull", name).line == pushed.digest
    assert got(proxy, mark) == dict(pushed.blobs("").items() - first.items())
    assert "partial" not in row(here, name)
    assert not is_marked(here, name)
    here("verify")
    layout = ImageLayout(here.store)
    layer = pushed.layers["vae/config.json"]
    layout.find_path(Descriptor.from_json(layer, "layer")).unlink()
    assert "is missing" in here("verify", code=5).out


def test_a_second_part_is_added_to_the_first(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    here = aimage()
    here("pull", name, "--include", "vae/*")
    assert got(proxy) == pushed.blobs("vae/")
    here("pull", name, "--include", "vae/*", "--component", "transformer")
    wanted = pushed.blobs("vae/", "transformer/", *TOP_LEVEL)
    assert got(proxy) == wanted
    assert is_marked(here, name)
    here("pull", name, "--include", "[!tv]*", "--component", "text_encoder", "--include", "tok*")
    assert got(proxy) == pushed.blobs("")  # each once; the AImage is complete now
    assert not is_marked(here, name)
    assert "partial" not in row(here, name)


def test_a_pattern_matches_whole_names_including_slashes(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    here = aimage()
    here("pull", name, "--include", "*.json", "--include", "transformer/diff*tensors")
    weights = "transformer/diffusion_pytorch_model.safetensors"
    chosen = [n for n in pushed.layers if n.endswith(".json") or n == weights]
    assert len(chosen) > 5
    config = {pushed.config["digest"]: pushed.config["size"]}
    blobs = {pushed.layers[n]["digest"]: pushed.layers[n]["size"] for n in chosen}
    assert got(proxy) == config | blobs


def test_a_partial_pull_of_a_complete_aimage_keeps_it_complete(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    here = aimage()
    here("pull", name)
    mark = len(proxy.seen)
    done = here("pull", name, "--component", "vae", "--json")
    assert "partial" not in done.value
    assert got(proxy, mark) == {}
    assert not is_marked(here, name)


def test_blobs_of_another_store_are_not_missing(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    other, here = aimage("other"), aimage("here")
    other("pull", name)
    mark = len(proxy.seen)
    here.environment["AIMAGE_STORE"] = f"{here.store}:{other.store}"
    done = here("pull", name, "--component", "vae", "--json")
    assert "partial" not in done.value
    assert got(proxy, mark) == {}


def test_an_interrupted_partial_pull_is_resumed(
    aimage: Callable[..., Aimage], registry: RealRegistry, proxy: Proxy
) -> None:
    data = encode_header([("w", "U8", (24 * MIB,))])
    data += hashlib.shake_128(b"part").digest(24 * MIB)
    big, small = (Descriptor.of(mediatype.AIMAGE_SAFETENSORS, d) for d in (data, data[:-5]))
    layers = (Layer(big, "net/w"), Layer(small, "vae/w"))
    path = "tests/partial-big:v1"
    keep(registry, path, DIALECTS["clowder"], AImage(CONFIG, layers), {big: data, small: data[:-5]})
    here, name = aimage(), f"{proxy.host}/{path}"
    proxy.cut = lambda passed: passed.sent if proxy._blob_bytes > 12 * MIB else None
    here("pull", name, "--component", "net", "--jobs", 2, code=1)
    assert here("ls", "--json").value == []
    first = proxy.sent(str(big.digest))
    assert 8 * MIB < first < big.size
    proxy.cut = None
    here("pull", name, "--component", "net", "--jobs", 2)
    assert proxy.sent(str(big.digest)) <= big.size + BUFFERS
    assert proxy.asked(str(small.digest)) == []
    here("pull", name)
    assert proxy.sent(str(big.digest)) <= big.size + BUFFERS
    here("verify")


# -- dry runs and errors


def test_a_dry_run_of_a_partial_pull(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    here = aimage()
    value = here("pull", name, "--component", "vae", "--dry-run", "--json").value
    wanted = pushed.blobs("vae/", *TOP_LEVEL)
    assert value["fetch"] == {"blobs": len(wanted), "size": sum(wanted.values())}
    left = dict(pushed.blobs("").items() - wanted.items())
    assert value["missing"] == {"blobs": len(left), "size": sum(left.values())}
    assert value["partial"] is True
    assert not here.store.exists()
    assert got(proxy).keys() == {pushed.config["digest"]}
    here("pull", name, "--component", "vae")
    mark = len(proxy.seen)
    text = here("pull", name, "--component", "vae", "--dry-run").line
    assert f": 0 blobs (0 B) to fetch, {len(wanted)} (" in text
    assert text.endswith("left out")
    assert got(proxy, mark) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--component", "unet"], "no component 'unet'"),
        (["--component", "va"], "no component 'va'"),
        (["--include", "vae/none*"], "no layer matching 'vae/none*'"),
        (["--component", "vae", "--include", "x"], "no layer matching 'x'"),
        (["--component", ""], "no component ''"),
    ],
)
def test_unknown_components_are_refused(
    options: list[str],
    said: str,
    aimage: Callable[..., Aimage],
    pushed: Pushed,
    proxy: Proxy,
    name: str,
) -> None:
    here = aimage()
    err = here("pull", name, *options, code=3).err
    assert said in err
    assert "scheduler, text_encoder, tokenizer, transformer, vae" in err
    assert "the top-level layers README.md, model_index.json" in err
    assert not here.store.exists()
    assert got(proxy).keys() == {pushed.config["digest"]}


def test_a_whole_index_has_no_parts(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    err = here("pull", "localhost:1/x", "--whole", "--include", "*", code=2).err
    assert "--whole cannot be combined with --component" in err


def test_another_kind_of_artifact_has_no_parts(
    aimage: Callable[..., Aimage], registry: RealRegistry, proxy: Proxy
) -> None:
    config = Descriptor.of("application/vnd.example.config", b"{}")
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": config.to_json(),
        "layers": [],
    }
    path, manifest = "tests/partial-other:v1", Manifest.build(document)
    put(registry, path, manifest, {config: b"{}"})
    here, name = aimage(), f"{proxy.host}/{path}"
    err = here("pull", name, "--component", "vae", code=2).err
    assert "cannot select components or layers of" in err
    assert "omit --component and --include" in err
    assert not here.store.exists()
    here("pull", name)


# -- dialects and indexes


def put(registry: RealRegistry, path: str, manifest: Manifest, contents: dict[Any, Any]) -> None:
    """Upload blobs and a manifest to the registry."""
    name = Reference.parse(f"{registry.host}/{path}")
    with Repository(name, ClientOptions()) as target:
        for content, data in contents.items():
            target.push(content, build_bytes_body(data))
        target.push(manifest.descriptor, build_bytes_body(manifest.raw), name)


def keep(
    registry: RealRegistry, path: str, dialect: Dialect, made: AImage, contents: dict[Any, Any]
) -> Manifest:
    manifest, config = dialect.write(made)
    put(registry, path, manifest, contents | {manifest.config: config})
    return manifest


def small_aimage() -> tuple[AImage, dict[Descriptor, bytes]]:
    """Return an AImage of two components and the content of its blobs."""
    contents, layers = {}, []
    for name, data in (
        ("model_index.json", b"{}"),
        ("net/config.json", b'{"net":true}'),
        ("net/w", encode_header([("w", "U8", (9000,))]) + bytes(9000)),
        ("vae/w", encode_header([("w", "U8", (7000,))]) + bytes(7000)),
    ):
        kind = mediatype.AIMAGE_SAFETENSORS if name.endswith("/w") else mediatype.AIMAGE_FILE
        content = Descriptor.of(kind, data)
        contents[content] = data
        layers.append(Layer(content, name))
    return AImage(CONFIG, tuple(layers)), contents


@pytest.mark.parametrize("dialect", [n for n in DIALECTS if n != "custom"])
def test_every_dialect_can_be_pulled_in_part(
    dialect: Any, aimage: Callable[..., Aimage], registry: RealRegistry, proxy: Proxy
) -> None:
    made, contents = small_aimage()
    path = f"tests/partial-{dialect}:v1"
    manifest = keep(registry, path, DIALECTS[dialect], made, contents)
    here, name = aimage(), f"{proxy.host}/{path}"
    here("pull", name, "--component", "net")
    chosen = [layer.descriptor for layer in made.layers if layer.component in ("", "net")]
    assert got(proxy) == {str(b.digest): b.size for b in (*chosen, manifest.config)}
    here("pull", name)
    assert len(proxy.asked("/blobs/")) == len({*contents, manifest.config})
    assert not is_marked(here, name)


def test_compressed_layers_are_selected_by_their_diff_id(
    aimage: Callable[..., Aimage], registry: RealRegistry, proxy: Proxy
) -> None:
    """A tool that compresses container image layers leaves them like this."""
    made, contents = small_aimage()
    manifest, config = DIALECTS["container"].write(made)
    document, packed = json.loads(manifest.raw), {manifest.config: config}
    for layer, plain in zip(document["layers"], made.layers, strict=True):
        data = gzip.compress(contents[plain.descriptor], mtime=0)
        content = Descriptor.of(mediatype.OCI_LAYER_TAR_GZIP, data)
        packed[content] = data
        layer.clear()
        layer.update(content.to_json())
    path, packed_manifest = "tests/partial-packed:v1", Manifest.build(document)
    put(registry, path, packed_manifest, packed)
    here, name = aimage(), f"{proxy.host}/{path}"
    layout = ImageLayout(here.store)

    def there() -> list[Any]:
        return [layer.name for layer in made.layers if layout.exists(layer.descriptor)]

    here("pull", name, "--component", "net")
    assert there() == ["model_index.json", "net/config.json", "net/w"]
    assert proxy.sent() == sum(c.size for c in list(packed)[:-1])
    assert is_marked(here, name)
    here("pull", name)
    assert there() == [layer.name for layer in made.layers]
    assert proxy.sent() == sum(c.size for c in packed)
    assert not is_marked(here, name)
    for content, data in contents.items():
        assert layout.find_path(content).read_bytes() == data


def test_a_partial_pull_from_an_index(
    aimage: Callable[..., Aimage], registry: RealRegistry, proxy: Proxy
) -> None:
    made, contents = small_aimage()
    manifest, config = DIALECTS["clowder"].write(made)
    other = Manifest.build(json.loads(manifest.raw) | {"annotations": {"x": "y"}})
    entries = [
        one.descriptor.to_json() | {"annotations": {mediatype.VARIANT: variant}}
        for one, variant in ((manifest, "first"), (other, "second"))
    ]
    index = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": entries}
    raw = json.dumps(index).encode()
    path = "tests/partial-index:v1"
    put(registry, path, manifest, contents | {manifest.config: config})
    name = Reference.parse(f"{registry.host}/{path}")
    with Repository(name, ClientOptions()) as target:
        target.push(other.descriptor, build_bytes_body(other.raw))
        target.push(Descriptor.of(mediatype.OCI_INDEX, raw), build_bytes_body(raw), name)
    here, seen = aimage(), f"{proxy.host}/{path}"
    assert "several of its manifests match" in here("pull", seen, "--component", "vae", code=2).err
    done = here("pull", seen, "--component", "vae", "--variant", "second", "--json")
    assert done.value["digest"] == str(other.digest)
    assert done.value["partial"] is True
    said = here("pull", seen, "--include", "vae/*", "--variant", "second").err
    assert f"to complete it: aimage pull {seen} --variant second\n" in said
    here("verify")


# -- verbs on a part


def test_a_part_is_pushed_to_a_registry_with_the_rest(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    """To its own repository, and by mounts to another one of that registry."""
    here = aimage()
    here("pull", name, "--component", "vae")
    for target in ("tests/partial:again", "tests/partial-beside:v1"):
        here("tag", name, f"{proxy.host}/{target}")
        assert here("push", f"{proxy.host}/{target}").line == pushed.digest
    assert proxy.received() == 0
    assert aimage("there")("pull", f"{proxy.host}/tests/partial-beside:v1").line == pushed.digest


def test_a_push_of_a_part_fails_without_the_rest(
    aimage: Callable[..., Aimage], pushed: Pushed, registry: RealRegistry, name: str
) -> None:
    here = aimage()
    here("pull", name, "--component", "vae")
    with Proxy(registry.host).running() as elsewhere:
        target = f"{elsewhere.host}/tests/partial-elsewhere:v1"
        here("tag", name, target)
        err = here("push", target, code=3).err
        assert f"{target} is incomplete, and its registry does not have the rest" in err
        assert "the store is missing scheduler (1 layer), text_encoder (" in err
        assert "transformer (2 layers)" in err
        assert "vae (" not in err
        assert f"to complete it: aimage pull {name}\n" in err
        assert elsewhere.received() == 0


def test_run_completes_a_partial_aimage(
    aimage: Callable[..., Aimage],
    runnable: Pushed,
    registry: RealRegistry,
    proxy: Proxy,
    tmp_path: Path,
) -> None:
    pytest.importorskip("mlx.core")
    here, name = aimage(), f"{proxy.host}/{RUNNABLE}"
    here("pull", name, "--component", "transformer")
    here("tag", name, "mine")
    err = here("run", "mine", "a lighthouse", "-o", tmp_path / "x.png", code=3).err
    assert "mine:latest is incomplete in the store: missing " in err
    assert "text_encoder (" in err
    assert "transformer" not in err
    assert f"to complete it: aimage pull {name}" in err
    here("tag", name, "127.0.0.1:1/gone:v1")
    err = here("run", "127.0.0.1:1/gone:v1", "a lighthouse", code=1).err
    assert "cannot reach 127.0.0.1:1" in err
    assert "127.0.0.1:1/gone:v1 is incomplete in the store: missing " in err
    mark = len(proxy.seen)
    size = ["--width", 64, "--height", 64, "--steps", 1, "--seed", 1]
    here("run", name, "a lighthouse", *size, "-o", tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()
    chosen = runnable.blobs("transformer/", "model_index.json", "README.md")
    assert got(proxy, mark) == dict(runnable.blobs("").items() - chosen.items())
    rows = {row["reference"]: row for row in here("ls", "--json").value}
    assert not any("partial" in row for row in rows.values())  # the other names as well


def test_repair_of_a_part_fetches_only_damaged_blobs(
    aimage: Callable[..., Aimage], pushed: Pushed, proxy: Proxy, name: str
) -> None:
    here = aimage()
    here("pull", name, "--component", "vae")
    path = ImageLayout(here.store).find_path(
        Descriptor.from_json(pushed.layers["vae/config.json"], "layer")
    )
    unshare(path)
    path.write_bytes(b"other")
    mark = len(proxy.seen)
    here("verify", "--repair")
    layer = pushed.layers["vae/config.json"]
    assert got(proxy, mark) == {layer["digest"]: layer["size"]}
    assert row(here, name)["partial"] is True
    shown = here("show", name, "--json").value
    assert shown["partial"] is True
    assert shown["missing"]["blobs"] == 8
    assert "missing     scheduler (1 layer), text_encoder (" in here("show", name).out
    here("pull", name)
    assert "partial" not in here("show", name, "--json").value
    here("verify")


def test_a_part_requires_its_manifest_and_config(
    aimage: Callable[..., Aimage], tiny: Path, repository: str
) -> None:
    here, there = aimage(), aimage("there")
    name = f"{repository}:v1"
    here("create", name, tiny, "--whole-files")
    here("push", name)
    digest = there("pull", name, "--component", "vae").line
    store = ImageLayout(there.store)
    manifest = read_aimage(store, Reference.parse(name)).manifest
    for lost in (manifest.config.digest, manifest.digest):
        path = there.store / "blobs" / "sha256" / lost.encoded
        path.unlink()
        done = there("verify", name, code=5)
        assert str(lost) in done.out + done.err
        there("verify", name, "--repair")
        assert path.exists()
    assert str(manifest.digest) == digest
