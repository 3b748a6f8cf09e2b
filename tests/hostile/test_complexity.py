"""Every parser reads its document in steps linear in its elements, and in bounded memory.

Steps are lines of the package that run, counted by a trace function; loops inside C are not, so
methods that search a list are forbidden in the parsers. Each dialect is covered by its place in
``READABLE``, and a module that decodes bytes must have a case here, or a reason to have none.
"""

from __future__ import annotations

import ast
import base64
import functools
import io
import json
import struct
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from clowder_aimage.adapter.description import describe
from clowder_aimage.adapter.peft_config import parse_metadata
from clowder_aimage.content.tar import TarReader
from clowder_aimage.dialect import DIALECTS, READABLE, AImage, Layer, detect
from clowder_aimage.dialect.license import list_stated_licenses
from clowder_aimage.document.license_expression import parse_expression
from clowder_aimage.document.long_list import read_long_list
from clowder_aimage.document.schema import find_json_positions
from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE
from clowder_aimage.document.yaml import read_yaml
from clowder_aimage.errors import AImageError
from clowder_aimage.family import zimage_names
from clowder_aimage.formats import (
    family_weights,
    file_content,
    gguf_header,
    lora,
    onnx_graph,
    pickle_stream,
    savedmodel,
    shard_index,
    sidecar,
    tokenizer_size,
    weight_source,
)
from clowder_aimage.formats import model_tree as tree
from clowder_aimage.formats import torchscript as script
from clowder_aimage.formats.codes import comfy_quant
from clowder_aimage.importer import hub_files
from clowder_aimage.layout.digest_scan import DigestScanner
from clowder_aimage.layout.index_file import read_index
from clowder_aimage.layout.index_text import encode_index, find_changes
from clowder_aimage.layout.need_table import NeedTable
from clowder_aimage.layout.pending_names import (
    EntryDifference,
    NameChange,
    begin_pending,
    read_pending,
)
from clowder_aimage.model.text import tool_call_format
from clowder_aimage.oci import Descriptor, Digest, Manifest, mediatype, parse_document, read_json
from clowder_aimage.tensor import encode_header, read_header
from clowder_aimage.tensor.config_fields import ConfigFields, parse_object
from clowder_aimage.tensor.header import parse_header
from tests.importer import formats_gguf, formats_protobuf
from tests.vectors import vector

PACKAGE = Path(sys.modules["clowder_aimage"].__file__ or "").parent
FEW, FACTOR = 25, 4
MOST = 1.3 * FACTOR  # the ratio of steps: n log n has 1.2 times the factor, n * n four times
Action = Callable[[], object]
Case = Callable[[int, Path], Action]


def steps(action: Action) -> int:
    """Count the lines of the package that an action runs."""
    count, before = 0, sys.gettrace()

    def line(_frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, _event: str, _: object) -> Any:
        return line if frame.f_code.co_filename.startswith(str(PACKAGE)) else None

    sys.settrace(call)
    try:
        action()
    except AImageError:
        pass  # a refusal must be as fast
    finally:
        sys.settrace(before)
    return count


def digest_of(number: int) -> str:
    return f"sha256:{number:064x}"


# -- documents of n elements


def multiplied(value: Any, count: int) -> Any:
    """Return a JSON value whose outer lists have ``count`` times as many items, all different."""
    if isinstance(value, dict):
        return {key: multiplied(item, count) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, (i, j)) for i in range(count) for j, item in enumerate(value)]
    return value


def renamed(value: Any, place: tuple[int, int], key: str = "") -> Any:
    """Return a value with digests and names of its own."""
    if isinstance(value, dict):
        return {inner: renamed(item, place, inner) for inner, item in value.items()}
    if isinstance(value, str) and value.startswith("sha256:"):
        return digest_of(place[0] * 1000 + place[1])
    is_name = isinstance(value, str) and key.endswith(("name", "path", "title"))
    return f"{place[0]}{value}" if is_name else value


def bare(value: Any) -> Any:
    """Return a descriptor without the fields that name its layer."""
    return {key: item for key, item in value.items() if key in ("mediaType", "digest", "size")}


