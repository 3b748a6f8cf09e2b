"""Tar layers of other tools are unpacked safely."""

from __future__ import annotations

import gzip
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body, tar
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.errors import FormatError, VerificationError
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Descriptor, mediatype
from tests.content.artifact import manifest
from tests.exporter.conftest import KIT, NAME, Artifact, blob, files_in, tar_of

PACK = "application/vnd.cncf.model.weight.v1.tar"


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0, mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, target, size, mode
    return info


def refused(
    artifact: Artifact,
    *members: Any,
    said: str = "layer kit|is a file|duplicate|case-insensitive|invalid layer name",
) -> None:
    artifact.add_tar(*members)
    with pytest.raises(FormatError, match=said) as caught:
        artifact.finish().export()
    assert caught.value.exit_code == 5
    artifact.check_nothing_left()


@pytest.mark.parametrize(("kind", "compression"), [(KIT, "gzip"), (PACK, "zstd"), (PACK, "")])
def test_tar_layers_are_unpacked(artifact: Artifact, kind: str, compression: str) -> None:
    long = "d" * 120 + "/" + "n" * 200
    members = [("Kitfile", b"manifest"), ("./model/w.gguf", b"weights" * 9999), (long, b"long")]
    data = tar_of(entry("./", tarfile.DIRTYPE), entry("model/", tarfile.DIRTYPE), *members)
    if compression == "gzip":
        data = gzip.compress(data)
    elif compression == "zstd":
        data = pytest.importorskip("zstandard").compress(data)
    artifact.add("layer", data, f"{kind}+{compression}" if compression else kind)
    exported = artifact.finish().export()
    assert files_in(artifact.out) == {name.removeprefix("./"): text for name, text in members}
    assert (exported.files, exported.size) == (3, sum(len(text) for _, text in members))


def test_a_modelkit_of_kitops_is_unpacked(artifact: Artifact) -> None:
    """Its tars hold paths relative to the kit, with their parent directories.

    See kitops-ml/kitops, pkg/lib/filesystem/tar.go at 35919cd68f5d.
    """
    there = entry("model", tarfile.DIRTYPE)
    model = artifact.add_tar(there, ("model/w.gguf", b"weights"), packed=True).descriptor
    docs = artifact.add_tar(("README.md", b"words")).descriptor
    kitfile = {"manifestVersion": "1.0.0", "model": {"path": "model/w.gguf"}}
    config = Descriptor.of(
        "application/vnd.kitops.modelkit.config.v1+json", json.dumps(kitfile).encode()
    )
    artifact.store.push(config, build_bytes_body(json.dumps(kitfile).encode()))
    docs = replace(docs, media_type="application/vnd.kitops.modelkit.docs.v1.tar")
    made = manifest(config, [model, docs])
    artifact.store.push(made.descriptor, build_bytes_body(made.raw), NAME)
    artifact.export()
    assert files_in(artifact.out) == {"model/w.gguf": b"weights", "README.md": b"words"}


CARD = b"---\nlicense: mit\n---\n"


def neighbour(
    artifact: Artifact, dialect: str, licensed: str, *layers: tuple[str, str, bytes]
) -> Artifact:
    """Return an artifact of another tool with these layers: kind, path and bytes of each."""
    rows = []
    for kind, path, data in layers:
        annotations = {"org.cncf.model.filepath": path} if path else {}
        rows.append(replace(Descriptor.of(kind, data), annotations=annotations))
        artifact.store.push(rows[-1], build_bytes_body(data))
    kind, document = {
        "kitops": (
            "vnd.kitops.modelkit.config.v1",
            {
                "package": {"license": licensed},
                "model": {"path": "model.safetensors"},
                "docs": [{"path": "docs"}],
            },
        ),
        "modelpack": ("vnd.cncf.model.config.v1", {"descriptor": {"licenses": [licensed]}}),
        "docker": (
            "vnd.docker.ai.model.config.v0.1",
            {"config": {"safetensors": {"general.license": licensed}}},
        ),
    }[dialect]
    raw = json.dumps(document).encode()
    config = Descriptor.of(f"application/{kind}+json", raw)
    artifact.store.push(config, build_bytes_body(raw))
    made = manifest(config, rows)
    artifact.store.push(made.descriptor, build_bytes_body(made.raw), NAME)
    return artifact


SAFETENSORS = blob({"x": ("U8", (1,), b"x")})


@pytest.mark.parametrize(
    ("dialect", "weights", "docs", "card"),
    [
        ("kitops", "kitops.modelkit.model.v1.raw", "kitops.modelkit.docs.v1.tar", "README.md"),
        ("modelpack", "cncf.model.weight.v1.raw", "cncf.model.doc.v1.tar", "notes.md"),
        ("docker", "docker.ai.safetensors", "docker.ai.dir.tar", "notes.md"),
    ],
)
def test_foreign_models_keep_their_own_card_or_none(
    artifact: Artifact, dialect: str, weights: str, docs: str, card: str
) -> None:
    layers = [
        (f"application/vnd.{weights}", "model.safetensors", SAFETENSORS),
        (f"application/vnd.{docs}", "docs", tar_of((card, b"# Theirs"))),
    ]
    made = neighbour(artifact, dialect, "mit", *layers)
    said = read_aimage(made.store, NAME).aimage.properties
    assert (said["license"], said["format"]) == ("mit", "transformers")
    assert made.exported() == {"model.safetensors": SAFETENSORS, card: b"# Theirs"}


