"""Inputs, outputs and the number of parameters of ONNX files, and their place in ``show``."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.onnx_signature import OnnxValue, read_signature
from tests.importer import formats_protobuf as pb
from tests.importer.formats_mutate import mutants
from tests.process import Aimage

GRAPH = pb.graph(
    pb.initializer("w", (2, 3)),
    pb.initializer("b", (3,), packed=True),
    pb.node("Constant", pb.attribute("value", pb.message(5, pb.tensor("c", (4,))))),
    pb.value(11, "ids", 7, "batch", 512),
    pb.value(11, "w", 1, 2, 3),
    pb.message(11, pb.text(1, "state"), pb.message(2, pb.message(4))),
    pb.value(12, "logits", 10, "batch"),
)


def test_a_signature_is_read() -> None:
    raw = pb.model(GRAPH)
    found = read_signature(io.BytesIO(raw), len(raw))
    model = found.model
    assert (model.ir_version, model.opset, model.parameters) == (9, 18, 13)
    inputs = (OnnxValue("ids", "int64", ("batch", 512)), OnnxValue("state", "other", None))
    assert found.inputs == inputs
    assert [str(value) for value in found.outputs] == ["logits float16[batch]"]


def test_damaged_files_are_read_or_refused() -> None:
    results = set()
    for raw in mutants(pb.model(GRAPH), 200):
        try:
            read_signature(io.BytesIO(raw), len(raw))
            results.add("read")
        except FormatError:
            results.add("refused")
    assert results == {"read", "refused"}


@pytest.mark.parametrize("count", [1, 2])
def test_show_lists_the_values_of_each_model(
    aimage: Callable[..., Aimage], tmp_path: Path, count: int
) -> None:
    root = tmp_path / "m"
    root.mkdir()
    for number in range(count):
        (root / f"{number}.onnx").write_bytes(pb.model(GRAPH))
    run = aimage("store")
    run("create", "m", root, "-q")
    lines = run("show", "m").out.splitlines()
    assert lines.count("  inputs   ids int64[batch, 512], state other") == count
    assert "0.onnx: ir 9, opset 18, 13 parameters" in lines
    value = run("show", "m", "--json").value["onnx"]
    assert [model["name"] for model in value] == [f"{number}.onnx" for number in range(count)]
    assert value[0]["outputs"] == [{"name": "logits", "type": "float16", "shape": ["batch"]}]
