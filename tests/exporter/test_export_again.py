"""``create`` of an exported directory gives the same digest, for each format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.export import export
from clowder_aimage.importer import Provenance
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Descriptor, Reference
from tests.exporter.conftest import files_in
from tests.importer import formats_protobuf as pb
from tests.importer.conftest import safetensors
from tests.importer.formats_gguf import LLAMA, STRING, gguf
from tests.importer.test_importer_torchscript import MEMBERS, archive

ONE, TWO = Reference.parse("one"), Reference.parse("two")
MIT = b"---\nlicense: mit\n---\n"
CARD = b"---\nlicense: mit\ntags: [x]\n---\n# Words\n"
PERMISSION = b"""MIT License
Permission is hereby granted, free of charge, to any person obtaining a copy of this software"""
LORA = safetensors(
    [("layers.0.to_q.lora_A.weight", "F32", (2, 4)), ("layers.0.to_q.lora_B.weight", "F32", (4, 2))]
)
PEFT = {
    "adapter_config.json": b'{"peft_type": "LORA", "lora_alpha": 4}',
    "adapter_model.safetensors": LORA,
}
CONFIG = b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
WEIGHTS = safetensors([("layers.0.to_q.weight", "F32", (4, 4))], format="pt")
SAID = [pair for pair in LLAMA if pair[0] != "general.license"]
WITHOUT = gguf(SAID)
FILES = {
    "model.gguf": WITHOUT,
    "weights": WITHOUT,
    "said.gguf": gguf(),
    "model.pt": archive(MEMBERS),
    "model.bin": archive(MEMBERS),
    "model.onnx": pb.plain_model(),
    "network": pb.plain_model(),
    "style.safetensors": LORA,
    "style": LORA,
}
SAVED = {
    "saved_model.pb": pb.saved_model(),
    "variables/variables.index": b"index",
    "variables/variables.data-00000-of-00001": b"data",
    "assets/vocab.txt": b"words",
}
TRANSFORMERS = {"config.json": CONFIG, "model.safetensors": WEIGHTS}


def write(root: Path, files: dict[Any, Any]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def again(store: ImageLayout, tmp_path: Path, source: Path, **options: Any) -> dict[str, bytes]:
    """Return the files of an export, after verifying that packing them gives the same digest."""
    made = create(store, ONE, source, **options)
    shutil.rmtree(source) if source.is_dir() else source.unlink()
    export(store, ONE, tmp_path / "out")
    options.pop("provenance", None)
    form = options.pop("form", ModelForm())
    form = ModelForm(form.format, form.whole_files, form.compression)
    assert create(store, TWO, tmp_path / "out", form=form, **options).descriptor == made.descriptor
    return files_in(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "license_"), [*((name, "mit") for name in FILES), ("said.gguf", None), ("style", None)]
)
def test_single_file_models_round_trip(
    store: ImageLayout, tmp_path: Path, name: str, license_: str | None
) -> None:
    source = write(tmp_path / "source", {name: FILES[name]}) / name
    card = {"README.md": MIT} if license_ else {}
    if name == "said.gguf":
        license_ = "apache-2.0" if license_ else None  # which the file itself declares
        card = {}
    found = again(store, tmp_path, source, provenance=Provenance(license=license_))
    assert found == {name: FILES[name]} | card


def test_a_licence_with_a_name_round_trips(store: ImageLayout, tmp_path: Path) -> None:
    """A GGUF file states it as ``other``, and needs no card beside it."""
    named = [("general.license", STRING, "other"), ("general.license.name", STRING, "Odd One")]
    files = {"model.gguf": gguf([*SAID, *named])}
    source = write(tmp_path / "source", files) / "model.gguf"
    assert again(store, tmp_path, source) == files
    properties = read_aimage(store, ONE).aimage.properties
    assert properties["license"] == "LicenseRef-Odd-One"


@pytest.mark.parametrize("license_", ["mit", None])
def test_savedmodel_round_trips(store: ImageLayout, tmp_path: Path, license_: str | None) -> None:
    source = write(tmp_path / "source", SAVED)
    found = again(store, tmp_path, source, provenance=Provenance(license=license_))
    assert found == SAVED | ({"README.md": MIT} if license_ else {})


@pytest.mark.parametrize("card", [CARD, b"# Words\n"])
def test_savedmodel_with_a_card_round_trips(
    store: ImageLayout, tmp_path: Path, card: bytes
) -> None:
    source = write(tmp_path / "source", SAVED | {"README.md": card})
    assert again(store, tmp_path, source) == SAVED | {"README.md": card}


@pytest.mark.parametrize("other", [{"README.md": CARD}, {"LICENSE": PERMISSION}], ids=["card", ""])
@pytest.mark.parametrize("compression", ["", "gzip"])
def test_directory_of_whole_files_round_trips(
    store: ImageLayout, tmp_path: Path, compression: str, other: dict[str, bytes]
) -> None:
    source = write(tmp_path / "source", TRANSFORMERS | other)
    form = ModelForm(whole_files=True, compression=compression)
    assert again(store, tmp_path, source, form=form) == TRANSFORMERS | other


def test_peft_adapter_round_trips(store: ImageLayout, tmp_path: Path) -> None:
    source = write(tmp_path / "source", PEFT | {"README.md": CARD})
    assert again(store, tmp_path, source) == PEFT | {"README.md": CARD}


SOURCES = {
    "gguf": {"model.gguf": WITHOUT},
    "odd": {"weights": WITHOUT},
    "torchscript": {"model.pt": archive(MEMBERS)},
    "onnx": {"model.onnx": pb.plain_model()},
    "nested": {"onnx/model.onnx": pb.plain_model(), "config.json": CONFIG},
    "savedmodel": SAVED,
    "transformers": TRANSFORMERS,
    "lora": PEFT,
}


@pytest.mark.parametrize("kind", ["gguf", "nested", "savedmodel", "transformers", "lora"])
def test_models_with_adapters_round_trip(store: ImageLayout, tmp_path: Path, kind: str) -> None:
    """Of PEFT's directory, and a lone file of any name."""
    source = write(tmp_path / "source", SOURCES[kind])
    write(tmp_path / "style", PEFT)
    (tmp_path / "face.bin").write_bytes(LORA)
    form = ModelForm(adapters=(("style", tmp_path / "style"), ("face", tmp_path / "face.bin")))
    found = again(store, tmp_path, source, form=form)
    adapters = {f"adapters/style/{name}": data for name, data in PEFT.items()}
    assert found == SOURCES[kind] | adapters | {"adapters/face/face.bin": LORA}
    facts = json.loads(store.find_path(_config(store)).read_bytes())
    assert facts["adapters"].keys() == {"face", "style"}
    assert facts["adapters"]["style"]["alpha"] == 4