def test_foreign_models_without_a_tar_get_no_card(artifact: Artifact) -> None:
    layer = ("application/vnd.cncf.model.weight.v1.raw", "model.safetensors", SAFETENSORS)
    assert neighbour(artifact, "modelpack", "mit", layer).exported().keys() == {"model.safetensors"}


@pytest.mark.parametrize("dialect", ["clowder", "modelpack", "container"])
def test_own_models_get_a_card_if_the_name_is_free(artifact: Artifact, dialect: str) -> None:
    artifact.config |= {"format": "torchscript", "license": "mit"}
    artifact.add("model.pt", b"weights", mediatype.AIMAGE_TORCHSCRIPT)
    assert artifact.finish(dialect).exported() == {"model.pt": b"weights", "README.md": CARD}


@pytest.mark.parametrize("name", ["readme.MD", "README.md/inside"])
def test_a_card_does_not_replace_a_file(artifact: Artifact, name: str) -> None:
    artifact.config |= {"format": "onnx", "license": "mit"}
    artifact.add(name, b"mine")
    assert artifact.finish().exported() == {name: b"mine"}


def test_a_card_is_not_written_beside_a_tar(artifact: Artifact) -> None:
    artifact.config |= {"format": "onnx", "license": "mit"}
    artifact.add_tar(("a", b"1"))
    assert artifact.finish().exported() == {"a": b"1"}


def test_a_member_with_an_overlong_name_is_refused(artifact: Artifact) -> None:
    name = "d/" + "n" * 256
    refused(artifact, (name, b"x"), said=r"has \d+ bytes; the limit is 255")
    assert name not in (path.name for path in artifact.home.iterdir())


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_other_members_with_overlong_names_are_refused(artifact: Artifact, kind: bytes) -> None:
    refused(artifact, entry("n" * 256, kind, "x"), said="has 256 bytes")


def test_overlong_link_target_is_refused(artifact: Artifact) -> None:
    refused(
        artifact, entry("link", tarfile.SYMTYPE, "x/" * 2500 + "x"), said="the link target has more"
    )


def test_many_members_are_unpacked(artifact: Artifact) -> None:
    members = [(f"d{n % 7}/{n}", b"%d" % n) for n in range(60)]
    artifact.add_tar(*members)
    assert artifact.finish().exported() == dict(members)


def test_several_tars_share_directories(artifact: Artifact) -> None:
    artifact.add_tar(entry("a", tarfile.DIRTYPE), ("a/one", b"1"), name="first", packed=True)
    artifact.add_tar(entry("a", tarfile.DIRTYPE), ("a/two", b"2"), name="second")
    artifact.add("a/three", b"3")
    assert artifact.finish().exported() == {"a/one": b"1", "a/two": b"2", "a/three": b"3"}


def test_only_the_executable_bit_is_kept(artifact: Artifact) -> None:
    artifact.add_tar(
        entry("run.sh", mode=0o6777), entry("data", mode=0o600), entry("d", tarfile.DIRTYPE, mode=0)
    )
    artifact.finish().export()
    modes = {path.name: path.stat().st_mode & 0o7777 for path in artifact.out.iterdir()}
    assert modes == {"run.sh": 0o755, "data": 0o644, "d": 0o755}


def test_links_inside_the_directory_are_unpacked(artifact: Artifact) -> None:
    artifact.add_tar(
        ("blobs/one", b"content"),
        entry("snapshots/x/file", tarfile.SYMTYPE, "../../blobs/one"),
        entry("hard", tarfile.LNKTYPE, "blobs/one"),
        entry("dangling", tarfile.SYMTYPE, "not/there"),
    )
    artifact.finish().export()
    assert (artifact.out / "snapshots/x/file").readlink() == Path("../../blobs/one")
    assert artifact.out.joinpath("snapshots/x/file").read_bytes() == b"content"
    assert artifact.out.joinpath("hard").read_bytes() == b"content"


@pytest.mark.parametrize("name", ["/etc/passwd", "../out", "a/..", "a\\b", "x" * 2000])
def test_member_names_that_lead_out_are_refused(artifact: Artifact, name: str) -> None:
    refused(artifact, (name, b"evil"))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("link", "/etc/passwd"),
        ("link", ".."),
        ("./link", "./../x"),
        ("link", "d/../../x"),
        ("link", ""),
        ("d/link", "../../x"),
        ("d/link", "../d/../x"),
        ("link", "a\u202eb"),
    ],
)
def test_symbolic_links_out_of_the_directory_are_refused(
    artifact: Artifact, name: str, target: str
) -> None:
    refused(artifact, entry(name, tarfile.SYMTYPE, target), said="outside the directory")


