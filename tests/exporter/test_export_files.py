"""Whole files are copied, linked or decompressed; conflicting names are refused."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import sys
from typing import Any, NoReturn

import pytest

from clowder_aimage.errors import FormatError, VerificationError
from clowder_aimage.export import export
from clowder_aimage.exporter import directory
from clowder_aimage.exporter import writer as export_writer
from clowder_aimage.exporter.directory import LinkMethod
from clowder_aimage.oci import mediatype
from tests.exporter.conftest import NAME, Artifact

UNKNOWN = "application/vnd.example.plan.v7"
DATA = bytes(range(256)) * 9000


def test_layers_of_every_kind_are_exported_as_their_files(artifact: Artifact) -> None:
    kinds = {
        "weights.gguf": mediatype.AIMAGE_GGUF,
        "model.onnx": mediatype.AIMAGE_ONNX,
        "saved_model/variables/variables.index": mediatype.AIMAGE_SAVEDMODEL,
        "adapters/style/adapter_model.safetensors": mediatype.AIMAGE_LORA,
        "model.safetensors": mediatype.AIMAGE_TRANSFORMERS,
        "deep/er/plan": UNKNOWN,
        "ep.bin": "application/vnd.oci.image.layer.v1+gzip",
        "ep.zst": "application/vnd.clowder.aimage.ep.layer.v1+zstd",
        "bundle.tgz": "application/vnd.my.bundle.v1.tar+gzip",
        "thing": "application/vnd.my.thing.tar",
        "code.gz": "application/vnd.my.code.v1.raw+gzip",
        "rootfs": mediatype.OCI_LAYER_TAR_GZIP,
        "system": "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "plan.gz": f"{UNKNOWN}+gzip",
        "empty": mediatype.AIMAGE_FILE,
    }
    wanted = {name: DATA + name.encode() if name != "empty" else b"" for name in kinds}
    for name, media_type in kinds.items():
        artifact.add(name, wanted[name], media_type)
    assert artifact.finish().exported() == wanted
    assert artifact.out.joinpath("model.onnx").stat().st_mode & 0o777 == 0o644
    assert artifact.out.joinpath("deep/er").stat().st_mode & 0o777 == 0o755
    artifact.check_nothing_left(["out"])


def test_a_whole_safetensors_file_with_the_tensor_type_is_a_file(artifact: Artifact) -> None:
    artifact.add("unet/model.safetensors", b"anything", mediatype.AIMAGE_SAFETENSORS)
    assert artifact.finish().exported() == {"unet/model.safetensors": b"anything"}


@pytest.mark.parametrize("dialect", ["clowder", "container", "modelpack"])
def test_every_dialect_exports_the_same_files(artifact: Artifact, dialect: str) -> None:
    artifact.add("notes.txt", b"words")
    artifact.add("w.gguf", gzip.compress(DATA), f"{mediatype.AIMAGE_GGUF}+gzip", DATA)
    assert artifact.finish(dialect).exported() == {"notes.txt": b"words", "w.gguf": DATA}


@pytest.mark.parametrize(("compression", "is_said"), [("gzip", True), ("zstd", False)])
def test_compressed_files_are_decompressed(
    artifact: Artifact, compression: str, is_said: bool
) -> None:
    data = gzip.compress(DATA)
    if compression == "zstd":
        data = pytest.importorskip("zstandard").compress(DATA)
    said = DATA if is_said else None
    artifact.add("w.gguf", data, f"{mediatype.AIMAGE_GGUF}+{compression}", said)
    exported = artifact.finish().export()
    assert artifact.out.joinpath("w.gguf").read_bytes() == DATA
    assert (exported.files, exported.size) == (1, len(DATA))


def test_a_foreign_compressed_layer_with_a_diff_id_is_decompressed(artifact: Artifact) -> None:
    artifact.add("plan", gzip.compress(DATA), f"{UNKNOWN}+gzip", DATA)
    assert artifact.finish().exported() == {"plan": DATA}


@pytest.mark.parametrize("kind", ["cncf.model.weight.config.v1", "kitops.modelkit.code.v1"])
def test_a_compressed_raw_file_of_another_tool_is_decompressed(
    artifact: Artifact, kind: str
) -> None:
    artifact.add("code.py", gzip.compress(DATA), f"application/vnd.{kind}.raw+gzip")
    assert artifact.finish().exported() == {"code.py": DATA}


def test_content_that_differs_from_the_manifest_is_refused(artifact: Artifact) -> None:
    artifact.add("w.gguf", gzip.compress(DATA), f"{mediatype.AIMAGE_GGUF}+gzip", DATA[::-1])
    with pytest.raises(VerificationError):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_a_decompression_bomb_stops_early_and_leaves_nothing(artifact: Artifact) -> None:
    artifact.add("w.gguf", 4 * gzip.compress(bytes(20 << 20)), f"{mediatype.AIMAGE_GGUF}+gzip")
    with pytest.raises(FormatError, match="decompresses to more than 67108864"):
        artifact.finish().export()
    artifact.check_nothing_left()


# -- names


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b/c", "a/b")])
def test_a_file_where_a_directory_must_be_is_refused(
    artifact: Artifact, names: tuple[str, str]
) -> None:
    for name in names:
        artifact.add(name, name.encode())
    with pytest.raises(FormatError, match=r"is a file, but .* requires a directory") as caught:
        artifact.finish().export()
    assert caught.value.exit_code == 5
    artifact.check_nothing_left()


@pytest.mark.parametrize("names", [("A/x", "a/y"), ("\u00e9", "e\u0301"), ("STRASSE", "straße")])
def test_names_that_collide_on_the_file_system_are_refused(
    artifact: Artifact, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        artifact.add(name, b"")
    artifact.finish()
    monkeypatch.setattr(export_writer, "is_folding", lambda _: True)
    with pytest.raises(FormatError, match="case-insensitive"):
        artifact.export()
    artifact.check_nothing_left()
    monkeypatch.setattr(export_writer, "is_folding", lambda _: False)
    assert set(artifact.exported()) == set(names)


def test_a_generated_file_does_not_replace_one_of_the_model(artifact: Artifact) -> None:
    artifact.add_tensors("x", {"x": ("U8", (1,), b"x")})
    artifact.add("model.safetensors", b"", mediatype.AIMAGE_TRANSFORMERS)
    with pytest.raises(FormatError, match="duplicate file name"):
        artifact.finish().export()
    artifact.check_nothing_left()


@pytest.mark.parametrize("name", ["d/" + "n" * 256 + "/x", "é" * 128])
def test_an_overlong_name_is_refused(artifact: Artifact, name: str) -> None:
    artifact.add(name, b"")
    with pytest.raises(FormatError, match=r"has \d+ bytes; the limit is 255") as caught:
        artifact.finish().export()
    assert caught.value.exit_code == 5
    assert repr(name)[:100] in caught.value.message
    artifact.check_nothing_left()


def test_an_overlong_path_is_refused(artifact: Artifact) -> None:
    name = "/".join(["日" * 80] * 12)
    artifact.add(name, b"x")
    store = artifact.finish().store
    home = artifact.home.joinpath(*["d" * 100] * 16)
    home.mkdir(parents=True)
    with pytest.raises(FormatError, match=r"has \d+ bytes; the limit is") as caught:
        export(store, NAME, home / "out")
    assert caught.value.hint == "export to a directory with a shorter path"
    assert list(home.iterdir()) == []


def test_a_name_of_maximum_length_is_exported(artifact: Artifact) -> None:
    names = {"n" * 255, "é" * 127, "/".join(["d" * 255] * 4)}
    for name in names:
        artifact.add(name, b"x")
    assert artifact.finish().exported().keys() == names


# -- links


def test_links_share_the_bytes_of_whole_files_and_copy_the_rest(artifact: Artifact) -> None:
    layer = artifact.add("w.gguf", DATA, mediatype.AIMAGE_GGUF)
    artifact.add("packed", gzip.compress(DATA), f"{mediatype.AIMAGE_FILE}+gzip")
    artifact.add_tensors("x", {"x": ("U8", (1,), b"x")})
    exported = artifact.finish().export(links=True)
    path = artifact.store.find_path(layer.descriptor)
    assert sum(exported.methods.values()) == 1
    assert exported.methods[LinkMethod.COPIED] == 0
    assert path.samefile(artifact.out / "w.gguf") == bool(exported.methods[LinkMethod.HARD_LINKED])
    assert artifact.out.joinpath("w.gguf").read_bytes() == DATA
    assert artifact.out.joinpath("packed").read_bytes() == DATA
    assert artifact.out.joinpath("model.safetensors").stat().st_nlink == 1


def test_without_links_nothing_is_shared(artifact: Artifact) -> None:
    layer = artifact.add("w.gguf", DATA, mediatype.AIMAGE_GGUF)
    exported = artifact.finish().export()
    assert exported.methods == {LinkMethod.COPIED: 1}
    assert artifact.store.find_path(layer.descriptor).stat().st_nlink == 1


def test_reflinks_create_independent_files(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = artifact.add("w.gguf", DATA, mediatype.AIMAGE_GGUF)
    asked = []

    def ioctl(made: Any, request: Any, source: Any) -> None:
        asked.append(request)
        os.write(made, os.pread(source, len(DATA), 0))

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(sys, "platform", "linux")
    exported = artifact.finish().export(links=True)
    assert exported.methods == {LinkMethod.REFLINKED: 1}
    assert asked == [0x40049409]
    assert artifact.out.joinpath("w.gguf").read_bytes() == DATA
    assert artifact.out.joinpath("w.gguf").stat().st_mode & 0o777 == 0o644
    assert artifact.store.find_path(layer.descriptor).stat().st_nlink == 1


def test_files_that_cannot_be_linked_are_copied(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact.add("w.gguf", DATA, mediatype.AIMAGE_GGUF)
    counted: list[Any] = []

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EMLINK, "Too many links")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(directory, "_reflink", lambda *_: False)
    exported = artifact.finish().export(links=True, on_written=counted.append)
    assert exported.methods == {LinkMethod.COPIED: 1}
    assert artifact.out.joinpath("w.gguf").read_bytes() == DATA
    assert sum(counted) == len(DATA)


def test_a_damaged_blob_is_not_linked(artifact: Artifact) -> None:
    layer = artifact.add("w.gguf", DATA, mediatype.AIMAGE_GGUF)
    artifact.finish().damage(layer)
    with pytest.raises(VerificationError):
        artifact.export(links=True)
    artifact.check_nothing_left()


def test_progress_counts_every_planned_byte(artifact: Artifact) -> None:
    artifact.add("w.gguf", DATA, mediatype.AIMAGE_GGUF)
    artifact.add("packed", gzip.compress(DATA), f"{mediatype.AIMAGE_FILE}+gzip")
    artifact.add_tar(("in/side", DATA))
    artifact.add_tensors("x", {"x": ("U8", (len(DATA),), DATA)})
    counted: list[Any]
    planned, counted = [], []
    artifact.finish().export(
        on_plan=lambda plan: planned.append(plan.size), on_written=counted.append
    )
    assert planned == [sum(counted)]
    assert artifact.out.joinpath("in/side").read_bytes() == DATA
