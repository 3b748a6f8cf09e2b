"""AImages of other tools, whole files, compressed files and tars: what is packed runs."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("zstandard")

import zstandard

from clowder_aimage.content import build_bytes_body
from clowder_aimage.content import fetch as content_fetch
from clowder_aimage.create import create
from clowder_aimage.dialect import DIALECTS, AImage
from clowder_aimage.errors import AImageError, FormatError, NoSpaceError, VerificationError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout, unpacking
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image
from clowder_aimage.model.runnable import describe, open_runnable
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from tests.conftest import TINY
from tests.store import unshare
from tests.text.tiny_text import write_model

NAME = Reference.parse("packed")
FILEPATH = "org.cncf.model.filepath"
MODELPACK = "application/vnd.cncf.model."
KITOPS = "application/vnd.kitops.modelkit."
GGUF = mediatype.AIMAGE_GGUF
Part = tuple[str, bytes, dict[str, str]]


def read_files(directory: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def make_tar(files: Mapping[str, bytes], **fields: Any) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def pack(
    store: ImageLayout, parts: list[Part], config: Any = None, kind: str = "", artifact: str = ""
) -> StoredAImage:
    """Store an artifact of layers with media types and annotations."""

    def push(media_type: str, data: bytes, annotations: Mapping[str, str]) -> Descriptor:
        blob = Descriptor(media_type, Digest.of(data), len(data), annotations)
        store.push(blob, build_bytes_body(data))
        return blob

    described = push(kind or mediatype.AIMAGE_CONFIG, json.dumps(config or {}).encode(), {})
    rows = [push(*part).to_json() for part in parts]
    document = {"schemaVersion": 2, "config": described.to_json(), "layers": rows}
    manifest = Manifest.build(document | ({"artifactType": artifact} if artifact else {}))
    store.push(manifest.descriptor, build_bytes_body(manifest.raw), NAME)
    return read_aimage(store, NAME)


def pack_modelpack(store: ImageLayout, parts: list[tuple[str, str, bytes]]) -> StoredAImage:
    rows = [(MODELPACK + kind, data, {FILEPATH: path}) for kind, path, data in parts]
    kind = f"{MODELPACK}config.v1+json"
    config = {"descriptor": {"name": "a model"}, "config": {"format": "safetensors"}}
    return pack(store, rows, config, kind, f"{MODELPACK}manifest.v1+json")


def pack_raw(store: ImageLayout, files: Mapping[str, bytes], at: str = "") -> StoredAImage:
    return pack_modelpack(store, [("weight.v1.raw", at + name, files[name]) for name in files])


def pack_tars(store: ImageLayout, files: Mapping[str, bytes]) -> StoredAImage:
    groups: dict[str, dict[str, bytes]] = {}
    for name, data in files.items():
        groups.setdefault(name.partition("/")[0], {})[name] = data
    return pack_modelpack(
        store,
        [
            ("weight.v1.tar+gzip", top, gzip.compress(make_tar(members)))
            for top, members in groups.items()
        ],
    )


def pack_kit(store: ImageLayout, files: Mapping[str, bytes], at: str = "model/") -> StoredAImage:
    data = zstandard.compress(make_tar({f"./{at}{name}": files[name] for name in files}))
    kitfile = {"manifestVersion": "1.0.0", "model": {"name": "m", "path": f"./{at}"}}
    kind = f"{KITOPS}config.v1+json"
    return pack(store, [(f"{KITOPS}model.v1.tar+zstd", data, {})], kitfile, kind)


def pack_files(store: ImageLayout, directory: Path, compress: str = "") -> StoredAImage:
    create(store, NAME, directory, form=ModelForm(whole_files=True, compression=compress))
    return read_aimage(store, NAME)


def pack_ollama(store: ImageLayout, directory: Path) -> StoredAImage:
    """Store the manifest that ollama writes, which has no config of an AImage."""
    create(store, Reference.parse("made"), directory)
    made = read_aimage(store, Reference.parse("made")).aimage
    manifest, _ = DIALECTS["ollama"].write(made)
    rows = [(row.media_type, b"", row.extra) for row in manifest.layers]
    assert rows
    config = b'{"model_format":"safetensors","capabilities":["image"]}'
    described = Descriptor(mediatype.DOCKER_CONFIG, Digest.of(config), len(config))
    store.push(described, build_bytes_body(config))
    document = json.loads(manifest.raw) | {"config": described.to_json()}
    changed = Manifest.build(document)
    store.push(changed.descriptor, build_bytes_body(changed.raw), NAME)
    return read_aimage(store, NAME)


FILES = {name: data for name, data in read_files(TINY).items() if name != "README.md"}
PICTURES: dict[str, Callable[[ImageLayout], StoredAImage]] = {
    "modelpack": partial(pack_raw, files=FILES),
    "modelpack in a directory": partial(pack_raw, files=FILES, at="team/tiny/"),
    "modelpack in tars": partial(pack_tars, files=FILES),
    "kitops": partial(pack_kit, files=FILES),
    "whole files": partial(pack_files, directory=TINY),
    "compressed files": partial(pack_files, directory=TINY, compress="zstd"),
    "ollama": partial(pack_ollama, directory=TINY),
}


def draw(store: ImageLayout, aimage: AImage) -> np.ndarray[Any, Any]:
    pipeline = load_pipeline(store, aimage, dtype="float32")
    request = GenerateRequest.draft("a dog", steps=1, seed=3).apply_defaults(aimage)
    *_, picture = pipeline.generate(request)
    assert isinstance(picture, Image)
    return picture.pixels


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Any], Any]:
    store = ImageLayout(tmp_path_factory.mktemp("expected") / "store")
    create(store, NAME, TINY)
    aimage = read_aimage(store, NAME).aimage
    return aimage.properties, draw(store, aimage)


@pytest.mark.parametrize("form", PICTURES)
def test_an_image_model_runs_in_any_form(
    store: ImageLayout, form: str, expected: tuple[Mapping[str, Any], Any]
) -> None:
    stored = PICTURES[form](store)
    with store.lease() as lease:
        found = open_runnable(store, NAME, lease)
    assert found.descriptor == stored.descriptor
    properties, picture = expected
    for name in ("family", "pipeline", "defaults"):
        assert found.aimage.properties[name] == properties[name]
    assert {*found.aimage.properties["components"]} == {"text_encoder", "transformer", "vae"}
    assert find_runtime(found.aimage) is None
    assert np.array_equal(draw(store, found.aimage), picture)


def write_bytes_gguf(path: Path, part: int = 0, parts: int = 1) -> bytes:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    if parts > 1:
        writer.add_uint16("split.count", parts)
        writer.add_uint16("split.no", part)
        writer.add_int32("split.tensors.count", parts)
    writer.add_tensor(f"blk.{part}.attn_q.weight", np.full((64, 64), part, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_bytes_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def read_models(store: ImageLayout, aimage: AImage) -> list[bytes]:
    from clowder_aimage.model.llama.gguf_layers import read_layers

    return [file.path.read_bytes() for file in read_layers(store, aimage).model]


def title(name: str) -> dict[str, str]:
    return {mediatype.NAME: name}


TEXTS: dict[str, Callable[[ImageLayout, bytes], object]] = {
    "gzip without a name": lambda store, data: pack(
        store, [(f"{GGUF}+gzip", gzip.compress(data), {})]
    ),
    "zstd": lambda store, data: pack(
        store, [(f"{GGUF}+zstd", zstandard.compress(data), title("a.gguf"))], {"components": {}}
    ),
    "plain, an empty config": lambda store, data: pack(store, [(GGUF, data, title("a.gguf"))]),
    "modelpack": lambda store, data: pack_modelpack(
        store, [("weight.v1.raw+gzip", "m/a.gguf", gzip.compress(data))]
    ),
    "kitops": lambda store, data: pack_kit(store, {"a.gguf": data}),
}


@pytest.mark.parametrize("form", TEXTS)
def test_a_gguf_model_runs_in_any_form(store: ImageLayout, model: bytes, form: str) -> None:
    TEXTS[form](store, model)
    with store.lease() as lease:
        aimage = open_runnable(store, NAME, lease).aimage
    assert find_runtime(aimage) == "llama.cpp"
    assert aimage.properties["context"] == 64
    assert read_models(store, aimage) == [model]


def test_the_parts_of_a_model_without_names(store: ImageLayout, tmp_path: Path) -> None:
    parts = [write_bytes_gguf(tmp_path / f"{number}.gguf", number, 2) for number in range(2)]
    pack(store, [(f"{GGUF}+gzip", gzip.compress(part), {}) for part in parts])
    with store.lease() as lease:
        aimage = open_runnable(store, NAME, lease).aimage
    assert [layer.name for layer in aimage.layers] == [
        "model-00001-of-00002.gguf",
        "model-00002-of-00002.gguf",
    ]
    assert read_models(store, aimage) == parts


@pytest.mark.parametrize("form", [pack_raw, pack_tars, pack_kit])
def test_a_transformers_model_is_at_the_top(
    store: ImageLayout, tmp_path: Path, form: Callable[..., StoredAImage]
) -> None:
    write_model(tmp_path / "model", "qwen3")
    files = read_files(tmp_path / "model")
    form(store, {f"sub/{name}": data for name, data in files.items()})
    with store.lease() as lease:
        aimage = open_runnable(store, NAME, lease).aimage
    assert find_runtime(aimage) == "mlx-lm"
    assert aimage.properties["architecture"] == "Qwen3ForCausalLM"
    assert {layer.name for layer in aimage.layers} == {*files}


def test_data_stay_packed_and_a_file_may_be_in_two_tars(store: ImageLayout, model: bytes) -> None:
    tar = f"{KITOPS}model.v1.tar"
    parts: list[Part] = [
        (tar, make_tar({"a.gguf": model, "LICENSE": b"free"}), {}),
        (f"{KITOPS}code.v1.tar", make_tar({"LICENSE": b"free", "b.txt": b"b"}), {}),
        (f"{KITOPS}dataset.v1.tar", make_tar({"rows.csv": b"1,2"}), {}),
    ]
    pack(store, parts, {"model": {"path": "."}}, f"{KITOPS}config.v1+json")
    aimage = open_once(store)
    names = [layer.name for layer in aimage.layers]
    assert names[:3] == ["a.gguf", "LICENSE", "b.txt"]
    assert len(names) == 4 and names[3] == "dataset.2"
    assert read_models(store, aimage) == [model]
    parts[1] = (parts[1][0], make_tar({"LICENSE": b"other"}), {})
    pack(store, parts, {"model": {"path": "."}}, f"{KITOPS}config.v1+json")
    with pytest.raises(FormatError, match="duplicate layer name") as refused:
        open_once(store)
    assert refused.value.remedy == "export_to_pack"


# -- unpacked once, and collected with the packed ones


def count_blobs(store: ImageLayout) -> int:
    return sum(path.is_file() for path in (store.root / "blobs").rglob("*"))


def open_once(store: ImageLayout) -> AImage:
    with store.lease() as lease:
        return open_runnable(store, NAME, lease).aimage


def test_files_are_unpacked_once(
    store: ImageLayout, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = TEXTS["gzip without a name"](store, model)
    assert isinstance(stored, StoredAImage)
    assert describe(store, stored) == stored
    first = open_once(store)
    monkeypatch.setattr(unpacking, "open_decompressed", lambda *_: pytest.fail("again"))
    assert open_once(store).layers == first.layers
    assert find_runtime(describe(store, stored).aimage) == "llama.cpp"


def test_unpacked_files_are_collected_with_their_model(store: ImageLayout, model: bytes) -> None:
    pack_kit(store, {"a.gguf": model})
    before = count_blobs(store)
    assert read_models(store, open_once(store)) == [model]
    Collector(store, grace=0.0).run()
    assert read_models(store, open_once(store)) == [model]
    assert count_blobs(store) == before + 3
    store.untag(NAME)
    Collector(store, grace=0.0).run()
    assert count_blobs(store) == 0
    assert not list((store.root / ".aimage" / "unpacked").iterdir())


def test_what_is_interrupted_or_lost_is_unpacked_again(
    store: ImageLayout, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_kit(store, {"a.gguf": model})
    with monkeypatch.context() as patched:
        patched.setattr(unpacking, "write_shared", lambda *_: (_ for _ in ()).throw(OSError("x")))
        with pytest.raises(OSError, match="x"):
            open_once(store)
    assert read_models(store, open_once(store)) == [model]
    (record,) = (store.root / ".aimage" / "unpacked").iterdir()
    (layer,) = open_once(store).layers
    store.find_path(layer.descriptor).unlink()
    assert read_models(store, open_once(store)) == [model]
    record.write_text('{"packed": 1}')
    assert read_models(store, open_once(store)) == [model]


BOMB = gzip.compress(bytes(100 << 20))


@pytest.mark.parametrize(
    ("part", "error", "words"),
    [
        ((f"{GGUF}+gzip", BOMB, {}), FormatError, "decompresses to more than"),
        ((f"{GGUF}+gzip", b"abc", {}), FormatError, "is not valid gzip"),
        ((f"{GGUF}+gzip", gzip.compress(b"abc")[:-6], {}), FormatError, "truncated"),
        (
            (
                f"{GGUF}+gzip",
                gzip.compress(b"abc"),
                {mediatype.CONTENT_DIGEST: str(Digest.of(b"x")), mediatype.CONTENT_SIZE: "3"},
            ),
            VerificationError,
            "differs|digest",
        ),
        (
            (
                f"{GGUF}+gzip",
                gzip.compress(b"abcd"),
                {mediatype.CONTENT_DIGEST: str(Digest.of(b"abc")), mediatype.CONTENT_SIZE: "3"},
            ),
            AImageError,
            "bytes",
        ),
        ((f"{KITOPS}model.v1.tar", make_tar({"../a": b"x"}), {}), FormatError, "invalid layer"),
        ((f"{KITOPS}model.v1.tar", make_tar({"/a": b"x"}), {}), FormatError, "invalid layer name"),
        (
            (f"{KITOPS}model.v1.tar", make_tar({"a": b""}, type=tarfile.SYMTYPE, linkname="b"), {}),
            FormatError,
            "is not a plain file",
        ),
        ((f"{KITOPS}model.v1.tar", make_tar({"a": b"x" * 999})[:1024], {}), FormatError, "trunc"),
        ((f"{KITOPS}model.v1.tar", b"x" * 2048, {}), FormatError, "is not a tar archive"),
    ],
)
def test_what_cannot_be_unpacked_leaves_nothing(
    store: ImageLayout, part: Part, error: type[AImageError], words: str
) -> None:
    is_kit = part[0].startswith(KITOPS)
    pack(store, [part], {"model": {"path": "m"}}, f"{KITOPS}config.v1+json" if is_kit else "")
    before = count_blobs(store)
    with pytest.raises(error, match=words):
        open_once(store)
    assert count_blobs(store) == before
    assert not [*(store.root / ".aimage").rglob("unpacked/*")]


def test_a_damaged_layer_is_not_unpacked(store: ImageLayout, model: bytes) -> None:
    stored = pack_kit(store, {"a.gguf": model, "b.txt": b"x"}, at="")
    path = store.find_path(stored.manifest.layers[0])
    unshare(path)
    data = zstandard.compress(make_tar({"a.gguf": model, "b.txt": b"y"}))
    path.write_bytes(data.ljust(path.stat().st_size, b"\0")[: path.stat().st_size])
    with pytest.raises((VerificationError, FormatError)):
        open_once(store)
    assert not [*(store.root / ".aimage").rglob("unpacked/*")]


def test_a_disk_without_room_is_said(
    store: ImageLayout, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_kit(store, {"a.gguf": model})
    free = content_fetch.RESERVE
    monkeypatch.setattr(ImageLayout, "measure_free", lambda _: free)
    before = count_blobs(store)
    with pytest.raises(NoSpaceError, match="cannot be unpacked"):
        open_once(store)
    assert count_blobs(store) == before