@pytest.mark.parametrize("target", ["../x", "missing", "link", "d"])
def test_hard_links_to_other_places_are_refused(artifact: Artifact, target: str) -> None:
    refused(
        artifact,
        entry("d", tarfile.DIRTYPE),
        entry("link", tarfile.SYMTYPE, "file"),
        entry("hard", tarfile.LNKTYPE, target),
    )


def test_a_hard_link_does_not_reach_the_store(artifact: Artifact) -> None:
    refused(artifact, entry("hard", tarfile.LNKTYPE, str(artifact.home / "store/index.json")))


def test_nothing_is_written_through_a_link(artifact: Artifact) -> None:
    members = [entry("d", tarfile.SYMTYPE, "other"), ("d/file", b"evil")]
    refused(artifact, *members)


def test_a_link_does_not_replace_a_directory(artifact: Artifact) -> None:
    refused(artifact, ("d/file", b"x"), entry("d", tarfile.SYMTYPE, "e"), said="is a file, but")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z"])
def test_devices_and_pipes_are_refused(artifact: Artifact, kind: bytes) -> None:
    refused(artifact, entry("x", kind), said="not a file, directory or link")


@pytest.mark.parametrize(
    "members",
    [
        [("a", b"1"), ("./a", b"2")],
        [("A", b"1"), ("a", b"2")],
        [("D/x", b"1"), ("d/y", b"2")],
        [("a", b"1"), ("a/b", b"2")],
        [("a/b", b"1"), ("a", b"2")],
    ],
    ids=str,
)
def test_colliding_member_names_are_refused(
    artifact: Artifact, members: list[tuple[str, bytes]]
) -> None:
    refused(artifact, *members)


def test_a_tar_does_not_replace_a_file_of_another_layer(artifact: Artifact) -> None:
    artifact.add("readme", b"ours")
    refused(artifact, ("README", b"theirs"), said="case-insensitive")


def test_a_sparse_file_is_refused(artifact: Artifact) -> None:
    info = entry("sparse", tarfile.GNUTYPE_SPARSE, size=512)
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[386:410] = b"00000000000\x0000000001000\x00"
    raw[483:495] = b"77777777777\x00"
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    artifact.add("kit", bytes(raw) + bytes(2048), KIT)
    with pytest.raises(FormatError):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_false_member_size_is_refused(artifact: Artifact) -> None:
    data = entry("big", size=1 << 40).tobuf() + bytes(4096)
    artifact.add("kit", data, KIT)
    with pytest.raises(FormatError, match="the limit is"):
        artifact.finish().export()
    artifact.check_nothing_left()


@pytest.mark.parametrize("cut", [100, 512, 700])
def test_a_truncated_archive_is_refused(artifact: Artifact, cut: int) -> None:
    artifact.add("kit", tar_of(("a", b"x" * 600), ("b", b"y"))[:cut], KIT)
    with pytest.raises(FormatError):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_damaged_header_is_refused(artifact: Artifact) -> None:
    data = bytearray(tar_of(("a", b"x"), ("b", b"y")))
    data[1024:1536] = b"?" * 512
    artifact.add("kit", bytes(data), KIT)
    with pytest.raises(FormatError, match="damaged"):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_files_that_are_not_tars_are_refused(artifact: Artifact) -> None:
    artifact.add("kit", b"not a tar" * 200, KIT)
    with pytest.raises(FormatError, match="layer kit is not a tar archive"):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_a_damaged_tar_is_refused(artifact: Artifact) -> None:
    layer = artifact.add_tar(("a", b"x" * 100_000))
    artifact.finish().damage(layer)
    with pytest.raises(VerificationError):
        artifact.export()
    artifact.check_nothing_left()


def test_an_endless_header_takes_no_memory(artifact: Artifact) -> None:
    info = entry("x" * 90, tarfile.GNUTYPE_LONGNAME, size=1 << 30)
    artifact.add("kit", gzip.compress(info.tobuf() + bytes(1 << 20)), f"{KIT}+gzip")
    with pytest.raises(FormatError, match="a header of more than 65536 bytes"):
        artifact.finish().export()
    artifact.check_nothing_left()


@pytest.mark.parametrize("packed", [True, False])
def test_too_many_members_are_refused(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    created: list[str] = []
    real = OpenDirectory.create

    def create(root: OpenDirectory, name: str, mode: int = 0) -> int:
        created.append(name)
        return real(root, name, mode)

    monkeypatch.setattr(tar, "MAX_MEMBERS", 3)
    monkeypatch.setattr(OpenDirectory, "create", create)
    artifact.add_tar(*((str(n), b"x" * 600) for n in range(4)), packed=packed)
    with pytest.raises(FormatError, match="layer kit has more than 3 members"):
        artifact.finish().export()
    artifact.check_nothing_left()
    assert not {"0", "1", "2"} & set(created) or packed  # a plain one is counted before


def test_a_tar_bomb_is_refused(artifact: Artifact) -> None:
    zeros = gzip.compress(bytes(16 << 20))
    data = gzip.compress(entry("big", size=1 << 28).tobuf()) + 16 * zeros
    artifact.add("kit", data, f"{KIT}+gzip")
    with pytest.raises(FormatError, match="decompresses to more than"):
        artifact.finish().export()
    artifact.check_nothing_left()
