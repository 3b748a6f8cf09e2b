"""Files that people write: in UTF-8 with or without a byte order mark, and in UTF-16 with one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.cli.console import prompt_loop
from clowder_aimage.cli.text.enhance_option import read_enhancement
from clowder_aimage.cli.text.option import _read_schema
from clowder_aimage.cli.verbs.batch import read_batch
from clowder_aimage.config.token_file import parse_tokens
from clowder_aimage.document.schema import read_configuration
from clowder_aimage.errors import AImageError
from clowder_aimage.node.spec_files import read_directory

TOKEN = "infer-0123456789abcdef0123456789"
LINE = {"custom_id": "ä", "url": "/v1/embeddings", "body": {"input": "ö"}}
CONFIG: dict[str, Any] = {"registries": {"registry.example.com": {}}}


def read_instruction(path: Path) -> str | None:
    values = {"instruction": str(path), "enhance": True, "enhancer": "a"}
    found = read_enhancement(values)
    return found.instruction if found else None


def read_config(path: Path) -> Any:
    return read_configuration(path, lambda document: document)


def read_prompt(path: Path, patch: pytest.MonkeyPatch) -> str | None:
    stdin = SimpleNamespace(buffer=io.BytesIO(path.read_bytes()), isatty=lambda: False)
    patch.setattr("sys.stdin", stdin)
    return prompt_loop.read_prompt(("-",))


# The name of a file, its text, its reader, and what it reads
FILES: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "schema.json": ('{"const": "ä"}', lambda path: _read_schema(str(path)), {"const": "ä"}),
    "instruction.txt": ("Write ä.\n", read_instruction, "Write ä."),
    "tokens": (f"# ä\r\ninfer {TOKEN}\r\n", parse_tokens, {TOKEN: "infer"}),
    "batch.jsonl": (
        json.dumps(LINE, ensure_ascii=False) + "\r\n",
        lambda path: [request.body for request in read_batch(path)],
        [LINE["body"]],
    ),
    "config.json": (json.dumps(CONFIG), read_config, CONFIG),
    "config.yaml": ("registries: {registry.example.com: {}}\n", read_config, CONFIG),
    "models.yaml": (
        "- ref: registry.example.com/a:v1 # ä\n",
        lambda path: [str(spec.reference) for spec in read_directory(path.parent).specs],
        ["registry.example.com/a:v1"],
    ),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_any_encoding_of_an_editor(tmp_path: Path, name: str, encoding: str) -> None:
    text, read, expected = FILES[name]
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert read(tmp_path / name) == expected


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_prompt_has_any_encoding_of_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    (tmp_path / "prompt").write_bytes("a fäx\r\n".encode(encoding))
    assert read_prompt(tmp_path / "prompt", monkeypatch) == "a fäx"


@pytest.mark.parametrize("name", FILES)
def test_half_of_a_character_is_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    _, read, _ = FILES[name]
    (tmp_path / name).write_bytes("a\ud83d".encode("utf-16", "surrogatepass"))
    with pytest.raises(AImageError):
        read(tmp_path / name)
