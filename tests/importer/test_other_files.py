"""Every file of a model directory is packed or named, whatever the format."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.export import export
from clowder_aimage.formats.left_out import CACHE, COPY, HIDDEN, LINK, STORE, TRAINING, LeftOut
from clowder_aimage.importer import PackedModel
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.exporter.conftest import files_in
from tests.importer import formats_protobuf as pb
from tests.importer import test_importer_diffusers as diffusers
from tests.importer.conftest import FILES, WEIGHTS, in_memory, safetensors, weights_name
from tests.importer.formats_gguf import gguf
from tests.importer.test_importer_torchscript import MEMBERS, archive
from tests.process import Aimage

NAME = Reference.parse("m")
WHOLE = ModelForm(whole_files=True)
CONFIG = b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
PLAIN = safetensors([("model.norm.weight", "F32", (4,))], format="pt")
LORA = safetensors(
    [("layers.0.to_q.lora_A.weight", "F32", (2, 4)), ("layers.0.to_q.lora_B.weight", "F32", (4, 2))]
)
PEFT = {"adapter_config.json": b'{"peft_type": "LORA", "lora_alpha": 4}'}
PEFT["adapter_model.safetensors"] = LORA
SAVED = {"saved_model.pb": pb.saved_model(has_saver=False), "assets/vocab.txt": b"words"}
PIPELINE = {
    name: value.encode() if isinstance(value, str) else json.dumps(value).encode()
    for name, value in FILES.items()
} | {
    f"{name}/{weights_name(name)}.safetensors": safetensors(tensors, name, format="pt")
    for name, tensors in WEIGHTS.items()
}
DIRECTORIES: dict[str, dict[str, bytes]] = {
    "diffusers": diffusers.FILES | diffusers.shards(),
    "z-image": PIPELINE,
    "transformers": {"config.json": CONFIG, "model.safetensors": PLAIN},
    "gguf": {"model.gguf": gguf()},
    "onnx": {"model.onnx": pb.plain_model()},
    "nested-onnx": {"config.json": b"{}", "onnx/model.onnx": pb.plain_model()},
    "torchscript": {"model.jit": archive(MEMBERS)},
    "savedmodel": SAVED,
    "lora": PEFT,
    "safetensors": {"weights.safetensors": PLAIN},
}
PICKLE, TFLITE = pickle.dumps({"a": [1, 2]}), b"\x1c\0\0\0TFL3" + bytes(30)
# The content of an extra file by its name; names without one have text.
EXTRAS: dict[str, bytes] = {
    **dict.fromkeys(("LICENSE", "NOTICE", "USE_POLICY.md", "README.md", "labels.txt"), b"words\n"),
    **dict.fromkeys(("keys_v1.txt", "settings.yaml", "chat_template.jinja", "go.py"), b"{{ x }}\n"),
    **dict.fromkeys(("table.csv", "no-suffix", "größe.json", 'a\'b "c".txt', "x\\y.txt"), b"{}"),
    "empty": b"",
    "picture.png": b"\x89PNG\r\n",
    "vocab.bin": b"\x83\xa1a\x01\xa1b\x02",
    "tool_use.jinja": b"{{ tools }}",
    "array.npy": b"\x93NUMPY\1\0\x0a\0{'descr': 'f4'}",
    **dict.fromkeys((".gitattributes", ".DS_Store", "Thumbs.db", "old.pyc"), b"x"),
    **dict.fromkeys(("head.pth", "model.joblib", "weights", "data.npy"), PICKLE),
    **dict.fromkeys(("pytorch_model.bin", "training_args.bin", "optimizer.pt"), PICKLE),
    "flax_model.msgpack": b"x",
    "tf_model.h5": b"\x89HDF\r\n\x1a\n",
    "net.tflite": TFLITE,
    "other.safetensors": LORA,
    "other.onnx": pb.plain_model(),
    "other.gguf": gguf(),
    "events.out.tfevents.1": b"x",
    "other.jit": archive(MEMBERS),
}
# Names of files that are never packed, also as whole files.
NEVER = {".gitattributes", ".DS_Store"}


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def pack(root: Path, form: ModelForm = ModelForm()) -> PackedModel:  # noqa: B008
    return create(in_memory(), NAME, root, form=form)


def is_packed(made: PackedModel, name: str) -> bool:
    return any(written.layer.name == name for written in made.layers)


def names_left_out(made: PackedModel) -> set[str]:
    return {file.path for file in made.left_out}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_file_is_packed_or_named_and_changes_the_digest(tmp_path: Path, kind: str) -> None:
    root = write(tmp_path / kind, DIRECTORIES[kind])
    before = pack(root)
    assert not before.left_out
    outcomes = set()
    for name in (*EXTRAS, *(f"deep/sub/{name}" for name in [*EXTRAS][::3])):
        write(root, {name: EXTRAS[name.removeprefix("deep/sub/")]})
        try:
            made = pack(root)
        except (ModelError, UsageError) as error:
            assert Path(name).name in error.message or kind in error.message
            assert error.hint or error.remedy
            outcomes.add("refused")
        else:
            assert is_packed(made, name) != (name in names_left_out(made)), name
            assert is_packed(made, name) == (made.descriptor != before.descriptor), name
            outcomes.add("packed" if is_packed(made, name) else "named")
        (root / name).unlink()
    assert outcomes >= {"packed", "named"}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_whole_files_are_all_files_and_come_back(
    store: ImageLayout, tmp_path: Path, kind: str
) -> None:
    root = write(tmp_path / kind, DIRECTORIES[kind])
    files = {place + name: data for place in ("", "deep/sub/") for name, data in EXTRAS.items()}
    files = {name: data for name, data in files.items() if "\\" not in name}
    write(root, files)
    made = create(store, NAME, root, form=WHOLE)
    expected = {n: d for n, d in files_in(root).items() if n.rpartition("/")[2] not in NEVER}
    export(store, NAME, tmp_path / "out")
    assert files_in(tmp_path / "out") == expected
    assert names_left_out(made) == files_in(root).keys() - expected.keys()
    assert made.aimage.properties["pickled"] is True


LEFT_OUT = [
    (".git/config", ".git/", HIDDEN),
    (".cache/huggingface/x", ".cache/", HIDDEN),
    ("sub/__pycache__/x.pyc", "sub/__pycache__/", CACHE),
    ("onnx/model.onnx", "onnx/", COPY),
    ("openvino/openvino_model.xml", "", ""),
    ("original/consolidated.00.pth", "original/", COPY),
    ("original/picture.png", "", ""),
    ("model.fp16.safetensors", "model.fp16.safetensors", COPY),
    ("consolidated.safetensors", "consolidated.safetensors", COPY),
    ("pytorch_model.bin.index.json", "pytorch_model.bin.index.json", COPY),
    *((name, name, COPY) for name in ("model.onnx", "model_quantized.onnx", "64-8bits.tflite")),
    ("rust_model.ot", "rust_model.ot", COPY),
    ("checkpoint-500/optimizer.pt", "checkpoint-500/", TRAINING),
    ("additional_chat_templates/tool_use.jinja", "", ""),
]


@pytest.mark.parametrize(("name", "path", "reason"), LEFT_OUT)
def test_the_reason_is_named(tmp_path: Path, name: str, path: str, reason: str) -> None:
    root = write(tmp_path, DIRECTORIES["transformers"] | {name: b"x"})
    made = pack(root)
    assert made.left_out == ((LeftOut(path, reason),) if path else ())
    assert is_packed(made, name) is not bool(path)


def test_links_and_stores_in_a_directory(tmp_path: Path) -> None:
    root = write(tmp_path / "m", DIRECTORIES["transformers"] | {"sub/notes.txt": b"x"})
    write(root, {"store/oci-layout": b"{}", "store/blobs/x": b"x"})
    (root / "again").symlink_to("sub")
    (root / "labels.txt").symlink_to("sub/notes.txt")
    made = pack(root)
    assert made.left_out == (LeftOut("again/", LINK), LeftOut("store/", STORE))
    assert is_packed(made, "labels.txt")
    (root / "away").symlink_to(tmp_path)
    with pytest.raises(ModelError, match="outside the model directory"):
        pack(root)


def test_names_that_differ_in_case_are_both_packed(tmp_path: Path) -> None:
    root = write(tmp_path, DIRECTORIES["onnx"] | {"a.txt": b"1", "A.txt": b"2"})
    assert is_packed(pack(root), "A.txt")


SEVERAL = {
    "net.jit": archive(MEMBERS),
    "net_16k.safetensors": PLAIN,
    "nmp/saved_model.pb": pb.saved_model(has_saver=False),
    "nmp/variables/variables.index": b"x",
    "nmp.tflite": TFLITE,
    "nmp.mlpackage/Manifest.json": b"{}",
    "nmp.mlpackage/Data/weight.bin": b"x",
    "head.pth": PICKLE,
}


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "transformers", "gguf"])
def test_other_models_are_refused_or_left_out_by_choice(tmp_path: Path, kind: str) -> None:
    root = write(tmp_path / kind, DIRECTORIES[kind] | {"labels.txt": b"x"})
    before = pack(root)
    for name in SEVERAL if kind != "transformers" else [*SEVERAL][2:]:
        (root / "x").mkdir(exist_ok=True)
        path = name if "/" in name else f"x/{name}"
        write(root, {path: SEVERAL[name]})
    with pytest.raises(UsageError, match="several formats") as caught:
        pack(root)
    assert caught.value.remedy == "choose_format"
    shown = {"nmp/", "nmp.mlpackage/", "x/head.pth", "x/nmp.tflite"}
    assert all(f"({path})" in caught.value.message for path in sorted(shown)[:3])
    made = pack(root, ModelForm(format=kind))
    assert made.descriptor == before.descriptor
    assert names_left_out(made) >= shown


def test_a_snapshot_of_the_hub_needs_no_format(tmp_path: Path) -> None:
    root = write(tmp_path / "snapshots" / "c0ffee", DIRECTORIES["transformers"] | SEVERAL)
    assert names_left_out(pack(root)) >= {"head.pth", "nmp/", "nmp.tflite"}


def test_models_of_one_kind_are_not_mixed(tmp_path: Path) -> None:
    root = write(tmp_path, DIRECTORIES["onnx"] | {"net.jit": SEVERAL["net.jit"]})
    with pytest.raises(UsageError, match=r"several formats: onnx, TorchScript \(net\.jit\)"):
        pack(root)
    made = pack(root, ModelForm(format="torchscript"))
    assert {file.path for file in made.left_out} == {"model.onnx"}


# -- licences

MIT = "Permission is hereby granted, free of charge, to any person obtaining a copy"


@pytest.mark.parametrize(
    ("name", "text", "license_"),
    [
        ("LICENSE", "          Apache License\n   Version 2.0, January 2004\n", "apache-2.0"),
        ("LICENCE.txt", f"{MIT[:60]}\n{MIT[60:]}", "mit"),
        ("COPYING", "GNU GENERAL PUBLIC LICENSE\n   Version 3, 29 June 2007", "gpl-3.0"),
        ("LICENSE", "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT", "llama3.1"),
        ("LICENSE", "our own terms", None),
        ("sub/LICENSE", "Apache License Version 2.0", None),
    ],
)
@pytest.mark.parametrize("kind", ["onnx", "transformers", "gguf", "torchscript"])
def test_the_licence_is_read_from_its_text(
    tmp_path: Path, kind: str, name: str, text: str, license_: str | None
) -> None:
    files = DIRECTORIES[kind]
    if kind == "gguf":
        files = {"model.gguf": gguf([])}
    made = pack(write(tmp_path, files | {name: text.encode()}))
    assert made.aimage.properties.get("license") == license_
    assert is_packed(made, name)


def test_a_licence_that_a_file_states_needs_no_card(store: ImageLayout, tmp_path: Path) -> None:
    root = write(tmp_path / "m", DIRECTORIES["transformers"] | {"LICENSE": MIT.encode()})
    made = create(store, NAME, root)
    export(store, NAME, tmp_path / "out")
    assert files_in(tmp_path / "out").keys() == files_in(root).keys()
    again = create(store, Reference.parse("again"), tmp_path / "out")
    assert again.descriptor == made.descriptor


def test_the_licence_of_the_card_has_precedence(tmp_path: Path) -> None:
    files = {
        "README.md": b"---\nlicense: mit\n---\n# x\n",
        "LICENSE": b"Apache License Version 2.0",
    }
    made = pack(write(tmp_path, DIRECTORIES["onnx"] | files))
    assert made.aimage.properties["license"] == "mit"


# -- the command line


def test_the_files_are_named_to_people_and_programs(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    many = {f"checkpoint-{number}/x": b"x" for number in range(9)}
    root = write(tmp_path / "m", DIRECTORIES["transformers"] | many | {".git/x": b"", "y.pyc": b""})
    run = aimage("store")
    said = run("create", "m", root).err
    assert f"left out, {HIDDEN}: .git/\n" in said
    assert "checkpoint-4/, checkpoint-5/ and 3 more\n" in said
    assert f"left out, {HIDDEN}: .git/\n" in run("create", "m", root, "-q").err
    value: Any = run("create", "m", root, "--json").value
    assert {"path": "checkpoint-8/", "reason": TRAINING} in value["leftOut"]
    assert len(value["leftOut"]) == 11
    write(root, {"sub/x.onnx": pb.plain_model()})
    said = run("create", "m", root, code=2).err
    assert "--format transformers" in said
    assert "--format files" in said
