"""Sidecars of a model file of Civitai are packed with it, and their facts are in the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError
from clowder_aimage.formats import left_out, lora, sidecar
from clowder_aimage.formats.left_out import LeftOut
from clowder_aimage.formats.sidecar import parse_sidecar
from clowder_aimage.importer import PackedModel
from clowder_aimage.oci import Reference
from tests.importer.conftest import in_memory, safetensors

NAME = Reference.parse("m")
LORA = safetensors(
    [
        ("layers.0.to_q.lora_A.weight", "F32", (2, 4)),
        ("layers.0.to_q.lora_B.weight", "F32", (4, 2)),
    ],
    ss_output_name="run-12",
)
CHECKPOINT = safetensors([("model.norm.weight", "F32", (4,))], format="pt")
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
MODEL = {
    "id": 43331,
    "name": "Ink wash",
    "description": "<p>Makes <b>ink</b> &amp; wash.</p>\n<p>\x1b[31mTry 0.8</p>",
    "allowNoCredit": False,
    "allowCommercialUse": ["Image", "RentCivit", "Moon"],
    "allowDerivatives": True,
    "allowDifferentLicense": "no",
}
VERSION = {
    "id": 136931,
    "modelId": 43331,
    "name": "v1",
    "trainedWords": ["ink, ", "ink wash", 7, "ink"],
    "baseModel": "SDXL 1.0",
    "description": None,
    "model": MODEL,
    "stats": {"downloadCount": 1},
}
WEBUI = {
    "description": "",
    "sd version": "Unknown",
    "activation text": "inkwash style",
    "preferred weight": 0.7,
    "notes": "mine",
}
FACTS = {
    "name": "Ink wash",
    "description": "Makes ink & wash. [31mTry 0.8",
    "triggerWords": ["ink", "ink wash"],
    "base": "SDXL 1.0",
    "permissions": {
        "allowCommercialUse": ["Image", "RentCivit"],
        "allowDerivatives": True,
        "allowNoCredit": False,
    },
    "source": "https://civitai.com/models/43331?modelVersionId=136931",
}


def encode(value: object) -> bytes:
    return json.dumps(value).encode()


def versions(*files: str) -> dict[str, Any]:
    """Return a model with a version for each file, whose word is the name of the file."""
    listed = [{"id": 1, "trainedWords": [name], "files": [{"name": name}]} for name in files]
    return {"id": 5, "name": "M", "modelVersions": listed}


def many(count: int, **fields: object) -> dict[str, Any]:
    return {"modelId": 1, "trainedWords": [f"w{i}" for i in range(count)], **fields}


SITUATIONS: dict[str, tuple[object, dict[str, Any]]] = {
    "a version": (VERSION, FACTS),
    "the web UI": (WEBUI, {"triggerWords": ["inkwash style"], "weight": 0.7}),
    "a model, by its file": (
        versions("a.safetensors", "m.safetensors"),
        {
            "name": "M",
            "triggerWords": ["m.safetensors"],
            "source": "https://civitai.com/models/5?modelVersionId=1",
        },
    ),
    "a model of another file": (
        versions("a", "b"),
        {"name": "M", "source": "https://civitai.com/models/5"},
    ),
    "one use, as older answers": (
        {"modelId": 1, "model": {"allowCommercialUse": "{Image,Rent}"}},
        {
            "permissions": {"allowCommercialUse": ["Image", "Rent"]},
            "source": "https://civitai.com/models/1",
        },
    ),
    "no use": (
        {"baseModel": "x", "model": {"allowCommercialUse": []}},
        {"base": "x", "permissions": {"allowCommercialUse": ["None"]}},
    ),
    "another document": ({"train": {"steps": 3}}, {}),
    "a list": ([VERSION], {}),
    "a text": ("trainedWords", {}),
    "nothing found": ({}, {}),
    "wrong types": (
        {
            "modelId": "43331",
            "id": True,
            "trainedWords": "ink",
            "baseModel": ["SDXL"],
            "description": 5,
            "model": [],
        },
        {},
    ),
    "wrong types of versions": ({"id": -1, "name": "\x07", "modelVersions": [[], 5]}, {}),
    "wrong types of files": (
        {"id": 2**60, "name": "x" * 2000, "modelVersions": [{"files": {}}, {"files": [None]}]},
        {},
    ),
    "wrong weight": ({**WEBUI, "preferred weight": 1e9}, {"triggerWords": ["inkwash style"]}),
    "no weight": ({**WEBUI, "preferred weight": 0}, {"triggerWords": ["inkwash style"]}),
    "a flag as weight": ({**WEBUI, "preferred weight": True}, {"triggerWords": ["inkwash style"]}),
    "many words": (
        many(200),
        {
            "triggerWords": [f"w{i}" for i in range(100)],
            "source": "https://civitai.com/models/1",
        },
    ),
    "a long description": (
        many(0, description="<" * 70_000 + "x" * 5000, baseModel="b"),
        {"description": "<" * 2000, "base": "b", "source": "https://civitai.com/models/1"},
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_known_fields_of_the_right_type_are_read(situation: str) -> None:
    value, facts = SITUATIONS[situation]
    assert parse_sidecar(encode(value), "m.safetensors") == facts


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b'{"modelId": 1, "modelId": 2}', b"\xff\xfe{}", b'{"a":' * 200 + b"1" + b"}" * 200],
    ids=["empty", "cut", "twice", "UTF-16", "deep"],
)
def test_what_is_not_strict_json_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError):
        parse_sidecar(raw, "m.safetensors")


def pack(path: Path) -> PackedModel:
    packed = create(in_memory(), NAME, path)
    validate("aimage-config", packed.aimage.properties)
    return packed


def write(directory: Path, weights: bytes = LORA, **files: bytes) -> Path:
    """Write a model file and files beside it, by their endings; return the model file."""
    directory.mkdir(exist_ok=True)
    for ending, data in files.items():
        (directory / f"ink.{ending}").write_bytes(data)
    path = directory / "ink.safetensors"
    path.write_bytes(weights)
    return path


def test_an_adapter_keeps_what_lies_beside_it(tmp_path: Path) -> None:
    civitai = {"civitai.info": encode(VERSION), "json": encode(WEBUI), "preview.png": PNG}
    path = write(tmp_path / "ink", **civitai)
    packed = pack(path)
    config = packed.aimage.properties
    assert [layer.name for layer in packed.aimage.layers] == [
        *("ink.civitai.info", "ink.json", "ink.preview.png", "ink.safetensors")
    ]
    assert (
        config["adapter"].items()
        >= {
            "title": "Ink wash",
            "base": "SDXL 1.0",
            "triggerWords": ["inkwash style"],
            "weight": 0.7,
        }.items()
    )
    assert {key: config[key] for key in ("name", "description", "permissions", "source")} == {
        key: FACTS[key] for key in ("name", "description", "permissions", "source")
    }
    # the directory of the file is the same model
    assert pack(path.parent).descriptor == packed.descriptor
    # and an adapter that is used without being packed has the same words
    assert lora.read_facts(path)["triggerWords"] == ["inkwash style"]


def test_the_base_in_the_file_is_the_exact_one(tmp_path: Path) -> None:
    tensors = [("to_q.lora_A.weight", "F32", (2, 4)), ("to_q.lora_B.weight", "F32", (4, 2))]
    weights = safetensors(tensors, ss_base_model_version="sdxl_base_v1-0")
    path = write(tmp_path / "ink", weights, **{"civitai.info": encode(VERSION)})
    stated = lora.read_facts(path)["base"]
    assert stated == "sdxl_base_v1-0"


def test_a_checkpoint_keeps_what_lies_beside_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "ink", CHECKPOINT, **{"json": encode(VERSION), "preview.jpg": b"\xff\xd8\xff"}
    )
    packed = pack(path)
    assert packed.aimage.properties.items() >= FACTS.items()
    assert {"ink.json", "ink.preview.jpg"} <= {layer.name for layer in packed.aimage.layers}
    assert pack(path.parent).descriptor == packed.descriptor


def test_what_cannot_be_read_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_out, "MAX_PICTURE", 100)
    outside = tmp_path / "secret.json"
    outside.write_bytes(encode(VERSION))
    files = {"json": b"{", "preview.png": bytes(50), "png": PNG + bytes(100)}
    path = write(tmp_path / "ink", **files)
    path.with_name("ink.civitai.info").symlink_to(outside)
    packed = pack(path)
    assert [layer.name for layer in packed.aimage.layers] == ["ink.safetensors"]
    assert packed.left_out == (
        LeftOut("ink.civitai.info", left_out.LINK_OUT),
        LeftOut("ink.json", "named as a sidecar, but not valid JSON"),
        LeftOut("ink.png", left_out.LARGE_PICTURE),
        LeftOut("ink.preview.png", left_out.NO_PICTURE),
    )


def test_a_long_sidecar_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "_MAX_JSON", 3)
    packed = pack(write(tmp_path / "ink", json=b'{"a":1}'))
    assert packed.left_out == (LeftOut("ink.json", "a sidecar of more than 1 MiB"),)


def test_a_document_of_another_kind_is_not_a_sidecar(tmp_path: Path) -> None:
    packed = pack(write(tmp_path / "ink", json=b'{"train": {}}'))
    assert [layer.name for layer in packed.aimage.layers] == ["ink.safetensors"]
    assert packed.left_out == ()


def test_pictures_of_a_directory_are_bounded_in_number_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_out, "MAX_PICTURE", 100)
    monkeypatch.setattr(left_out, "MAX_PICTURES", 2)
    path = write(tmp_path / "ink")
    for number in range(4):
        (path.parent / f"{number}.png").write_bytes(PNG + bytes(100 if number == 1 else 0))
    packed = pack(path.parent)
    assert [layer.name for layer in packed.aimage.layers] == ["0.png", "2.png", "ink.safetensors"]
    assert packed.left_out == (
        LeftOut("1.png", left_out.LARGE_PICTURE),
        LeftOut("3.png", left_out.MANY_PICTURES),
    )
