"""A ModelPack is read by a reader that knows its specification only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.dialect import Layer
from clowder_aimage.dialect.file_kind import LARGE, select_kind
from clowder_aimage.oci import Descriptor, Digest, mediatype
from tests.e2e.conftest import write_llm
from tests.process import Aimage

# modelpack/model-spec, specs-go/v1/mediatype.go (158c46c73bd8): media types of raw files
KINDS = {
    "application/vnd.cncf.model.weight.v1.raw": "weight",
    "application/vnd.cncf.model.weight.config.v1.raw": "config",
    "application/vnd.cncf.model.doc.v1.raw": "doc",
    "application/vnd.cncf.model.code.v1.raw": "code",
    "application/vnd.cncf.model.dataset.v1.raw": "dataset",
}
FILES = {
    # the libraries of the formats: safetensors, PyTorch, GGUF, ONNX, TensorFlow, Flax, MLX ...
    "model.safetensors": "weight",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": "weight",
    "vae/diffusion_pytorch_model.fp16.bin": "weight",
    "text_encoder/PYTORCH_MODEL.BIN": "weight",
    "consolidated.00.pth": "weight",
    "v1-5-pruned.ckpt": "weight",
    "gguf/model-Q4_K_M.gguf": "weight",
    "onnx/model.onnx": "weight",
    "onnx/model.onnx_data": "weight",
    "onnx/model.onnx_data_1": "weight",
    "tf/saved_model.pb": "weight",
    "tf/variables/variables.data-00000-of-00001": "weight",
    "tf/variables/variables.index": "weight",
    "tf_model.h5": "weight",
    "flax_model.msgpack": "weight",
    "rust_model.ot": "weight",
    "mlx/weights.npz": "weight",
    "script/net.torchscript": "weight",
    "CoreML/Data/weights/weight.bin": "weight",
    "model.q4_0": "weight",
    "readme.safetensors/model.safetensors": "weight",
    # tokenizer.json, config.json, etc.
    "config.json": "config",
    "model.safetensors.index.json": "config",
    "tokenizer/tokenizer.json": "config",
    "tokenizer/tokenizer.model": "config",
    "tokenizer/merges.txt": "config",
    "chat_template.jinja": "config",
    "params.yaml": "config",
    "qwen.tiktoken": "config",
    # README.md, LICENSE, etc.
    "README.md": "doc",
    "LICENSE": "doc",
    "LICENSE.txt": "doc",
    "docs/card.pdf": "doc",
    "assets/teaser.png": "doc",
    "modeling_heron.py": "code",
    "scripts/serve.sh": "code",
    "requirements.txt": "code",
    "samples/train.csv": "dataset",
    "samples/train-00000.parquet": "dataset",
}


def read_modelpack(store: Path, digest: str) -> dict[str, tuple[str, bytes]]:
    """Return the kind and the content of each file (docs/spec.md, docs/annotations.md)."""

    def read(content: str) -> bytes:
        raw = (store / "blobs" / content.replace(":", "/")).read_bytes()
        assert content == f"sha256:{hashlib.sha256(raw).hexdigest()}"
        return raw

    manifest = json.loads(read(digest))
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    config = json.loads(read(manifest["config"]["digest"]))
    assert config["modelfs"]["diffIds"] == [layer["digest"] for layer in manifest["layers"]]
    return {
        layer["annotations"]["org.cncf.model.filepath"]: (
            KINDS[layer["mediaType"]],
            read(layer["digest"]),
        )
        for layer in manifest["layers"]
    }


def test_a_reader_of_the_specification_knows_the_kind_of_each_file(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    model, here = tmp_path / "model", aimage()
    for name in FILES:
        path = model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    digest = here("create", "x", model, "--whole-files", "--dialect", "modelpack").line
    assert read_modelpack(here.store, digest) == {
        name: (kind, name.encode()) for name, kind in FILES.items()
    }


@pytest.mark.parametrize("options", [(), ("--whole-files",), ("--format", "transformers")])
def test_weights_of_each_way_to_pack_are_weights(
    aimage: Callable[..., Aimage], tmp_path: Path, options: tuple[str, ...]
) -> None:
    here = aimage()
    model = write_llm(tmp_path)
    digest = here("create", "x", model, "--dialect", "modelpack", *options).line
    files = read_modelpack(here.store, digest)
    kinds = {path: kind for path, (kind, _) in files.items()}
    assert kinds.pop("config.json") == kinds.pop("tokenizer.json") == "config"
    weights = [content for kind, content in files.values() if kind == "weight"]
    assert sum(map(len, weights)) > 8 * 64 * 2 + 64 * 64 * 2 + 64 * 4


def build_layer(media_type: str, name: str, size: int = 1) -> Layer:
    return Layer(Descriptor(media_type, Digest.of(name.encode()), size), name)


def test_the_kind_of_a_layer_by_its_media_type_and_size() -> None:
    cases = [
        (build_layer(mediatype.AIMAGE_HEADER, "model.safetensors"), "weight.config"),
        (build_layer(mediatype.AIMAGE_GGUF, "model"), "weight"),
        (build_layer(f"{mediatype.AIMAGE_GGUF}+gzip", "model"), "weight"),
        (build_layer(mediatype.AIMAGE_SAFETENSORS, "vae/quant.model"), "weight"),
        (build_layer(mediatype.AIMAGE_TRANSFORMERS, "x.safetensors.index.json"), "weight.config"),
        (build_layer(mediatype.AIMAGE_ONNX, "onnx__MatMul_7"), "weight"),
        (build_layer(mediatype.AIMAGE_FILE, "unknown", LARGE - 1), "weight.config"),
        (build_layer(mediatype.AIMAGE_FILE, "unknown", LARGE), "weight"),
        (build_layer(mediatype.AIMAGE_FILE, "tokenizer.json", LARGE), "weight.config"),
    ]
    assert [select_kind(layer) for layer, _ in cases] == [kind for _, kind in cases]
