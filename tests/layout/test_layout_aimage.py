"""Read AImages by name, also after other tools changed them."""

from __future__ import annotations

import errno
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.errors import (
    ContentError,
    FormatError,
    NotFoundError,
    StoreError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import inflate, read_aimage
from clowder_aimage.oci import Descriptor, Manifest, Reference, mediatype
from clowder_aimage.tensor import encode_header
from tests.process import run

if TYPE_CHECKING:
    from clowder_aimage.content.store import Reader


REFERENCE = Reference.parse("registry.example.com/model:v1")
TENSOR = encode_header([("w", "U8", (2000,))]) + bytes(2000)
FILE = b'{"config":true}'
CONFIG = b'{"schemaVersion":1,"components":{"vae":{}}}'


def aimage() -> AImage:
    tensor = Layer(Descriptor.of(mediatype.AIMAGE_SAFETENSORS, TENSOR), "vae/w", "U8", (2000,))
    file = Layer(Descriptor.of(mediatype.AIMAGE_FILE, FILE), "vae/config.json")
    return AImage(CONFIG, (file, tensor))


def keep(store: ImageLayout, dialect: str) -> Manifest:
    """Write the AImage into ``layout`` and return its manifest."""
    made = aimage()
    for layer, data in zip(made.layers, (FILE, TENSOR), strict=True):
        store.push(layer.descriptor, build_bytes_body(data))
    manifest, config = DIALECTS[dialect].write(made)
    store.push(manifest.config, build_bytes_body(config))
    store.push(manifest.descriptor, build_bytes_body(manifest.raw), REFERENCE)
    return manifest


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_read_back(store: ImageLayout, dialect: str) -> None:
    manifest = keep(store, dialect)
    stored = read_aimage(store, REFERENCE)
    assert stored.descriptor.digest == manifest.digest
    assert stored.manifest.raw == manifest.raw
    assert stored.dialect.name == dialect
    assert stored.aimage == aimage()
    before = set((store.root / "blobs" / "sha256").iterdir())
    inflate(store, stored)  # nothing is compressed, so nothing is done
    assert set((store.root / "blobs" / "sha256").iterdir()) == before


def test_a_config_over_4_mib_is_refused_before_it_is_parsed(store: ImageLayout) -> None:
    config = CONFIG[:-1] + b',"x":[' + b"{}," * 1_400_000 + b"0]}"
    with pytest.raises(FormatError, match=r"config .* too large"):
        DIALECTS["clowder"].write(AImage(config, ()))
    value = json.loads(DIALECTS["clowder"].write(AImage(CONFIG, ()))[0].raw)
    value["config"] = Descriptor.of(mediatype.AIMAGE_CONFIG, config).to_json()
    store.push(Descriptor.from_json(value["config"]), build_bytes_body(config))
    manifest = Manifest.build(value)
    store.push(manifest.descriptor, build_bytes_body(manifest.raw), REFERENCE)
    with pytest.raises(VerificationError, match=r"is too large: .* the limit is 4194304"):
        read_aimage(store, REFERENCE)


def test_documents_are_parsed_once_for_a_digest(store: ImageLayout) -> None:
    keep(store, "clowder")
    one, other = read_aimage(store, REFERENCE), read_aimage(store, REFERENCE)
    assert one.manifest is other.manifest
    assert one.aimage is other.aimage
    assert one.aimage.properties is other.aimage.properties


def test_a_damaged_manifest_or_config_is_refused(store: ImageLayout) -> None:
    manifest = keep(store, "clowder")
    for content in (manifest.config, manifest.descriptor):
        path = store.find_path(content)
        good = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(good[:-2] + b" }")
        with pytest.raises(VerificationError):
            read_aimage(store, REFERENCE)
        path.write_bytes(good)
    store.find_path(manifest.config).unlink()
    with pytest.raises(NotFoundError):
        read_aimage(store, REFERENCE)


def test_a_read_error_of_a_manifest_is_a_store_error(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Reader, _: Descriptor) -> NoReturn:
        file.close()
        raise OSError(errno.EIO, "Input/output error")

    found = keep(store, "clowder").descriptor
    monkeypatch.setattr("clowder_aimage.layout.layout.read_all", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        store.read(found)


def recompressed(
    store: ImageLayout,
    media_type: str = mediatype.OCI_LAYER_TAR_GZIP,
    pack: Callable[..., bytes] = gzip.compress,
) -> None:
    """Store the container dialect after a tool compressed its layers and dropped annotations."""
    manifest, config = DIALECTS["container"].write(aimage())
    document = json.loads(manifest.raw)
    for layer, data in zip(document["layers"], (FILE, TENSOR), strict=True):
        packed = Descriptor.of(media_type, pack(data))
        store.push(packed, build_bytes_body(pack(data)))
        layer.clear()
        layer.update(packed.to_json())
    made = Manifest.build(document)
    store.push(made.config, build_bytes_body(config))
    store.push(made.descriptor, build_bytes_body(made.raw), REFERENCE)


def fixed_gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    "media_type",
    [mediatype.OCI_LAYER_TAR_GZIP, "application/vnd.docker.image.rootfs.diff.tar.gzip"],
)
def test_compressed_layers_are_inflated(store: ImageLayout, media_type: str) -> None:
    recompressed(store, media_type, fixed_gzip)
    stored = read_aimage(store, REFERENCE)
    assert not any(store.exists(layer.descriptor) for layer in stored.aimage.layers)
    inflate(store, stored)
    for layer, data in zip(stored.aimage.layers, (FILE, TENSOR), strict=True):
        assert store.find_path(layer.descriptor).read_bytes() == data
    assert DIALECTS["clowder"].write(stored.aimage)[0] == DIALECTS["clowder"].write(aimage())[0]


@pytest.mark.parametrize(
    ("pack", "error"),
    [
        (lambda data: b"not gzip at all", FormatError),
        (lambda data: fixed_gzip(data)[:12] + b"\xff" * 20, (FormatError, VerificationError)),
        (lambda data: fixed_gzip(data[:-1]), VerificationError),
        (lambda data: fixed_gzip(bytes(1_000_000)), VerificationError),  # a decompression bomb
    ],
    ids=["other", "torn", "shorter", "bomb"],
)
def test_inflate_refuses_content_of_another_diff_id(
    store: ImageLayout,
    pack: Callable[[Any], bytes],
    error: type[ContentError] | tuple[type[FormatError], type[VerificationError]],
) -> None:
    recompressed(store, pack=pack)
    stored = read_aimage(store, REFERENCE)
    with pytest.raises(error):
        inflate(store, stored)
    assert not any(store.exists(layer.descriptor) for layer in stored.aimage.layers)


def test_an_unsupported_compression_is_refused(store: ImageLayout) -> None:
    recompressed(store, "application/vnd.oci.image.layer.v1.tar+xz", lambda data: b"xz" + data)
    with pytest.raises(FormatError, match="unsupported compression"):
        inflate(store, read_aimage(store, REFERENCE))


# -- skopeo


def run_skopeo(skopeo: str, *arguments: object) -> bytes:
    done = run([skopeo, *arguments], timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.integration
def test_skopeo_reads_the_layout(store: ImageLayout, skopeo: str) -> None:
    manifest = keep(store, "clowder")
    shown = run_skopeo(skopeo, "inspect", "--raw", f"oci:{store.root}:{REFERENCE}")
    assert shown == manifest.raw


@pytest.mark.integration
def test_a_copy_by_skopeo_is_read(store: ImageLayout, skopeo: str, tmp_path: Path) -> None:
    manifest = keep(store, "clowder")
    other = ImageLayout(tmp_path / "other")
    source = f"oci:{store.root}:{REFERENCE}"
    run_skopeo(skopeo, "--insecure-policy", "copy", source, f"oci:{other.root}:{REFERENCE}")
    stored = read_aimage(other, REFERENCE)
    assert stored.manifest.raw == manifest.raw
    assert stored.aimage == aimage()
    assert all(other.exists(layer.descriptor) for layer in stored.aimage.layers)


@pytest.mark.integration
def test_skopeo_and_aimage_share_a_layout(store: ImageLayout, skopeo: str, tmp_path: Path) -> None:
    """Each keeps the other's names."""
    manifest = keep(store, "clowder")
    other = ImageLayout(tmp_path / "other")
    other.push(manifest.descriptor, build_bytes_body(manifest.raw))
    copied = Reference.parse("registry.example.com/copied:v1")
    target = f"oci:{store.root}:{copied}"
    run_skopeo(skopeo, "--insecure-policy", "copy", f"oci:{store.root}:{REFERENCE}", target)
    assert {name for name, _ in store.list_tags()} == {str(REFERENCE), str(copied)}
    assert store.resolve(copied).digest == manifest.digest
    store.tag(manifest.descriptor, Reference.parse("ours:v2"))
    for name in (REFERENCE, copied, "ours:v2"):
        assert run_skopeo(skopeo, "inspect", "--raw", f"oci:{store.root}:{name}") == manifest.raw


@pytest.mark.integration
def test_layers_compressed_by_skopeo_are_inflated(
    store: ImageLayout, skopeo: str, tmp_path: Path
) -> None:
    manifest = keep(store, "container")
    other = ImageLayout(tmp_path / "other")
    source, target = f"oci:{store.root}:{REFERENCE}", f"oci:{other.root}:{REFERENCE}"
    run_skopeo(skopeo, "--insecure-policy", "copy", "--dest-compress", source, target)
    stored = read_aimage(other, REFERENCE)
    assert stored.manifest.raw != manifest.raw  # otherwise this test proves nothing
    inflate(other, stored)
    assert stored.aimage == aimage()
    for layer, data in zip(stored.aimage.layers, (FILE, TENSOR), strict=True):
        assert other.find_path(layer.descriptor).read_bytes() == data
