"""Each format is packed, pushed, pulled elsewhere and exported after its source is deleted."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import LLM, write_llm
from tests.importer.conftest import safetensors
from tests.process import Aimage

DIALECTS = ("clowder", "modelpack", "container")
LORA = [
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "F32", (4, 64)),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", "F32", (64, 4)),
]


def gguf(path: Path) -> Path:
    package = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    writer = package.GGUFWriter(path / "small.gguf", "llama")
    writer.add_context_length(2048)
    writer.add_tensor("token_embd.weight", numpy.arange(64, dtype=numpy.float32).reshape(1, 64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "small.gguf"


def opened_gguf(path: Path) -> None:
    reader = pytest.importorskip("gguf").GGUFReader(path / "small.gguf")
    (tensor,) = reader.tensors
    assert tensor.data.reshape(-1).tolist() == [float(n) for n in range(64)]


def onnx(path: Any) -> Any:
    package = pytest.importorskip("onnx")
    numpy = pytest.importorskip("numpy")
    helper = package.helper
    weight = package.numpy_helper.from_array(numpy.arange(64, dtype=numpy.float32), "w")
    ports = [helper.make_tensor_value_info(name, 1, [64]) for name in "xy"]
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "net", ports[:1], ports[1:], [weight])
    package.save(
        helper.make_model(graph),
        path / "net.onnx",
        save_as_external_data=True,
        location="net.data",
        size_threshold=0,
    )
    return path / "net.onnx"


def opened_onnx(path: Any) -> None:
    package = pytest.importorskip("onnx")
    model = package.load(path / "net.onnx")
    package.checker.check_model(model)
    (weight,) = model.graph.initializer
    assert package.numpy_helper.to_array(weight).tolist() == [float(n) for n in range(64)]


def torchscript(path: Any) -> Any:
    with zipfile.ZipFile(path / "net.pt", "w") as archive:
        for name, data in {
            "version": b"3\n",
            "constants.pkl": b"\x80\x02).",
            "data.pkl": b"\x80\x02N.",
            "code/__torch__.py": b"class Net(Module):\n  pass\n",
        }.items():
            archive.writestr(f"net/{name}", data)
    return path / "net.pt"


def savedmodel(path: Any) -> Any:
    model = path / "saved"
    (model / "variables").mkdir(parents=True)
    (model / "assets").mkdir()
    meta = b"\x0a\x02\x2a\x00"  # a meta graph with an empty info
    (model / "saved_model.pb").write_bytes(b"\x08\x01\x12" + bytes([len(meta)]) + meta)
    (model / "variables" / "variables.index").write_bytes(b"index")
    (model / "variables" / "variables.data-00000-of-00001").write_bytes(bytes(100))
    (model / "assets" / "words.txt").write_text("a\nb\n")
    return model


def lora(path: Any) -> Any:
    model = path / "peft"
    model.mkdir()
    (model / "adapter_model.safetensors").write_bytes(safetensors(LORA))
    (model / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    return model


FORMATS = {
    "gguf": (gguf, (), opened_gguf),
    "onnx": (onnx, (), opened_onnx),
    "torchscript": (torchscript, (), None),
    "savedmodel": (savedmodel, (), None),
    "lora": (lora, (), None),
    "transformers": (write_llm, (), None),
    "transformers, whole": (write_llm, ("--whole-files",), None),
    "transformers, gzip": (write_llm, ("--whole-files", "--compress", "gzip"), None),
    "transformers, zstd": (write_llm, ("--whole-files", "--compress", "zstd"), None),
}


def files(path: Path) -> dict[Any, Any]:
    """Return the bytes of all files below a path, or of one file and its siblings."""
    root = path if path.is_dir() else path.parent
    return {
        one.relative_to(root).as_posix(): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in root.rglob("*")
        if one.is_file()
    }


@pytest.mark.integration
@pytest.mark.parametrize(("name", "dialect"), [*zip(FORMATS, cycle(DIALECTS), strict=False)])
def test_every_format_and_dialect_round_trips(
    name: str, dialect: str, aimage: Callable[..., Aimage], repository: str, tmp_path: Path
) -> None:
    make, options, opened = FORMATS[name]
    if "zstd" in name:
        pytest.importorskip("zstandard")
    source = tmp_path / "source"
    source.mkdir()
    path = make(source)
    before = files(path)
    here, there = aimage("here"), aimage("there")
    digest = here("create", f"{repository}:v1", path, *options, "--dialect", dialect).line
    assert here("push", f"{repository}:v1").line == digest
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "here")
    assert there("pull", f"{repository}:v1").line == digest
    there("export", f"{repository}:v1", tmp_path / "out")
    after = files(tmp_path / "out")
    if name == "transformers":  # whose tensors are regrouped: see below
        assert after.pop("model.safetensors")
        before.pop("model.safetensors")
    assert after == before
    if opened is not None:
        opened(tmp_path / "out")


def test_every_tensor_blob_round_trips_bit_for_bit(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = write_llm(source)
    here = aimage()
    here("create", "llm", path)
    here("export", "llm", tmp_path / "out")
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    original = (path / "model.safetensors").read_bytes()
    (first,) = struct.unpack("<Q", original[:8])
    known = json.loads(original[8 : 8 + first])
    for name, _, _ in LLM:
        begin, end = header[name]["data_offsets"]
        start, stop = known[name]["data_offsets"]
        assert (
            raw[8 + length + begin : 8 + length + end]
            == (original[8 + first + start : 8 + first + stop])
        )
