"""The model card: printed, and written by an export as it was, whatever the kind of model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.cli.console.card_text import render_card
from tests.exporter.conftest import files_in
from tests.importer.formats_gguf import gguf
from tests.importer.test_other_files import DIRECTORIES, LORA
from tests.process import Aimage
from tests.real_registry import RealRegistry

CARD = "---\r\nlicense: mit\r\n---\r\n# Ink\r\n\r\nA \u202e\x1b[31mmodel.\r\n".encode()
MODELS = {
    "adapter": {"ink.safetensors": LORA},
    "peft": DIRECTORIES["lora"],
    "gguf": {"model.gguf": gguf()},
    "transformers": DIRECTORIES["transformers"],
    "diffusers": DIRECTORIES["diffusers"],
}


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


@pytest.mark.parametrize("kind", MODELS)
def test_a_card_is_kept_as_it_is(kind: str, aimage: Callable[[], Aimage], tmp_path: Path) -> None:
    here = aimage()
    model = write(tmp_path / "model", MODELS[kind] | {"README.md": CARD, "preview.png": b"png"})
    here("create", "m", model, "-q")
    here("export", "m", "out", "-q")
    assert files_in(here.home / "out")["README.md"] == CARD
    assert files_in(here.home / "out")["preview.png"] == b"png"
    if kind == "gguf":
        # The bytes; this end of the pipe reads lines.
        assert here.process("show", "--card", "m").out.encode() == CARD.replace(b"\r\n", b"\n")
    assert json.loads(here("show", "--card", "m", "--json").out) == {
        "reference": "m:latest",
        "card": CARD.decode(),
    }


def test_a_model_without_a_card_says_what_a_card_is(
    aimage: Callable[[], Aimage], tmp_path: Path
) -> None:
    here = aimage()
    here("create", "m", write(tmp_path / "model", MODELS["adapter"]), "-q")
    assert "README.md of a model directory" in here("show", "--card", "m", code=3).err
    assert "--layers" in here("show", "--card", "--layers", "m", code=2).err


@pytest.mark.integration
@pytest.mark.parametrize("dialect", ["clowder", "ollama", "container", "modelpack"])
def test_a_card_is_read_in_the_registry(
    dialect: str, aimage: Callable[[], Aimage], tmp_path: Path, registry: RealRegistry
) -> None:
    here, name = aimage(), f"{registry.host}/cards/{dialect}:v1"
    here("create", name, write(tmp_path / "m", MODELS["gguf"] | {"README.md": b"# A\n"}), "-q")
    here("push", name, "--dialect", dialect, "-q")
    here("rm", name, "--gc", "-q")
    assert here.process("show", "--card", "--remote", name).out == "# A\n"


def test_a_terminal_gets_the_text_of_a_card() -> None:
    text = "\n".join([
        *("---", "license: mit", "---", "<p align=center>", "<img src=a.png>", "</p>", ""),
        *("# Ink \x1b[2J", "See [the page](https://example.com) <!-- note -->", ""),
        *("", "[![build](b.svg)](https://ci.example.com)", "![](c.png)", "```", "a < b > c"),
        *("[x](y)", "", "", "```", ""),
    ])  # fmt: skip
    assert render_card(text).splitlines() == [
        *("# Ink \ufffd[2J", "See the page (https://example.com)", ""),
        *("(picture: build) (https://ci.example.com)", "(picture)", "```", "a < b > c"),
        *("[x](y)", "", "", "```"),
    ]
