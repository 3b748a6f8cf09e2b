"""Detect the format of a model by its contents, then by its name, without guessing."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import ContentError, FormatError, ModelError, UsageError
from clowder_aimage.formats.detection import detect, is_lora
from tests.importer import formats_protobuf as pb
from tests.importer.conftest import safetensors
from tests.importer.formats_gguf import gguf
from tests.importer.formats_mutate import mutants
from tests.importer.test_importer_torchscript import MEMBERS, archive, without

LORA = safetensors(
    [("unet.to_q.lora_A.weight", "F32", (2, 4)), ("unet.to_q.lora_B.weight", "F32", (4, 2))]
)
PLAIN = safetensors([("model.norm.weight", "F32", (4,))])
CONFIG = b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
CHECKPOINT = archive(without("m/code/__torch__.py", "m/constants.pkl"))
FILES = {
    "gguf": gguf(),
    "onnx": pb.plain_model(),
    "torchscript": archive(MEMBERS),
    "lora": LORA,
}
DIRECTORIES: dict[str, dict[str, bytes]] = {
    "diffusers": {"model_index.json": b"{}", "vae/config.json": CONFIG},
    "lora": {"adapter_config.json": b"{}", "adapter_model.safetensors": LORA},
    "transformers": {"config.json": CONFIG, "model.safetensors": PLAIN},
    "gguf": {"model.gguf": gguf()},
    "onnx": {"model.onnx": pb.plain_model(), "config.json": CONFIG},
    "savedmodel": {"saved_model.pb": pb.saved_model(has_saver=False)},
}


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, raw in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(raw)
    return root


def refused(path: Path, *said: str, kind: type[ContentError] = ModelError) -> Any:
    with pytest.raises(kind) as caught:
        detect(path)
    for word in said:
        assert word in caught.value.message
    assert caught.value.hint or caught.value.remedy
    return caught.value


# -- files


@pytest.mark.parametrize(
    ("kind", "ending"), list(zip(FILES, [".bin", ".gguf", ".onnx", ""], strict=True))
)
def test_a_file_is_detected_by_its_contents(tmp_path: Path, kind: Any, ending: Any) -> None:
    path = tmp_path / f"model{ending}"
    path.write_bytes(FILES[kind])
    assert detect(path) == kind


@pytest.mark.parametrize("ending", ["gguf", "onnx"])
def test_a_damaged_file_is_detected_by_its_suffix(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"model.{ending.upper()}"
    for raw in (b"", b"<!DOCTYPE html>", bytes(100)):
        path.write_bytes(raw)
        assert detect(path) == ending
        module: Any = importlib.import_module(f"clowder_aimage.formats.{ending}")
        with pytest.raises(FormatError):
            module.take(path)


@pytest.mark.parametrize("magic", [b"FUGG", b"tjgg"])
def test_gguf_variants_are_detected_as_gguf(tmp_path: Path, magic: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(magic + bytes(30))
    assert detect(path) == "gguf"


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("model.bin", CHECKPOINT),
        ("anything", pickle.dumps({})),
        ("model.npy", pickle.dumps({}, 0)),
    ],
)
def test_pickled_files_are_refused_as_pickles(tmp_path: Path, name: str, raw: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    error = refused(path, str(path), "pickled")
    assert "safetensors" in str(error.hint)


def test_a_truncated_archive_with_suffix_pt_is_explained_by_its_parser(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(CHECKPOINT[:-30])
    assert detect(path) == "torchscript"
    from clowder_aimage.formats.torchscript import take

    with pytest.raises(FormatError, match="truncated"):
        take(path)


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("word/document.xml", "x")
    return file.getvalue()


@pytest.mark.parametrize("raw", [b"", zipped(), bytes(8) + b"{", bytes(99)])
def test_unknown_files_are_refused_with_the_known_formats(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "notes.docx"
    path.write_bytes(raw)
    error = refused(path, "unsupported model format")
    for word in ("GGUF", "ONNX", "TorchScript", "SavedModel", "Transformers", "diffusers", "LoRA"):
        assert word in str(error.hint)


def test_weights_without_a_config_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"one.safetensors": PLAIN, "two.safetensors": PLAIN})
    error = refused(tmp_path, "one.safetensors", "no config.json")
    assert error.remedy == "whole_files"
    assert detect(tmp_path / "one.safetensors") == "safetensors"


def test_a_damaged_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"x.safetensors": PLAIN[:-1]}) / "x.safetensors"
    refused(path, str(path), kind=FormatError)


def test_a_file_of_a_saved_model_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path, DIRECTORIES["savedmodel"])
    error = refused(root / "saved_model.pb", "part of a SavedModel")
    assert "directory" in str(error.hint)


def test_lfs_pointers_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"m.gguf": b"version https://git-lfs.github.com/spec/v1\n"}) / "m.gguf"
    refused(path, "Git LFS")
    refused(tmp_path / "absent", "does not exist")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")


@pytest.mark.parametrize(
    ("names", "is_one"),
    [
        (["lora_unet_x.lora_down.weight", "lora_unet_x.lora_up.weight", "lora_unet_x.alpha"], True),
        (["x.to_q_lora.down.weight", "x.to_q_lora.up.weight"], True),
        (["x.lora_A.default.weight", "x.lora_B.default.weight", "x.lora_magnitude_vector"], True),
        (["model.layers.0.weight", "model.norm.weight", "model.q.lora_A.weight"], False),
        (["explora.down.weight"], False),
        ([], False),
    ],
)
def test_is_lora_recognises_adapters(names: list[str], is_one: bool) -> None:
    assert is_lora(names) is is_one


# -- directories


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_is_detected_by_its_contents(tmp_path: Path, kind: str) -> None:
    assert detect(write(tmp_path, DIRECTORIES[kind])) == kind


@pytest.mark.parametrize(("first", "second"), [("transformers", "gguf"), ("onnx", "gguf")])
def test_a_directory_of_two_formats_is_refused(tmp_path: Path, first: str, second: str) -> None:
    root = write(tmp_path, DIRECTORIES[second] | DIRECTORIES[first])
    error = refused(root, first, second, kind=UsageError)
    assert error.remedy == "choose_format"


def test_an_adapter_with_the_config_of_its_base_is_an_adapter(tmp_path: Path) -> None:
    assert detect(write(tmp_path, DIRECTORIES["lora"] | {"config.json": CONFIG})) == "lora"


def test_models_in_a_subdirectory_are_detected(tmp_path: Path) -> None:
    root = write(tmp_path, {"config.json": CONFIG, "onnx/model.onnx": pb.plain_model()})
    assert detect(root) == "onnx"
    write(root, {"model.safetensors": PLAIN})
    assert detect(root) == "transformers"


@pytest.mark.parametrize("config", [b"[]", b'{"model_type": ""}'])
def test_a_config_without_an_architecture_is_refused(tmp_path: Path, config: bytes) -> None:
    refused(write(tmp_path, {"config.json": config, "model.safetensors": PLAIN}), "states no model")


def test_a_model_beside_its_modules_names_the_folder(tmp_path: Path) -> None:
    model = {"0_T/config.json": CONFIG, "0_T/model.safetensors": PLAIN}
    refused(write(tmp_path, model), "there is no config.json")
    refused(write(tmp_path, {"modules.json": b"[]"}), "its config.json is in 0_T, not at the top")


@pytest.mark.parametrize("config", [b"\xff", b'{"model_type": "lla'])
def test_a_damaged_config_is_refused(tmp_path: Path, config: bytes) -> None:
    with pytest.raises(FormatError, match=r"config\.json is not valid JSON"):
        detect(write(tmp_path, {"config.json": config, "model.safetensors": PLAIN}))


def test_directories_of_pickled_files_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path, {"config.json": CONFIG, "pytorch_model.bin": CHECKPOINT})
    refused(root, str(root / "pytorch_model.bin"), "pickled")
    root = write(tmp_path / "b", {"model.pt": archive(MEMBERS), "onet.pt": CHECKPOINT})
    error = refused(root, "2 models", "TorchScript (model.pt)", "pickle (onet.pt)")
    assert "pass the file of one model" in error.hint
    root = write(tmp_path / "c", {"model.ckpt": CHECKPOINT, "README.md": b""})
    refused(root, str(root / "model.ckpt"), "pickled")


def test_a_pipe_in_a_directory_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pytorch_model.bin")  # opening it would block forever
    refused(tmp_path, "not a regular file")


@pytest.mark.parametrize(
    ("kind", "name"), list(zip(FILES, ["weights", "model.bin", "model.pt", "x"], strict=True))
)
def test_the_only_model_of_a_directory_is_detected_by_its_contents(
    tmp_path: Path, kind: Any, name: Any
) -> None:
    root = write(tmp_path, {name: FILES[kind], "README.md": b"# words", ".hidden": b""})
    assert detect(root) == kind
    write(root, {"adapters/style/adapter_model.safetensors": LORA})
    assert detect(root) == kind
    write(root, {"labels.txt": b"cat\ndog\n", "empty": b""})
    assert detect(root) == kind
    write(root, {"more": CHECKPOINT})
    refused(root, "2 models", "pickle (more)")


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(FILES["gguf"])
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "weights").symlink_to(tmp_path / "elsewhere")
    refused(tmp_path / "m", "outside the model directory")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "unsupported model format")


def test_a_config_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "m", {"model.safetensors": PLAIN})
    (tmp_path / "config.json").write_bytes(CONFIG)
    (root / "config.json").symlink_to(tmp_path / "config.json")
    refused(root, "outside the model directory")


# -- arbitrary bytes


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_are_detected_or_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.dat"
    found = set()
    for raw in mutants(FILES[kind], 150):
        path.write_bytes(raw)
        try:
            found.add(detect(path))
        except (ModelError, FormatError) as error:
            found.add(type(error).__name__)
    assert {kind, "ModelError"} <= found <= {*FILES, "safetensors", "ModelError", "FormatError"}