def sample(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a manifest and a config of a dialect: written, or those of a vendor."""
    if name not in DIALECTS:
        stem = next(stem for stem in (name, f"{name}-model") if has_vector(stem))
        return vector.value(stem), vector.value(f"{stem}-config")
    config = json.dumps({"schemaVersion": 1, "components": {"a": {}}}).encode()
    kinds = (mediatype.AIMAGE_SAFETENSORS, mediatype.AIMAGE_FILE)
    layers = [
        Layer(Descriptor.of(kind, str(i).encode()), f"a/{i}.x", "F32", (1, 2))
        for i, kind in enumerate(kinds)
    ]
    manifest, raw = DIALECTS[name].write(AImage(config, tuple(layers)))
    return json.loads(manifest.raw), json.loads(raw)


def has_vector(stem: str) -> bool:
    return (vector.HERE / f"{stem}.json").exists()


def as_found(document: dict[str, Any], config: dict[str, Any], count: int) -> None:
    document["layers"] = multiplied(document["layers"], count)


def of_one_digest(document: dict[str, Any], config: dict[str, Any], count: int) -> None:
    document["layers"] *= count


def without_names(document: dict[str, Any], config: dict[str, Any], count: int) -> None:
    as_found(document, config, count)
    document["layers"] = list(map(bare, document["layers"]))


def with_many_fields(document: dict[str, Any], config: dict[str, Any], count: int) -> None:
    for value in (document, config, document["layers"][0]):
        value.update((f"x{i}", {"y": [i]}) for i in range(count))


def of_one_name(document: dict[str, Any], config: dict[str, Any], count: int) -> None:
    first = document["layers"][0]
    document["layers"] = [{**first, "digest": digest_of(i)} for i in range(count)]


SHAPES = (as_found, of_one_digest, without_names, with_many_fields, of_one_name)


def document_of(name: str, shape: Callable[..., None], count: int) -> tuple[bytes, bytes]:
    """Return a manifest and a config of a dialect."""
    document, config = sample(name)
    config = multiplied(config, 1 if shape is with_many_fields else count)
    shape(document, config, count)
    raw = json.dumps(config).encode()
    document["config"] |= {"digest": str(Digest.of(raw)), "size": len(raw)}
    return json.dumps(document).encode(), raw


def of_dialect(name: str, shape: Callable[..., None], count: int) -> Action:
    text, raw = document_of(name, shape, count)

    def read() -> None:
        manifest = Manifest.parse(text)
        aimage = detect(manifest).read(manifest, raw)
        for layer in aimage.layers:
            aimage.get_layer(layer.name)
            aimage.list_layers(layer.component)
            _ = aimage.properties
        for dialect in DIALECTS.values():
            dialect.write(aimage)

    return read


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("name", READABLE)
def test_a_dialect_is_read_in_linear_steps(name: str, shape: Callable[..., None]) -> None:
    few, many = (steps(of_dialect(name, shape, n)) for n in (FEW, FEW * FACTOR))
    assert few > 0 and many <= MOST * few


def index(n: int) -> bytes:
    entries = [
        {"mediaType": mediatype.OCI_MANIFEST, "digest": digest_of(i), "size": 1, "annotations": {}}
        for i in range(n)
    ]
    return json.dumps({"schemaVersion": 2, "manifests": entries}).encode()


def png(n: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"iTXt", b"x\0\0\0\0\0y") * n


def tar(n: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as opened:
        for i in range(n):
            opened.addfile(tarfile.TarInfo(f"d/{i}"))
    return file.getvalue()


def read_tar(n: int, _: Path) -> Action:
    file = io.BytesIO(tar(n))
    return lambda: list(TarReader(file.readinto, "x").iter_members())


def read_list(n: int, _: Path) -> Action:
    """Read a list whose objects have lists, strings and spaces that resemble its separators."""
    items = b'{"n": [{}, {}]}, {"n": "}, {"}, {"n": {}       }, ' * n
    raw = b'{"x": [' + items + b"{" + b" " * n + b"}]}"
    return lambda: list(read_long_list(raw, "x", len(raw), "x", lambda _: None)["x"])


def read_stored_index(n: int, root: Path) -> Action:
    (root / "index.json").write_bytes(index(n))
    return lambda: read_index(root)


def read_changes(n: int, directory: Path) -> Action:
    root = directory / f"pending-{n}"
    entries = [{"digest": f"sha256:{number:064}", "size": 1} for number in range(n)]
    pending = begin_pending(root, f"{n}-1-1", n, None, is_same=False)
    pending.append([NameChange(f"m{number}", None, entries[number]) for number in range(n)])
    pending.append([NameChange(f"m{number}", entries[number], None) for number in range(n)])

    def read() -> object:
        found = read_pending(root, pending.name)
        assert found is not None
        return EntryDifference(found.iter_changes())

    return read


def find_changed_entries(n: int, _: Path) -> Action:
    value = json.loads(index(n))
    empty, filled = encode_index(value | {"manifests": []}), encode_index(value)
    return lambda: find_changes(empty, filled)


def read_needs(n: int, path: Path) -> Action:
    root = path / f"needs{n}"
    root.mkdir()
    table = NeedTable(root)
    # Below the least number of manifests nothing is written
    for number in range(4 * n):
        digest = str(Digest.of(b"%d" % number))
        table.add(digest, table.number([digest, "sha256:" + "0" * 64]))
    table.close()
    return lambda: NeedTable(root)


def read_gguf(n: int, _: Path) -> Action:
    pairs: list[formats_gguf.Pair] = [(f"k{i}", formats_gguf.UINT32, i) for i in range(n)]
    words = [str(i) for i in range(n)]
    pairs += [("tokens", formats_gguf.ARRAY, (formats_gguf.STRING, words))]
    raw = formats_gguf.gguf(pairs, [(f"t{i}", 0, (5,)) for i in range(n)])
    return lambda: gguf_header.read_header(io.BytesIO(raw), len(raw))


def read_sidecar(count: int, _: Path) -> Action:
    versions = [{"name": "v", "trainedWords": ["a", "b"], "files": [{"name": "x"}]}] * count
    model = {"description": "<p>&amp;<" * count, "modelVersions": versions}
    raw = json.dumps(model).encode()
    return lambda: sidecar.parse_sidecar(raw, "other")


def read_onnx(n: int, _: Path) -> Action:
    wire = formats_protobuf
    raw = wire.model(wire.graph(*(wire.initializer(f"w{i}", (2, 3)) for i in range(n))))
    return lambda: onnx_graph.read_model(io.BytesIO(raw), len(raw))


def read_savedmodel(n: int, root: Path) -> Action:
    (root / "saved_model.pb").write_bytes(formats_protobuf.saved_model())
    (root / "variables").mkdir()
    for name in ("index", *(f"data-{i:05}-of-{n:05}" for i in range(n))):
        (root / "variables" / f"variables.{name}").write_bytes(b"x")
    return lambda: savedmodel.take(root)


def read_torchscript(n: int, root: Path) -> Action:
    path = root / "x.pt"
    with zipfile.ZipFile(path, "w") as opened:
        for name in ("version", "data.pkl", "constants.pkl", *(f"code/{i}" for i in range(n))):
            opened.writestr(f"x/{name}", "3")
    return lambda: script.take(path)


def identify_zip(n: int, root: Path) -> Action:
    read_torchscript(n, root)
    return lambda: file_content.identify(root / "x.pt")


def recognise_pickle(n: int, _: Path) -> Action:
    """Pop marks one by one that are above many objects."""
    return lambda: pickle_stream.is_pickle(b"N" * n + b"(0" * n, is_whole=False)


def header(n: int, name: str = "t{}") -> bytes:
    return encode_header([(name.format(i), "U8", (1,)) for i in range(n)], {"k": "v"})


def read_shards(n: int, root: Path) -> Action:
    paths = [root / "m-1.safetensors", root / "m.safetensors.index.json"]
    paths[0].write_bytes(header(n) + bytes(n))
    names = {f"t{i}": paths[0].name for i in range(n)}
    paths[1].write_text(json.dumps({"weight_map": names}))
    return lambda: shard_index.read_weights(root, paths)


def read_quantized(n: int, root: Path) -> Action:
    names = [(f"t{i}.weight{end}", "F8_E4M3", (1,)) for i in range(n) for end in ("", "_x")]
    layers = {f"t{i}": {"format": "float8_e4m3fn"} for i in range(n)}
    names += [(f"t{i}.weight_scale", "F32", (1,)) for i in range(n)]
    metadata = {comfy_quant.METADATA: json.dumps({"layers": layers})}
    path = root / "x.safetensors"
    path.write_bytes(encode_header(names, metadata) + bytes(6 * n))
    return lambda: weight_source.read_source(path)


def read_lora(n: int, root: Path) -> Action:
    names = [(f"t{i}.lora_{half}.weight", "U8", (1, 1)) for i in range(n) for half in "AB"]
    words = json.dumps({"d": {f"w{i}": 1 for i in range(n)}})
    path = root / "a.safetensors"
    path.write_bytes(encode_header(names, {"ss_tag_frequency": words}) + bytes(2 * n))
    return lambda: lora.take(path)


def lora_of(n: int, **metadata: str) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """Return an adapter of n layers, with alphas, and the shapes of its base."""
    names = [
        (f"layers.{i}.{suffix}", "F32", shape)
        for i in range(n)
        for suffix, shape in (
            *(("lora_A.weight", (1, 1)), ("lora_B.weight", (1, 1))),
            *(("alpha", ()), ("lora_magnitude_vector", (1,))),
        )
    ]
    header = encode_header(names, metadata or None)
    ones = struct.pack("<f", 1) * len(names)
    return header + ones, {f"transformer/layers.{i}.weight": (1, 1) for i in range(n)}


def describe_adapter(n: int, root: Path) -> Action:
    path = root / "a.safetensors"
    path.write_bytes(
        lora_of(n, ss_tag_frequency=json.dumps({str(i): {"w": i} for i in range(n)}))[0]
    )
    with path.open("rb") as file:
        found = read_header(file, path.stat().st_size)
    return lambda: describe(path, found, {})


def read_adapter_file(n: int, root: Path) -> Action:
    from clowder_aimage.adapter.reader import read_adapter

    raw, shapes = lora_of(n)
    path = root / "a.safetensors"
    path.write_bytes(raw)
    patterns = {"alpha_pattern": {f"layers.{i}": 1 for i in range(n)}}
    return lambda: read_adapter(path, shapes, label="x", base="y", config=patterns)


def read_peft_config(n: int, _: Path) -> Action:
    patterns = {f"transformer.{i}.alpha_pattern": {f"x.{i}": 1} for i in range(n)}
    raw = json.dumps({**patterns, "rank_pattern": {f"x.{i}": 1 for i in range(n)}})

    def read() -> None:
        for config in parse_metadata({"lora_adapter_metadata": raw}, "x").values():
            config.find_rank(("a.b.c",))

    return read


def read_card(n: int, root: Path) -> Action:
    (root / "README.md").write_text("---\n" + "x: y\n" * n)
    return lambda: tree.read_license(root)


def read_tree(n: int, root: Path) -> Action:
    path = root / "x.json"
    path.write_text(json.dumps({str(i): [i] for i in range(n)}))
    return lambda: tree.read_object(root, path)


def choose_files(n: int, _: Path) -> Action:
    shards = {f"m-{i}.safetensors": b"" for i in range(n)}
    weight_map = json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(shards)}})
    files = {**shards, "config.json": b"{}", "m.safetensors.index.json": weight_map.encode()}
    return lambda: hub_files.choose("a/b", files, files.__getitem__, None)


def read_fields(n: int, _: Path) -> Action:
    raw = json.dumps({str(i): i for i in range(1, n)}).encode()

    def read() -> None:
        fields = ConfigFields("x", parse_object("x", raw))
        for key in fields.values:
            fields.get_integer(key)
        fields.finish()

    return read


def read_specs(n: int, root: Path) -> Action:
    from clowder_aimage.node.spec_files import read_directory

    (root / "a.json").write_text(json.dumps([{"ref": f"r.example/x:{i}"} for i in range(n)]))
    (root / "b.yaml").write_text("\n".join(f"- ref: r.example/y:{i}" for i in range(n)))
    return lambda: read_directory(root)


def read_tags(n: int, _: Path) -> Action:
    from clowder_aimage.registry.listing import _parse_page

    raw = json.dumps({"tags": [f"v{i}" for i in range(n)]}).encode()
    return lambda: _parse_page(raw, "x", "tags")


def read_challenge(n: int, _: Path) -> Action:
    from clowder_aimage.registry.auth import _Challenge

    text = 'Bearer realm="x"' + "".join(f', p{i}="x"' for i in range(n))
    return lambda: _Challenge.parse(text)


def read_facts(n: int, _: Path) -> Action:
    from clowder_aimage.model.picture_metadata import read_metadata

    raw = png(n)
    return lambda: read_metadata(raw)


def read_exif(n: int, _: Path) -> Action:
    from clowder_aimage.model.picture_metadata import read_metadata

    tags = struct.pack("<HHII", 0x8769, 4, 1, 8) * min(n, 65_535)  # each leads to the directory
    exif = b"II*\0" + struct.pack("<IH", 8, min(n, 65_535)) + tags
    chunks = struct.pack("<4sI", b"VP8 ", 0) * n + struct.pack("<4sI", b"EXIF", len(exif)) + exif
    raw = b"RIFF\0\0\0\0WEBP" + chunks
    return lambda: read_metadata(raw)


def read_settings(n: int, _: Path) -> Action:
    from clowder_aimage.pictures.artifact import _parse

    pictures = [{"digest": digest_of(i), "seed": i} for i in range(n)]
    raw = json.dumps({"schemaVersion": 1, "settings": {}, "pictures": pictures}).encode()
    return lambda: _parse(raw, digest_of(0))


def read_body(n: int, _: Path) -> Action:
    from clowder_aimage.api.request_body import RequestBody, check_fields, read_object

    raw = json.dumps({f"x{i}": i for i in range(n)}).encode()
    return lambda: check_fields(read_object(raw), RequestBody)


def read_archive_index(n: int, _: Path) -> Action:
    from clowder_aimage.load import _choose_names, _parse_entries

    value = json.loads(index(n))
    for i, entry in enumerate(value["manifests"]):
        entry["annotations"] = {"org.opencontainers.image.ref.name": f"x:{i}"}
    raw = json.dumps(value).encode()
    return lambda: _choose_names(_parse_entries(raw, "x"), None, "x")


def read_volumes(n: int, path: Path) -> Action:
    from clowder_aimage.content.volume import MEDIA_TYPE, _read_list

    volumes = [{"name": f"x.{i}", "digest": digest_of(i), "size": 1} for i in range(n)]
    listed = path / "x.list"
    listed.write_text(json.dumps({"mediaType": MEDIA_TYPE, "volumes": volumes}))
    return lambda: _read_list(listed)


def read_mountable(n: int, _: Path) -> Action:
    from clowder_aimage.dialect.mountable import ORIGIN, read_origin

    layer = Descriptor(mediatype.OCI_LAYER_TAR, Digest.parse(digest_of(0)), n)
    blobs = {digest_of(i): [[0, i - 1, 1]] for i in range(1, n + 1)}
    parts = [Descriptor("x", Digest.parse(digest), 1).to_json() for digest in blobs]
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST}
    origin = Manifest.build(document | {"config": parts[0], "layers": parts[1:]})
    described = {
        "mediaType": mediatype.OCI_MANIFEST,
        "manifest": base64.b64encode(origin.raw).decode(),
        "blobs": blobs,
    }
    config = {"rootfs": {"diff_ids": [digest_of(0)]}, ORIGIN: described}
    raw = json.dumps(config).encode()
    image = Manifest.build(
        document
        | {"config": Descriptor.of(mediatype.OCI_CONFIG, raw).to_json()}
        | {"layers": [layer.to_json()]}
    )
    return lambda: read_origin(image, raw)


def check_document(n: int, _: Path) -> Action:
    from clowder_aimage.validate import check

    value = json.loads(index(n))
    for entry in value["manifests"]:
        entry["size"] = "x"  # a violation with a line
    raw = json.dumps(value, indent=1).encode()
    return lambda: check("x", raw)


# the modules that decode bytes from outside, and documents for each
def read_blocks(n: int, place: Path) -> Action:
    size = {"dim": 8, "n_heads": 1, "cap_feat_dim": 1, "in_channels": 1, "n_refiner_layers": 1}
    shapes = zimage_names.build_transformer_shapes({**size, "n_layers": n})
    tensors = [(name, "BF16", (0, *shape[1:])) for name, shape in shapes.items()]
    (place / "x.safetensors").write_bytes(encode_header(tensors))
    return lambda: family_weights.read_family(place / "x.safetensors")


def count_tokens(n: int, _: Path) -> Action:
    vocabulary = {"model": {"vocab": {str(i): i for i in range(n)}}, "added_tokens": [{"id": n}]}
    data = {"tokenizer.json": json.dumps(vocabulary).encode()}
    return lambda: tokenizer_size.count_tokens(data)


def read_calls(n: int, _: Path) -> Action:
    return lambda: tool_call_format.WHOLE.parse('{"name": "f"};' * n)


def read_named_calls(n: int, _: Path) -> Action:
    return lambda: tool_call_format.BRACKETED.parse('f[ARGS]{"a": 1}' * n)


def read_open_parameters(n: int, _: Path) -> Action:
    return lambda: tool_call_format.TAGGED.parse("<function=f>" + "<parameter=a>\n" * n)


def read_open_arguments(n: int, _: Path) -> Action:
    return lambda: tool_call_format.TAGGED.parse("f" + "<arg_key>" * n)


def read_licenses(n: int, _: Path) -> Action:
    config = json.dumps({"descriptor": {"licenses": [f"LicenseRef-{i}" for i in range(n)]}})
    content = Descriptor.of("application/vnd.cncf.model.config.v1+json", config.encode())
    manifest = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST, "layers": []}
    found = Manifest.build(manifest | {"config": content.to_json()})
    assert len(list_stated_licenses(found, config.encode())) == n
    return lambda: list_stated_licenses(found, config.encode())


CASES: dict[str, Case] = {
    "adapter/description.py": describe_adapter,
    "adapter/peft_config.py": read_peft_config,
    "adapter/file.py": read_adapter_file,
    "api/request_body.py": read_body,
    "content/tar.py": read_tar,
    "content/volume.py": read_volumes,
    "dialect/mountable.py": read_mountable,
    "formats/codes/comfy_quant.py": read_quantized,
    "formats/family_weights.py": read_blocks,
    "formats/gguf_header.py": read_gguf,
    "formats/tokenizer_size.py": count_tokens,
    "formats/lora.py": read_lora,
    "formats/model_tree.py": read_tree,
    "formats/model_tree.py card": read_card,
    "formats/onnx_graph.py": read_onnx,
    "formats/sidecar.py": read_sidecar,
    "formats/savedmodel.py": read_savedmodel,
    "formats/shard_index.py": read_shards,
    "formats/torchscript.py": read_torchscript,
    "formats/zip_directory.py": identify_zip,
    "formats/pickle_stream.py": recognise_pickle,
    "importer/hub_files.py": choose_files,
    "layout/digest_scan.py": lambda n, _: lambda: DigestScanner().scan("x", lambda _: index(n)),
    "layout/index.py": read_stored_index,
    "layout/index_text.py": find_changed_entries,
    "layout/need_table.py": read_needs,
    "layout/pending_names.py": read_changes,
    "load.py": read_archive_index,
    "model/picture_metadata.py": read_facts,
    "model/picture_metadata.py Exif": read_exif,
    "model/text/tool_call_format.py": read_calls,
    "model/text/tool_call_format.py names": read_named_calls,
    "model/text/tool_call_format.py parameters": read_open_parameters,
    "model/text/tool_call_format.py arguments": read_open_arguments,
    "node/spec_files.py": read_specs,
    "oci/manifest.py": lambda n, _: lambda: parse_document(index(n)),
    "pictures/artifact.py": read_settings,
    "registry/auth.py": read_challenge,
    "registry/listing.py": read_tags,
    "dialect/license.py": read_licenses,
    "document/license_expression.py": lambda n, _: (
        lambda: parse_expression(" OR ".join(["(a AND b)"] * n))
    ),
    "document/schema.py": lambda n, _: lambda: find_json_positions(index(n).decode()),
    "document/long_list.py": read_list,
    "document/strict_json.py": lambda n, _: lambda: read_json(b"[" + b"[{}]," * n + b"0]", "x"),
    "tensor/config_fields.py": read_fields,
    "tensor/header.py": lambda n, _: lambda: parse_header(header(n)[8:], None),
    "validate.py": check_document,
    "document/yaml.py": lambda n, _: (
        lambda: read_yaml("\n".join(f"k{i}: [1]" for i in range(n)), "")
    ),
}
COVERED = {
    **dict.fromkeys(
        ("model/adapter_source.py", "export.py"),
        "a small config, which peft_config reads",
    ),
    **dict.fromkeys(
        (
            "api/batch/line_check.py",
            "api/batch/run.py",
            "api/batch/store.py",
            "fleet/gateway/batch_record.py",
        ),
        "records, by read_json",
    ),
    "cli/verbs/bom.py": "the bill that this program wrote",
    "model/torch/batch_file.py": "one bounded file of read_json",
    "cli/doctor/backend.py": "what this program's own process prints, by read_json",
    **dict.fromkeys(
        (
            "pictures/provenance/manifest_process.py",
            "pictures/provenance/manifest_report.py",
        ),
        "what C2PA's library prints, by read_json, in a process with limits",
    ),
    "pictures/provenance/picture_report.py": "the header of a picture, by Pillow",
    "api/picture/request.py": "a bounded field of a form, by read_json",
    "api/ollama/text.py": "a bounded field of a body, by read_json",
    **dict.fromkeys(
        ("cli/console/installation.py", "distribution/name_table.py", "engine/frame.py"),
        "written by this program",
    ),
    **dict.fromkeys(
        (
            "cli/text/option.py",
            "importer/enhancer_plan.py",
            "model/encoder/tokenizer.py",
            "model/llama/gguf_layers.py",
            "model/model_file.py",
            "model/text/chat_template.py",
            "model/text/embedding_recipe.py",
            "model/text/template_file.py",
            "model/text/text_facts.py",
            "model/text/tokenizer_file.py",
        ),
        "bounded, by read_json",
    ),
    **dict.fromkeys(
        ("cli/verbs/batch.py", "engine/batch_line.py"),
        "lines of a file of the user, by read_json",
    ),
    **dict.fromkeys(
        (
            "cli/verbs/manifest.py",
            "create.py",
            "exporter/plan.py",
            "exporter/family_plan.py",
            "oci/manifest.py",
            "registry/referrers.py",
        ),
        "at most 4 MiB of read_json",
    ),
    **dict.fromkeys(
        ("dialect/aimage.py", "dialect/container.py", "dialect/ollama.py", "dialect/vendor.py"),
        "read by its dialect, see above",
    ),
    **dict.fromkeys(
        ("engine/runner.py", "model/text/language_model.py"),
        "frames of this program",
    ),
    **dict.fromkeys(
        ("engine/worker_client.py", "registry/response.py", "registry/token_exchange.py"),
        "one bounded answer of read_json",
    ),
    **dict.fromkeys(
        ("fleet/gateway/continuation.py", "fleet/gateway/response_relay.py"),
        "frames of a response, by read_json",
    ),
    **dict.fromkeys(
        ("fleet/field.py", "fleet/job/job.py", "fleet/link.py"),
        "a message, by read_json",
    ),
    "fleet/job/request.py": "a line of a transfer of a worker of the fleet, by read_json",
    "fleet/gateway/worker_call.py": "one bounded answer of a worker, by read_json",
    **dict.fromkeys(
        (
            "formats/detection.py",
            "formats/diffusers.py",
            "formats/transformers.py",
            "importer/hub_model.py",
        ),
        "reads by model_tree",
    ),
    "formats/family_model.py": "small files, by model_tree and read_json",
    "formats/prequantized.py": "a single number",
    **dict.fromkeys(
        (
            "config/name_index.py",
            "config/trust_policy.py",
            "layout/attachment.py",
            "layout/description.py",
            "layout/metadata.py",
            "layout/repository_record.py",
            "layout/unpacking.py",
            "registry/docker_config.py",
            "registry/host_settings.py",
        ),
        "a small file of the user",
    ),
    **dict.fromkeys(
        ("trust/bundle.py", "trust/keyless.py", "trust/simple_signing.py", "trust/statement.py"),
        "a signature of at most 1 MiB, by read_json",
    ),
    "registry/credential_helper.py": "the output of a program of the user, by read_json",
    "model/dequantize.py": "weights, bounded by their layers",
    "model/picture.py": "Pillow reads it; the facts are those of picture_metadata",
    "model/tokenizer_backend.py": "bounded files, by read_json",
    "pictures/decode.py": "Pillow reads it, within limits of bytes and pixels",
}
DECODERS = {
    *("read_json", "parse_object", "read_yaml", "JSONDecoder"),
    *("unpack", "unpack_from", "iter_unpack", "ZipFile"),
    *("json.load", "json.loads", "yaml.compose", "yaml.parse", "tarfile.open", "Image.open"),
}
SEARCHES = {"remove", "index", "insert"}  # methods that walk a list


@functools.cache
def calls(path: Path) -> set[str]:
    """Return the names of the functions that a module calls, plain and with their module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names.add(node.func.attr)
            names.add(f"{getattr(node.func.value, 'id', '')}.{node.func.attr}")
    return names


def find_callers(names: set[str]) -> set[Path]:
    """Return the modules that call one of the functions. Parsing all modules takes seconds."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        if any(f"{name}(" in text for name in names) and calls(path) & names:
            found.add(path)
    return found


def test_every_module_that_decodes_has_a_case() -> None:
    found = find_callers(DECODERS)
    names = {path.relative_to(PACKAGE).as_posix() for path in found}
    assert names - {name.partition(" ")[0] for name in CASES} <= COVERED.keys() <= names


def test_json_is_decoded_by_one_reader() -> None:
    """Other calls decode what this program or its user wrote, or what was refused already."""
    found = {path.stem for path in find_callers({"json.load", "json.loads"})}
    ours = {"frame", "installation", "docker_config"}
    refused = {"digest_scan", "schema", "validate"}
    assert found == ours | refused


@pytest.mark.parametrize("folder", ["dialect", "oci", "formats", "tensor"])
def test_parsers_do_not_search_lists(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        assert not calls(path) & SEARCHES, path


def peak(action: Action) -> int:
    """Return the most bytes that an action has in memory at once."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", READABLE)
def test_a_dialect_is_read_in_ten_times_its_bytes(name: str) -> None:
    text, raw = document_of(name, as_found, 150)

    def read() -> object:
        manifest = Manifest.parse(text)
        aimage = detect(manifest).read(manifest, raw)
        return aimage, aimage.properties

    assert peak(read) <= 10 * (len(text) + len(raw))


def test_the_densest_json_takes_thirty_times_its_bytes() -> None:
    """An empty object has 3 bytes as text, and 72 in memory: documents are small instead."""
    raw = b"[" + b"{}," * 20_000 + b"0]"
    assert peak(lambda: read_json(raw, "x")) <= 30 * len(raw)
    assert 30 * MAX_DOCUMENT_SIZE < 128 << 20


@pytest.mark.parametrize("name", CASES)
def test_a_document_is_read_in_linear_steps(name: str, tmp_path: Path) -> None:
    found = []
    for n in (FEW, FEW * FACTOR):
        (tmp_path / str(n)).mkdir()
        found.append(steps(CASES[name](n, tmp_path / str(n))))
    assert found[0] > 0 and found[1] <= MOST * found[0]
