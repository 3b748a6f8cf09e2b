"""Files of a repository on the hub: those that are packed are chosen by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import AImageError, ContentError, FormatError, ModelError, UsageError
from clowder_aimage.importer.hub_files import choose, find_parts
from clowder_aimage.importer.hub_model import HubName

SHARDS = {
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
}
TWO = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
PIPELINE = {
    "_class_name": "ZImagePipeline",
    "_diffusers_version": "0.36.0",
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "Qwen3Model"],
    "safety_checker": [None, None],
}
PART_ONE, PART_TWO = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"


def chosen(files: set[Any], kind: str | None = None, variant: str = "", **content: Any) -> set[str]:
    def read(name: str) -> bytes:
        assert name in files
        return json.dumps(content[name.rpartition("/")[2].partition(".")[0]]).encode()

    return set(choose("org/m", files, read, kind, variant).names)


def test_of_transformers_the_shards_of_the_index_are_chosen() -> None:
    wanted = {"config.json", "tokenizer.json", "model.safetensors.index.json", "README.md", *TWO}
    wanted.add("LICENSE")
    more = {
        "consolidated.safetensors",
        "pytorch_model-00001-of-00001.bin",
        "pytorch_model.bin.index.json",
        "flax_model.msgpack",
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        ".gitattributes",
    }
    assert chosen(wanted | more, model=SHARDS) == wanted


MODULES = [{"path": "", "type": "Transformer"}, {"path": "2_Dense", "type": "Dense"}]


def test_the_weights_of_modules_are_chosen() -> None:
    wanted = {"config.json", "model.safetensors", "modules.json", "2_Dense/config.json"}
    wanted.add("2_Dense/model.safetensors")
    more = {"2_Dense/pytorch_model.bin"}
    assert chosen(wanted | more, modules=MODULES) == wanted


def test_pickled_weights_of_a_module_are_refused() -> None:
    files = {"config.json", "model.safetensors", "modules.json", "2_Dense/pytorch_model.bin"}
    with pytest.raises(ModelError, match=r"2_Dense/pytorch_model\.bin"):
        chosen(files, modules=MODULES)


def test_of_several_weight_files_the_one_without_a_variant_is_chosen() -> None:
    more = {"model.fp16.safetensors", "consolidated.safetensors"}
    wanted = {"config.json", "model.safetensors"}
    assert chosen(wanted | more) == wanted


def test_of_a_pipeline_the_components_are_chosen() -> None:
    wanted = {
        "model_index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/config.json",
        "text_encoder/model.safetensors.index.json",
        *(f"text_encoder/{name}" for name in TWO),
        "vae/notes.md",
    }
    more = {
        "flux.safetensors",
        "safety_checker/model.safetensors",
        "text_encoder/model.fp16-00001-of-00001.safetensors",
        "text_encoder/model.fp16.safetensors.index.json",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.bin",
    }
    assert chosen(wanted | more, model_index=PIPELINE, model=SHARDS) == wanted


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"a.gguf", "x.txt", "sub/b.gguf"}, {"a.gguf", "x.txt"}),
        ({PART_ONE, PART_TWO}, {PART_ONE, PART_TWO}),
        ({"a.gguf", "mmproj-a-f16.gguf"}, {"a.gguf", "mmproj-a-f16.gguf"}),
        ({"a.gguf", "mmproj-f16.gguf", "mmproj-f32.gguf"}, {"a.gguf"}),
        ({"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}, None),
        ({"adapter_config.json", "adapter_model.safetensors", "other.safetensors"}, None),
        ({"style.safetensors", "picture.png", "old.ckpt"}, {"style.safetensors", "picture.png"}),
        ({"model.onnx", "model.onnx_data", "config.json", "pytorch_model.bin"}, None),
        ({"saved_model.pb", "variables/variables.index"}, None),
    ],
)
def test_other_formats(files: set[str], wanted: set[str] | None) -> None:
    unwanted = {"adapter_model.bin", "other.safetensors", "pytorch_model.bin"}
    assert chosen(files) == (wanted or files - unwanted)


def test_a_pipeline_needs_its_index() -> None:
    with pytest.raises(ModelError, match=r"org/m has no model_index\.json"):
        chosen({"config.json"}, "diffusers")


def test_a_format_that_is_given_is_chosen() -> None:
    files = {"config.json", "model.safetensors", "a.gguf", "net.pt"}
    assert chosen(files, "gguf") == {"a.gguf", "config.json"}
    assert chosen(files, "torchscript") == {"net.pt", "config.json"}
    assert chosen(files, "lora") == {"model.safetensors", "config.json"}


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({"a.gguf", "b.gguf"}, UsageError, "2 models: a.gguf, b.gguf"),
        ({"a.safetensors", "b.safetensors"}, UsageError, "2 models"),
        ({"pytorch_model.bin"}, ModelError, "pickled"),
        ({"README.md"}, ModelError, "no model"),
        (set(), ModelError, "no model"),
        (
            {"config.json", "model.safetensors", "2_Dense/model.safetensors"},
            UsageError,
            r"several formats: transformers, safetensors \(2_Dense/model",
        ),
    ],
)
def test_refused(files: set[str], error: type[ContentError], said: str) -> None:
    with pytest.raises(error, match=said):
        chosen(files)


def test_the_chosen_variant_of_any_pipeline_is_fetched() -> None:
    index = {"_class_name": "OtherPipeline", "vae": ["diffusers", "AutoencoderKL"]}
    plain, half = (f"vae/diffusion_pytorch_model{one}.safetensors" for one in ("", ".fp16"))
    files = {"model_index.json", "vae/config.json", plain, half, "other.ckpt"}
    assert chosen(files, model_index=index) == files - {half, "other.ckpt"}
    found = chosen(files, variant="fp16", model_index=index)
    assert found == files - {plain, "other.ckpt"}
    with pytest.raises(ModelError, match=r"org/m/model_index\.json: invalid pipeline class"):
        chosen(files, model_index=index | {"_class_name": 1})


@pytest.mark.parametrize("raw", [b"{", b"[]", b"[" * 100_000, b"\xff"])
def test_a_damaged_index_is_refused(raw: bytes) -> None:
    files = {"config.json", "model.safetensors.index.json", *TWO}
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json is (not|nested)"):
        choose("org/m", files, lambda _: raw, None)


@pytest.mark.parametrize("shards", [{"a": ["x"]}, {"a": 1}, [], None, {"a": "../../etc/passwd"}])
def test_an_index_chooses_no_other_file(shards: dict[str, Any] | list[Any] | None) -> None:
    files = {"config.json", "model.safetensors.index.json", *TWO}
    found = chosen(files, model={"weight_map": shards})
    assert found == {"config.json", "model.safetensors.index.json"}


def test_all_parts_of_a_split_file() -> None:
    assert find_parts(PART_ONE, {PART_ONE, PART_TWO, "n-00001-of-00002.gguf"}) == {
        PART_ONE,
        PART_TWO,
    }
    assert find_parts("a.gguf", {"a.gguf", "b.gguf"}) == {"a.gguf"}


# -- names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/m", HubName("org/m")),
        ("org/m@v1.0", HubName("org/m", "v1.0")),
        ("org/m@refs/pr/3", HubName("org/m", "refs/pr/3")),
        ("hf://org/m/a/b.gguf", HubName("org/m", "main", "a/b.gguf")),
        ("hf://org/m@abc/b.gguf", HubName("org/m", "abc", "b.gguf")),
        ("https://hf.co/org/m/tree/refs%2Fpr%2F3", HubName("org/m", "refs/pr/3")),
        (
            "https://huggingface.co/org/m/resolve/v1/x.gguf?download=true",
            HubName("org/m", "v1", "x.gguf"),
        ),
        ("/org/m", None),
        ("./org/m", None),
        ("../m", None),
        ("org/m/n", None),
        ("m", None),
        ("org/", None),
        ("or g/m", None),
        ("org/m@", None),
        ("org%2Fm", None),
        ("a--b/c", None),
        ("datasets/m", None),
        ("https://hf.co/org/m/blob/main/a%20b.gguf", HubName("org/m", "main", "a b.gguf")),
        ("", None),
    ],
)
def test_names(
    text: str, name: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert HubName.parse(text) == name
    assert name is None or HubName.parse(f"hf://{name}") == name


@pytest.mark.parametrize(
    "text",
    [
        "hf://m",
        "hf://a/b--c",
        "hf://a/b/../../c",
        "hf://a/b//etc/x",
        "hf://a/b/./x",
        "hf://datasets/a/b",
        "hf.co/",
        "hf://a b/c",
    ],
)
def test_addresses_that_are_no_names(text: str) -> None:
    with pytest.raises(AImageError, match="does not name a model"):
        HubName.parse(text)
