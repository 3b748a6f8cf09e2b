"""Layers that another tool compressed, as when a container image is copied."""

from __future__ import annotations

import errno
import gzip
import json
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import FormatError, NotFoundError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import inflate, read_aimage
from clowder_aimage.oci import Descriptor, Manifest, mediatype
from tests.exporter.conftest import NAME, Artifact, tensors_in

DATA = bytes(range(256)) * 9000
BOMB = 65 << 20  # zeros
CONFIG = b'{"model_type": "llama"}'
SHAPE = ("U8", (len(DATA),), DATA)
DOCKER = "application/vnd.docker.image.rootfs.diff.tar"


def pack(data: bytes, kind: str) -> bytes:
    if kind.endswith("gzip"):
        return gzip.compress(data, mtime=0)
    return bytes(pytest.importorskip("zstandard").compress(data))


@pytest.fixture(params=[mediatype.OCI_LAYER_TAR_GZIP, mediatype.OCI_LAYER_TAR_ZSTD])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def recompressed(
    artifact: Artifact, kind: str, change: Callable[[Any], Any] = lambda data: data
) -> Artifact:
    """Return a store after such a tool copied it: no blob is unchanged."""
    artifact.finish("container")
    document = json.loads(artifact.store.find_path(artifact.store.resolve(NAME)).read_bytes())
    rows = []
    for layer in artifact.layers:
        path = artifact.store.find_path(layer.descriptor)
        data = change(pack(path.read_bytes(), kind))
        rows.append(Descriptor.of(kind, data))
        artifact.store.push(rows[-1], build_bytes_body(data))
    for path in {artifact.store.find_path(layer.descriptor) for layer in artifact.layers}:
        path.unlink()
    document["layers"] = [row.to_json() for row in rows]
    manifest = Manifest.build(document)
    artifact.store.push(manifest.descriptor, build_bytes_body(manifest.raw), NAME)
    return artifact


@pytest.fixture
def full(artifact: Artifact, kind: str) -> Artifact:
    """Return an artifact of a tensor, two files, one of them compressed twice, and a tar."""
    artifact.config |= {"format": "transformers"}
    artifact.add_tensors("x", {"x": SHAPE})
    artifact.add("config.json", CONFIG)
    artifact.add("notes.txt", gzip.compress(DATA), f"{mediatype.AIMAGE_FILE}+gzip", DATA)
    artifact.add_tar(("kit/a", DATA))
    return recompressed(artifact, kind)


def check(artifact: Artifact, found: dict[str, bytes]) -> None:
    assert tensors_in(artifact.out / "model.safetensors") == {"x": SHAPE}
    del found["model.safetensors"]
    assert found == {"config.json": CONFIG, "notes.txt": DATA, "kit/a": DATA}


@pytest.mark.parametrize("links", [False, True])
def test_compressed_layers_are_unpacked_without_changing_the_store(
    full: Artifact, links: bool
) -> None:
    before = set((full.store.root / "blobs/sha256").iterdir())
    counted: list[Any]
    planned, counted = [], []
    found = full.exported(
        links=links, on_plan=lambda plan: planned.append(plan.size), on_written=counted.append
    )
    check(full, found)
    assert set((full.store.root / "blobs/sha256").iterdir()) == before
    assert planned == [sum(counted)]


def test_export_reads_a_read_only_store(full: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made to fail instead of removing permissions, which root ignores."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", ".aimage")

    for name in ("push", "ingest", "tag"):
        monkeypatch.setattr(ImageLayout, name, refuse)
    check(full, full.exported())


def test_inflate_restores_compressed_layers(full: Artifact) -> None:
    inflate(full.store, read_aimage(full.store, NAME))
    for layer in full.layers:
        assert full.store.exists(layer.descriptor)
    check(full, full.exported())


@pytest.mark.parametrize("kind", [f"{DOCKER}.gzip", f"{DOCKER}.zstd"])
def test_two_layers_of_one_blob_are_exported(artifact: Artifact, kind: str) -> None:
    artifact.add("one", DATA)
    artifact.add("two", DATA)
    recompressed(artifact, kind)
    assert artifact.exported() == {"one": DATA, "two": DATA}
    inflate(artifact.store, read_aimage(artifact.store, NAME))
    assert artifact.store.exists(artifact.layers[0].descriptor)


def test_inflate_of_known_size_has_no_ratio_limit(artifact: Artifact, kind: str) -> None:
    """With a known size, the compression ratio is not checked."""
    artifact.add("zeros", bytes(BOMB))
    recompressed(artifact, kind)
    inflate(artifact.store, read_aimage(artifact.store, NAME))
    assert artifact.store.find_path(artifact.layers[0].descriptor).stat().st_size == BOMB


@pytest.mark.parametrize(("cut", "is_exported"), [(0, False), (-1, True)])
def test_truncated_layers_are_refused(
    artifact: Artifact, kind: str, cut: int, is_exported: bool
) -> None:
    artifact.add("notes.txt", DATA)
    recompressed(artifact, kind, lambda data: data[:cut])
    with pytest.raises(FormatError, match="is truncated"):
        if is_exported:
            artifact.export()
        else:
            inflate(artifact.store, read_aimage(artifact.store, NAME))
    assert not artifact.store.exists(artifact.layers[0].descriptor)
    artifact.check_nothing_left()


@pytest.mark.parametrize(
    ("change", "is_exported"),
    [
        (lambda: DATA[:-1], False),
        (lambda: DATA[::-1], False),
        # Not a value: each process of the tests would have it until the end.
        (lambda: bytes(BOMB), True),
    ],
    ids=["shorter", "other", "bomb exported"],
)
def test_layers_of_other_content_are_refused(
    artifact: Artifact, kind: str, change: Callable[[], bytes], is_exported: bool
) -> None:
    artifact.add("notes.txt", DATA)
    recompressed(artifact, kind, lambda _: pack(change(), kind))
    with pytest.raises(VerificationError):
        if is_exported:
            artifact.export()
        else:
            inflate(artifact.store, read_aimage(artifact.store, NAME))
    assert not artifact.store.exists(artifact.layers[0].descriptor)
    artifact.check_nothing_left()


@pytest.mark.parametrize("is_exported", [False, True])
def test_unknown_compression_is_refused(artifact: Artifact, is_exported: bool) -> None:
    artifact.add("notes.txt", DATA)
    recompressed(artifact, mediatype.OCI_LAYER_TAR_GZIP)
    document = json.loads(artifact.store.find_path(artifact.store.resolve(NAME)).read_bytes())
    document["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+xz"
    manifest = Manifest.build(document)
    artifact.store.push(manifest.descriptor, build_bytes_body(manifest.raw), NAME)
    with pytest.raises(FormatError, match="unsupported compression") as caught:
        if is_exported:
            artifact.export()
        else:
            inflate(artifact.store, read_aimage(artifact.store, NAME))
    assert caught.value.hint


def test_missing_layers_are_reported(full: Artifact) -> None:
    for came in read_aimage(full.store, NAME).manifest.layers:
        full.store.find_path(came).unlink()
    with pytest.raises(NotFoundError, match="is incomplete in the store"):
        full.export()
