"""Images of a model's files: what runtimes unpack is the export, and a pull gives the AImage."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content.parts import PartsSource
from clowder_aimage.content.platform import ANY, Platform, choose, list_candidates
from clowder_aimage.content.store import ContentStore
from clowder_aimage.dialect.license import join_licenses
from clowder_aimage.dialect.mountable import ORIGIN, read_origin
from clowder_aimage.document.license_expression import parse_expression
from clowder_aimage.errors import FormatError, RegistryError, UsageError
from clowder_aimage.exporter.image import ImageSource
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Descriptor, Index, Manifest, Reference, mediatype, parse_document
from clowder_aimage.pull import resolve_changed
from clowder_aimage.registry import ClientOptions, Repository
from tests.abridged import abridge
from tests.exporter.conftest import Artifact, files_in
from tests.process import Aimage, run
from tests.program import find_program
from tests.registry_app import RegistryThread
from tests.scripted import Answer, ScriptedRegistry, Seen


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the host of a registry in this process."""
    thread = RegistryThread(ImageLayout(tmp_path_factory.mktemp("registry")))
    yield thread.host
    thread.close()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Aimage:
    """Return a store with ``x``."""
    home = tmp_path_factory.mktemp("home")
    here = Aimage(home, home / "store")
    here("create", "x", abridge(tiny, home / "tiny"), "-q")
    return here


def build(layout: ContentStore, name: str = "x") -> ImageSource:
    reference = Reference.parse(name)
    return ImageSource(layout, read_aimage(layout, reference), reference)


def read_index(image: ImageSource) -> Index:
    root = image.resolve(Reference.parse("x"))
    document = parse_document(image.open(root).read(), root.media_type)
    assert isinstance(document, Index)
    return document


def read_manifests(image: ImageSource) -> list[Manifest]:
    return [
        Manifest.parse(image.open(child).read(), child.media_type)
        for child in read_index(image).manifests
    ]


def unpack(image: ImageSource, directory: Path) -> dict[str, bytes]:
    """Unpack the layers as KServe does: a stream, with Python's filter for data."""
    for layer in read_manifests(image)[0].layers:
        with tarfile.open(fileobj=io.BytesIO(image.open(layer).read()), mode="r|") as tar:
            tar.extractall(directory, filter="data")
    return files_in(directory / "models")


@pytest.mark.parametrize("options", [(), ("--whole-files",), ("--quantize", "int8")])
def test_the_layers_have_the_exported_files_and_a_pull_gives_the_aimage(
    here: Aimage,
    aimage: Callable[..., Aimage],
    tiny: Path,
    tmp_path: Path,
    host: str,
    options: tuple[str, ...],
) -> None:
    name = f"{host}/team/x:v1"
    here("create", name, abridge(tiny, tmp_path / "again"), "-q", *options)
    here("export", name, tmp_path / "out", "-q")
    image = build(ImageLayout(here.store), name)
    assert unpack(image, tmp_path / "root") == files_in(tmp_path / "out")
    here("push", name, "--dialect", "image", "-q")
    there = aimage("there")
    there("pull", name, "-q")
    assert there("resolve", name).line == here("resolve", name).line
    there("verify", name, "-q")


def test_the_bytes_follow_from_the_aimage_and_platforms_share_the_layers(here: Aimage) -> None:
    layout = ImageLayout(here.store)
    image, again = build(layout), build(layout)
    name = Reference.parse("x")
    assert image.resolve(name) == again.resolve(name)
    amd64, arm64 = read_manifests(image)
    assert amd64.layers == arm64.layers
    assert amd64.config != arm64.config
    for manifest, architecture in ((amd64, "amd64"), (arm64, "arm64")):
        config = json.loads(image.open(manifest.config).read())
        assert (config["os"], config["architecture"]) == ("linux", architecture)
        assert config["rootfs"]["diff_ids"] == [str(layer.digest) for layer in manifest.layers]


def test_the_manifests_state_the_licences(aimage: Callable[..., Aimage], tiny: Path) -> None:
    here = aimage()
    here("create", "x", abridge(tiny, here.home / "x"), "--license", "MIT OR CC-BY-NC-4.0", "-q")
    for manifest in read_manifests(build(ImageLayout(here.store))):
        assert manifest.annotations == {mediatype.LICENSES: "MIT OR CC-BY-NC-4.0"}


def test_licences_that_all_apply_are_one_expression() -> None:
    assert join_licenses(()) == ""
    joined = parse_expression(join_licenses(("MIT OR CC-BY-NC-4.0", "Apache-2.0")))
    assert joined == parse_expression("(MIT OR CC-BY-NC-4.0) AND Apache-2.0")


def test_images_share_the_layer_of_a_component_that_models_share(
    aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path
) -> None:
    here = aimage()
    here("create", "x", abridge(tiny, tmp_path / "first"), "-q")
    second = abridge(tiny, tmp_path / "second")
    scheduler = second / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text() + "\n")
    here("create", "y", second, "-q")
    layout = ImageLayout(here.store)
    first, other = ({*read_manifests(build(layout, name))[0].layers} for name in "xy")
    assert len(first - other) == len(other - first) == 1
    assert len(first & other) == len(first) - 1 > 2


@pytest.mark.parametrize("offset", [0, 1, 511, 512, 700, 20_000])
def test_a_layer_is_read_from_any_offset(here: Aimage, offset: int) -> None:
    image = build(ImageLayout(here.store))
    layer = max(read_manifests(image)[0].layers, key=lambda layer: layer.size)
    whole = image.open(layer).read()
    assert len(whole) == layer.size
    assert image.open(layer, offset).read() == whole[offset:]
    assert image.open(layer, offset, 3000).read() == whole[offset : offset + 3000]


