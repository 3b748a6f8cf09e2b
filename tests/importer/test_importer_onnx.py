"""ONNX models and their external data, compared with the onnx package."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import ContentError, FormatError, ModelError
from clowder_aimage.formats.onnx import take
from clowder_aimage.oci.mediatype import AIMAGE_ONNX
from tests.importer import formats_protobuf as pb
from tests.importer.formats_mutate import cuts, memory_of, mutants, survives


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m" / "model.onnx"


def with_data(path: Path, location: str, size: int = 24, **said: Any) -> Path:
    """Return a model with a tensor of 24 bytes at ``location``, ``size`` of which exist."""
    path.write_bytes(
        pb.model(pb.graph(pb.initializer("w", (2, 3), external=pb.external(location, **said))))
    )
    data = path.parent / location
    data.parent.mkdir(exist_ok=True, parents=True)
    data.write_bytes(bytes(size))
    return data


def refused(path: Path, *said: str, kind: type[ContentError] = FormatError) -> Any:
    with pytest.raises(kind) as caught:
        take(path)
    for word in said:
        assert word in caught.value.message
    return caught.value


# -- metadata


def test_metadata_of_a_model_are_read(path: Path) -> None:
    path.write_bytes(pb.plain_model())
    taken = take(path)
    assert taken.facts == {"format": "onnx", "formatVersion": "ir 9, opset 18"}
    (file,) = taken.files
    assert (file.name, file.media_type) == ("model.onnx", AIMAGE_ONNX)


def test_a_model_without_onnx_operators_has_no_opset(path: Path) -> None:
    path.write_bytes(pb.number(1, 3) + pb.message(7, pb.graph()))
    assert take(path).facts == {"format": "onnx", "formatVersion": "ir 3"}


def test_external_data_are_packed_with_the_model(path: Path) -> None:
    with_data(path, "weights/model.bin")
    (path.parent / "other.bin").write_bytes(b"not the model's")
    taken = take(path)
    assert [file.name for file in taken.files] == ["model.onnx", "weights/model.bin"]
    assert {file.media_type for file in taken.files} == {AIMAGE_ONNX}


def test_tensors_may_share_a_file(path: Path) -> None:
    inner = pb.graph(
        pb.initializer("a", (2, 3), external=pb.external("./d.bin", 0, 24)),
        pb.initializer("b", (5,), external=pb.external("d.bin", 4096, 20)),
        pb.initializer("c", (4,), kind=pb.INT4, external=pb.external("d.bin", 4116)),
    )
    path.write_bytes(pb.model(inner))
    (path.parent / "d.bin").write_bytes(bytes(4118))
    assert [file.name for file in take(path).files] == ["d.bin", "model.onnx"]
    (path.parent / "d.bin").write_bytes(bytes(4117))
    refused(path, "'c' ends at byte 4118 of d.bin, which has 4117")


def in_attribute(number: int, *inner: bytes) -> bytes:
    """Return a graph with a node whose attribute has this field."""
    return pb.graph(pb.node("C", pb.attribute("v", pb.message(number, *inner))))


def in_graph(tensor: bytes) -> bytes:
    return pb.graph(pb.message(5, tensor))


ANYWHERE: dict[str, Callable[[bytes], bytes]] = {
    "an initializer": lambda t: pb.model(in_graph(t)),
    "a constant": lambda t: pb.model(in_attribute(5, t)),
    "constants": lambda t: pb.model(in_attribute(10, t)),
    "a sparse initializer": lambda t: pb.model(pb.graph(pb.message(15, pb.message(1, t)))),
    "indices of a sparse constant": lambda t: pb.model(in_attribute(22, pb.message(2, t))),
    "sparse constants": lambda t: pb.model(in_attribute(23, pb.message(1, t))),
    "a subgraph": lambda t: pb.model(in_attribute(6, in_graph(t))),
    "a subgraph of a subgraph": lambda t: pb.model(in_attribute(11, in_attribute(6, in_graph(t)))),
    "a function": lambda t: pb.model(
        pb.graph(),
        pb.message(25, pb.message(7, pb.text(4, "C"), pb.attribute("v", pb.message(5, t)))),
    ),
    "a function's default": lambda t: pb.model(
        pb.graph(), pb.message(25, pb.message(11, pb.text(1, "v"), pb.message(5, t)))
    ),
    "training": lambda t: pb.model(pb.graph(), pb.message(20, pb.message(1, in_graph(t)))),
    "another training": lambda t: pb.model(pb.graph(), pb.message(20, pb.message(2, in_graph(t)))),
}


def test_external_data_are_found_in_every_kind_of_field(path: Path) -> None:
    tensor = pb.tensor("hidden", (2,), external=pb.external("../secret"))
    for make in ANYWHERE.values():
        path.write_bytes(make(tensor))
        refused(path, "'hidden'", "../secret")


# -- directories


def test_a_directory_of_models_is_packed_with_its_data(tmp_path: Path) -> None:
    root = tmp_path / "m"
    for name in ("encoder.onnx", "onnx/decoder.onnx"):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        with_data(root / name, f"{Path(name).stem}.onnx_data")
    for name in ("config.json", "onnx/tokenizer.json", "vocab.txt", "chat_template.jinja"):
        (root / name).write_text("{}")
    (root / "README.md").write_text("---\nlicense: mit\n---\n")
    for name in ("pytorch_model.bin", ".gitattributes", "leftover.onnx_data"):
        (root / name).write_bytes(b"x")
    taken = take(root)
    types = {file.name: file.media_type for file in taken.files}
    assert list(types) == sorted(types)
    assert types == {
        "encoder.onnx": AIMAGE_ONNX,
        "encoder.onnx_data": AIMAGE_ONNX,
        "onnx/decoder.onnx": AIMAGE_ONNX,
        "onnx/decoder.onnx_data": AIMAGE_ONNX,
    }
    assert taken.facts == {"format": "onnx", "formatVersion": "ir 9, opset 18"}
    assert taken.license == "mit"


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "no ONNX file", kind=ModelError)


# -- external data elsewhere or missing


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "a/../../up.bin", "..", ".", "C:/x", "a\\b", "a\nb", "a" * 2000]
)
def test_paths_outside_the_model_directory_are_refused(path: Path, location: str) -> None:
    (path.parent.parent / "up.bin").write_bytes(bytes(100))
    tensor = pb.initializer("w", (2, 3), external=pb.external(location))
    path.write_bytes(pb.model(pb.graph(tensor)))
    error = refused(path, "'w'", "outside the model directory")
    assert error.hint


def test_links_out_of_the_directory_are_refused(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "w.bin").write_bytes(bytes(24))
    with_data(path, "w.bin").unlink()
    (path.parent / "w.bin").symlink_to(secret / "w.bin")
    refused(path, "outside the model directory", kind=ModelError)
    refused(path.parent, "outside the model directory", kind=ModelError)
    with_data(path, "d/w.bin").unlink()
    (path.parent / "w.bin").unlink()
    (path.parent / "d").rmdir()
    (path.parent / "d").symlink_to(secret)
    refused(path, "outside the model directory", kind=ModelError)


def test_a_link_to_a_subdirectory_is_refused(path: Path) -> None:
    path.write_bytes(pb.plain_model())
    (path.parent / "again").symlink_to(path.parent)
    refused(path.parent, "link to a directory", kind=ModelError)


def test_missing_external_data_are_reported(path: Path) -> None:
    with_data(path, "weights.bin").unlink()
    error = refused(path, str(path), "'w' is in weights.bin, which is missing")
    assert "external data" in error.hint


def test_external_data_that_are_not_files_are_refused(path: Path) -> None:
    data = with_data(path, "weights.bin")
    data.unlink()
    os.mkfifo(data)
    refused(path, "not a regular file")
    data.unlink()
    data.mkdir()
    refused(path, "not a regular file")


@pytest.mark.parametrize(
    ("said", "size", "word"),
    [
        ({}, 23, "ends at byte 24"),
        ({"offset": 1}, 24, "ends at byte 25"),
        ({"length": 23}, 24, "takes 24 bytes, but its data has 23"),
        ({"length": "٢٤"}, 24, "not a number"),
        ({"length": "9" * 5000}, 24, "limit is 4096"),
        ({"length": "9" * 31}, 24, "not a number"),
    ],
)
def test_mismatched_sizes_are_refused(
    path: Path, said: dict[str, Any], size: int, word: str
) -> None:
    with_data(path, "w.bin", size, **said)
    refused(path, word)


def test_external_data_without_a_location_are_refused(path: Path) -> None:
    path.write_bytes(pb.model(pb.graph(pb.initializer("w", (2,), external={"offset": "0"}))))
    refused(path, "external data without a location")
    path.write_bytes(pb.model(pb.graph(pb.initializer("w", (2,), external={}))))
    refused(path, "external data without a location")


def test_external_data_are_found_without_the_external_flag(path: Path) -> None:
    tensor = pb.tensor("w", (2,), raw=b"") + pb.entry("location", "../secret")
    path.write_bytes(pb.model(pb.graph(pb.message(5, tensor))))
    refused(path, "../secret")


def test_repeated_fields_are_refused(path: Path) -> None:
    twice = pb.tensor("w", (2,), external=pb.external("w.bin")) + pb.entry("location", "../x")
    path.write_bytes(pb.model(pb.graph(pb.message(5, twice))))
    refused(path, "duplicate external data key 'location'")
    path.write_bytes(pb.plain_model() + pb.message(7, pb.graph()))
    refused(path, "duplicate field in ModelProto")
    half = pb.message(5, pb.tensor("w", (2,)))
    path.write_bytes(pb.model(pb.graph(pb.node("C", pb.attribute("v", half, half)))))
    refused(path, "duplicate field in AttributeProto")


# -- invalid files


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not an ONNX model"),
        (b"GGUF" + bytes(100), "at byte"),
        (pb.number(1, 9), "no graph"),
        (pb.model(pb.graph(), ir=-1), "no IR version"),
        (pb.number(7, 1) + pb.number(1, 9), "wire type 0"),
        (pb.model(pb.graph(pb.initializer("w", (-1,), raw=b""))), "invalid tensor dimensions"),
        (pb.model(pb.graph(pb.initializer("w", (1,) * 65, packed=True))), "more than 64 numbers"),
        (
            pb.model(pb.graph(pb.initializer("w", (2**40, 2**40), external=pb.external("w")))),
            "too many elements",
        ),
        (pb.model(pb.graph(pb.message(5, pb.message(8, b"\xff")))), "not UTF-8"),
        (b"\x08" + b"\xff" * 20, "unterminated"),
        (b"\x0f", "wire type 7"),
        (b"\x00\x00", "invalid field number 0"),
    ],
)
def test_files_that_are_not_onnx_are_refused(path: Path, raw: bytes, said: str) -> None:
    path.write_bytes(raw)
    refused(path, str(path), said)


def test_graph_nesting_is_limited(path: Path) -> None:
    inner = pb.graph()
    for _ in range(1000):
        inner = pb.graph(pb.node("If", pb.attribute("then", pb.message(6, inner))))
    path.write_bytes(pb.model(inner))
    refused(path, "nested more than 100 deep")


def test_many_fields_are_refused_early(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.formats.protobuf.MAX_FIELDS", 1000)
    path.write_bytes(pb.model(pb.graph(b"\x48\x00" * 1000)))
    refused(path, "more than 1000 fields")


def test_a_false_length_costs_no_memory(path: Path) -> None:
    lie = pb.varint(2 << 3 | 2) + pb.varint(2**31 - 100)  # a graph name of two gigabytes
    with path.open("wb") as file:
        file.write(pb.number(1, 9) + pb.varint(7 << 3 | 2) + pb.varint(2**31 - 90) + lie)
        file.truncate(2**31)
    assert memory_of(take, path) < 1 << 20


# -- arbitrary bytes


def test_a_truncated_file_is_refused_wherever_it_ends(path: Path) -> None:
    raw = pb.model(pb.graph(pb.initializer("w", (2, 3)), pb.initializer("b", (30,))))
    whole = len(raw) - len(b"".join(pb.message(8, *p) for p in OPSETS))
    took, refused = survives(take, path, cuts(raw))
    assert refused >= whole - 1
    assert took <= 3  # the end of a field of the model itself


OPSETS = [(pb.text(1, "com.microsoft"), pb.number(2, 99)), (pb.number(2, 18),)]


def test_damaged_files_are_refused_with_a_message(path: Path) -> None:
    with_data(path, "w.bin")
    took, refused = survives(take, path, mutants(path.read_bytes(), 500))
    assert took > 20
    assert refused > 100
    took, refused = survives(take, path, mutants(pb.plain_model(), 300))
    assert took > 20
    assert refused > 60


# -- the reference implementation


def reference(path: Path) -> Any:
    onnx = pytest.importorskip("onnx")
    return onnx.load(path, load_external_data=False)


def test_the_onnx_package_reads_the_same_of_our_files(path: Path) -> None:
    with_data(path, "w.bin", offset=0, length=24)
    theirs = reference(path)
    assert (theirs.ir_version, theirs.graph.name) == (9, "main")
    (tensor,) = theirs.graph.initializer
    assert (tensor.name, list(tensor.dims), tensor.data_location) == ("w", [2, 3], 1)
    assert {pair.key: pair.value for pair in tensor.external_data} == {
        "location": "w.bin",
        "offset": "0",
        "length": "24",
    }
    for place, make in ANYWHERE.items():
        path.write_bytes(make(pb.tensor("hidden", (2,), external=pb.external("x"))))
        assert b"hidden" in reference(path).SerializeToString(), place


def test_files_of_the_onnx_package_are_read(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    np = pytest.importorskip("numpy")
    rng = np.random.default_rng(3)
    weights = {f"w{n}": rng.standard_normal((n + 1, 300)).astype(np.float32) for n in range(4)}
    made = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Identity", ["w0"], ["y"])],
            "real",
            [],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 300])],
            [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
        ),
        ir_version=10,
        opset_imports=[onnx.helper.make_opsetid("", 21)],
    )
    plain, outside = tmp_path / "plain.onnx", tmp_path / "outside.onnx"
    onnx.save(made, plain)
    onnx.save(
        made,
        outside,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="outside.onnx_data",
    )
    for path, names in ((plain, ["plain.onnx"]), (outside, ["outside.onnx", "outside.onnx_data"])):
        onnx.checker.check_model(path)
        taken = take(path)
        assert [file.name for file in taken.files] == names
        assert taken.facts == {"format": "onnx", "formatVersion": "ir 10, opset 21"}


def test_data_type_sizes_match_the_onnx_package() -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("numpy")
    from clowder_aimage.formats.onnx_graph import _BITS

    named = {number: name for name, number in onnx.TensorProto.DataType.items()}
    for number, bits in _BITS.items():
        if number in named:
            small = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
            size = onnx.helper.tensor_dtype_to_np_dtype(number).itemsize * 8
            assert bits == small.get(named[number], size), named[number]


def test_every_tensor_field_of_the_onnx_schema_is_visited() -> None:
    pytest.importorskip("onnx")
    from onnx import onnx_ml_pb2

    from clowder_aimage.formats.onnx_graph import _SUBMESSAGES

    messages = onnx_ml_pb2.DESCRIPTOR.message_types_by_name
    leads = {"TensorProto"}
    while True:  # messages that contain tensors indirectly
        more = {
            name
            for name, message in messages.items()
            if any(one.message_type and one.message_type.name in leads for one in message.fields)
        }
        if more <= leads:
            break
        leads |= more
    there = {
        (name, one.number, one.message_type.name)
        for name in leads
        for one in messages[name].fields
        if one.message_type and one.message_type.name in leads
    }
    ours = {
        (outer, number, inner)
        for outer, fields in _SUBMESSAGES.items()
        for number, inner in fields.items()
    }
    assert ours == there