def _config(store: ImageLayout) -> Descriptor:
    from clowder_aimage.layout.stored_aimage import read_aimage

    return read_aimage(store, TWO).manifest.config


def test_diffusers_model_with_an_adapter_round_trips(
    store: ImageLayout, tmp_path: Path, tiny: Path
) -> None:
    lora = [
        ("transformer.layers.0.attention.to_q.lora_A.weight", "F32", (2, 48)),
        ("transformer.layers.0.attention.to_q.lora_B.weight", "F32", (48, 2)),
    ]
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    write(source, {"adapters/style/x.safetensors": safetensors(lora)})
    found = again(store, tmp_path, source)
    assert found["adapters/style/x.safetensors"] == safetensors(lora)


# -- invalid adapters


@pytest.mark.parametrize(
    ("kind", "files", "said"),
    [
        ("transformers", {"adapters/notes.txt": b"words"}, "it is a file"),
        ("gguf", {"adapters/s.safetensors": LORA}, "is in a subdirectory|it is a file"),
        ("onnx", {"adapters/style/notes.txt": b"", "adapters/style/more": b""}, "not 0"),
        ("onnx", {"adapters/s/a.safetensors": LORA, "adapters/s/b.safetensors": LORA}, "not 2"),
        ("gguf", {"adapters/s/adapter_model.bin": b"\x80\x02.", "adapters/s/more": b""}, "pickled"),
        ("torchscript", {"adapters/-s/a.safetensors": LORA}, "not a valid adapter name"),
    ],
    ids=["file", "lora", "words", "two", "pickled", "name"],
)
def test_create_refuses_malformed_adapter_directories(
    store: ImageLayout, tmp_path: Path, kind: str, files: dict[str, bytes], said: str
) -> None:
    source = write(tmp_path / "source", SOURCES[kind] | files)
    with pytest.raises(ModelError, match=said) as caught:
        create(store, ONE, source)
    assert caught.value.hint
    assert list(store.list_tags()) == []


def test_empty_directory_of_adapters_is_refused(store: ImageLayout, tmp_path: Path) -> None:
    source = write(tmp_path / "source", TRANSFORMERS)
    (source / "adapters").mkdir()
    with pytest.raises(ModelError, match="it is empty"):
        create(store, ONE, source)


@pytest.mark.parametrize("kind", ["transformers", "savedmodel"])
def test_damaged_adapter_is_refused(store: ImageLayout, tmp_path: Path, kind: str) -> None:
    broken = {"adapters/style/adapter_model.safetensors": LORA[:-1]}
    source = write(tmp_path / "source", SOURCES[kind] | broken)
    if kind == "savedmodel":  # each of its files is its own
        assert again(store, tmp_path, source) == SAVED | broken
        return
    with pytest.raises(FormatError):
        create(store, ONE, source)


def test_other_files_in_adapters_belong_to_the_model(store: ImageLayout, tmp_path: Path) -> None:
    files = {"model.onnx": pb.plain_model(), "adapters/small/model.onnx": pb.plain_model()}
    source = write(tmp_path / "source", files)
    assert again(store, tmp_path, source) == files
    saved = SAVED | {"adapters/notes.txt": b"words"}
    create(store, ONE, write(tmp_path / "saved", saved))
    export(store, ONE, tmp_path / "third")
    assert files_in(tmp_path / "third") == saved


def test_adapter_link_out_of_the_directory_is_refused(store: ImageLayout, tmp_path: Path) -> None:
    write(tmp_path / "style", PEFT)
    source = write(tmp_path / "source", TRANSFORMERS)
    (source / "adapters").mkdir()
    (source / "adapters" / "style").symlink_to(tmp_path / "style")
    with pytest.raises(ModelError, match="outside the model directory"):
        create(store, ONE, source)


def test_given_adapter_name_must_not_exist_in_the_model(store: ImageLayout, tmp_path: Path) -> None:
    files = {f"adapters/style/{name}": data for name, data in PEFT.items()}
    source = write(tmp_path / "source", TRANSFORMERS | files)
    write(tmp_path / "style", PEFT)
    with pytest.raises(UsageError, match="duplicate adapter name: style"):
        create(store, ONE, source, form=ModelForm(adapters=(("style", tmp_path / "style"),)))


def test_adapter_for_another_model_is_refused(store: ImageLayout, tmp_path: Path) -> None:
    lora = [
        ("layers.0.to_q.lora_A.weight", "F32", (2, 9)),
        ("layers.0.to_q.lora_B.weight", "F32", (4, 2)),
    ]
    files = {"adapters/style/x.safetensors": safetensors(lora)}
    source = write(tmp_path / "source", TRANSFORMERS | files)
    with pytest.raises(FormatError):
        create(store, ONE, source)