def test_a_mac_takes_the_manifest_of_another_platform(here: Aimage) -> None:
    image = build(ImageLayout(here.store))
    candidates = list_candidates(image, read_index(image))
    mac = Platform.of("darwin", "arm64")
    chosen = choose(candidates, ANY, mac, Reference.parse("x"))
    assert chosen.descriptor.annotations == {mediatype.MOUNTABLE: "true"}


@pytest.mark.parametrize("states_ranges", [False, True])
def test_a_registry_that_ignores_ranges_is_refused(
    here: Aimage, tmp_path: Path, states_ranges: bool
) -> None:
    """A cache that states ranges has them as soon as their bytes have arrived."""
    image = build(ImageLayout(here.store))
    manifest = read_manifests(image)[0]
    origin = read_origin(manifest, image.open(manifest.config).read())
    assert origin is not None
    blob = max(origin.manifest.layers, key=lambda layer: layer.size)
    headers = {"Accept-Ranges": "bytes"} if states_ranges else {}

    def answer(seen: Seen) -> Answer:
        digest = seen.path.rpartition("/")[2]
        (layer,) = [layer for layer in manifest.layers if str(layer.digest) == digest]
        return Answer(200, headers, image.open(layer).read() or b"")

    with ScriptedRegistry(answer).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            reader = PartsSource(repository, origin.blobs).open(blob)
            if states_ranges:
                assert blob.digest.matches(reader.read())
            else:
                with pytest.raises(RegistryError, match="ignores the header Range"):
                    reader.read()
                assert len(registry.seen) == 1


def test_a_node_sees_that_an_image_has_not_changed(here: Aimage, host: str, tmp_path: Path) -> None:
    name = Reference.parse(f"{host}/team/x:v1")
    here("tag", "x", name)
    here("push", name, "--dialect", "image", "-q")
    changed = resolve_changed(name, ClientOptions(docker_config=tmp_path), None)
    assert changed is not None
    assert changed[1].digest == ImageLayout(here.store).resolve(name).digest


def test_files_in_a_tar_of_another_tool_are_refused(artifact: Artifact) -> None:
    artifact.add_tar(("model/config.json", b"{}"))
    artifact.finish("clowder")
    with pytest.raises(UsageError, match="packed by another tool"):
        build(artifact.store, "model")


@pytest.mark.integration
def test_other_programs_copy_and_unpack_an_image(
    here: Aimage, repository: str, tmp_path: Path
) -> None:
    """skopeo and umoci, with the registry of Debian."""
    skopeo, umoci = find_program("skopeo"), find_program("umoci")
    name = f"{repository}:v1"
    here("tag", "x", name)
    here("push", name, "--dialect", "image", "-q")
    copy = [skopeo, "copy", "-q", "--src-tls-verify=false", f"docker://{name}"]
    run([*copy, f"oci:{tmp_path}/oci:x"], check=True)
    target = tmp_path / "unpacked"
    run([umoci, "unpack", "--rootless", "--image", f"{tmp_path}/oci:x", str(target)], check=True)
    here("export", "x", tmp_path / "out", "-q")
    assert files_in(target / "rootfs" / "models") == files_in(tmp_path / "out")


def test_an_image_whose_layers_were_compressed_is_refused(here: Aimage) -> None:
    image = build(ImageLayout(here.store))
    manifest = read_manifests(image)[0]
    config = image.open(manifest.config).read()
    packed = Descriptor.of(mediatype.OCI_LAYER_TAR_GZIP, gzip.compress(b"x"))
    changed = replace(manifest, layers=(packed, *manifest.layers[1:]))
    with pytest.raises(FormatError, match="compressed by another tool"):
        read_origin(changed, config)


def change(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(origin: dict[str, Any]) -> None:
        *parents, last = path
        for key in parents:
            origin = origin[key]
        origin[last] = value

    return edit


DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    "edit",
    [
        change(("manifest",), "%%%"),
        change(("manifest",), "e30="),
        change(("manifest",), 5),
        change(("mediaType",), mediatype.OCI_INDEX),
        change(("blobs",), []),
        change(("blobs",), {}),
        change(("blobs", "sha256:1"), []),
        change(("blobs", DIGEST), []),
        change(("blobs", "FIRST"), "text"),
        change(("blobs", "FIRST"), []),
        change(("blobs", "FIRST"), [[99, 0, 1]]),
        change(("blobs", "FIRST"), [[0, -1, 1]]),
        change(("blobs", "FIRST"), [[0, 0, 1 << 60]]),
        change(("blobs", "FIRST"), [[True, 0, 1]]),
        change(("blobs", "FIRST"), [[0, 0]]),
        change(("blobs", "FIRST"), [None]),
    ],
)
def test_a_description_that_is_malformed_is_refused(
    here: Aimage, edit: Callable[[dict[str, Any]], None]
) -> None:
    image = build(ImageLayout(here.store))
    manifest = read_manifests(image)[0]
    config = json.loads(image.open(manifest.config).read())
    blobs = config[ORIGIN]["blobs"]
    first = next(iter(blobs))
    blobs["FIRST"] = blobs.pop(first)
    edit(config[ORIGIN])
    if isinstance(blobs := config[ORIGIN]["blobs"], dict) and "FIRST" in blobs:
        blobs[first] = blobs.pop("FIRST")
    with pytest.raises(FormatError):
        read_origin(manifest, json.dumps(config).encode())
