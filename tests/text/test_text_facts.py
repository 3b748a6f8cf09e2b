"""Facts about language models that are read from their files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.api.model_kind import EMBEDDER, PICTURES, TEXT, classify_model
from clowder_aimage.create import create
from clowder_aimage.dialect import AImage
from clowder_aimage.export import export
from clowder_aimage.formats.gguf_header import find_value
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.ability import Ability
from clowder_aimage.model.text import runtime
from clowder_aimage.model.text.text_facts import TextFacts, read_text_facts
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.importer.formats_gguf import LLAMA, STRING, UINT32, WEIGHTS, gguf
from tests.text.tiny_text import add_pooling, write_model

pytest.importorskip("jinja2", reason="jinja2 is not installed")
TEMPLATE = "{% if tools %}{{ tools }}{% endif %}{{ messages[0].content }}"


def facts_of(root: Path, source: Path) -> TextFacts:
    layout = ImageLayout(root / "store")
    create(layout, Reference.parse("a"), source)
    stored = read_aimage(layout, Reference.parse("a"))
    return read_text_facts(layout, stored.descriptor.digest, stored.aimage)


def written(path: Path, *pairs: Any) -> Path:
    path.write_bytes(gguf([*LLAMA, *pairs], WEIGHTS))
    return path


def test_a_template_of_a_transformers_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    known = facts_of(tmp_path, path)
    assert known.ability.capabilities == ("chat", "completion", "tools", "thinking")
    assert (known.context, "<|im_start|>" in known.template) == (512, True)


def test_a_file_with_the_template_comes_first(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    known = facts_of(tmp_path, path)
    assert (known.ability.capabilities, known.template) == (
        ("chat", "completion"),
        "{{ messages[0].content }}",
    )


def test_a_model_with_a_pooling_computes_embeddings_too(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen2")
    add_pooling(path)
    assert facts_of(tmp_path, path).ability.capabilities == ("chat", "completion", "embedding")


@pytest.mark.parametrize(
    ("pairs", "capabilities"),
    [
        ([], ("completion",)),
        ([("tokenizer.chat_template", STRING, TEMPLATE)], ("chat", "completion", "tools")),
        ([("llama.pooling_type", UINT32, 1)], ("embedding",)),
        ([("llama.pooling_type", UINT32, 0)], ("completion",)),
    ],
    ids=["plain", "template", "pooling", "none"],
)
def test_the_metadata_of_a_gguf_file(
    tmp_path: Path, pairs: list[Any], capabilities: tuple[str, ...]
) -> None:
    known = facts_of(tmp_path, written(tmp_path / "a.gguf", *pairs))
    assert (known.ability.capabilities, known.context) == (capabilities, 4096)


def test_a_value_that_is_cut_off_is_not_found(tmp_path: Path) -> None:
    raw = written(tmp_path / "a.gguf", ("tokenizer.chat_template", STRING, TEMPLATE)).read_bytes()
    end = raw.index(TEMPLATE.encode()) + len(TEMPLATE)
    assert find_value(raw[:end], "tokenizer.chat_template") == TEMPLATE
    for cut in (end - 1, end - len(TEMPLATE) - 1, end - len(TEMPLATE) - 9, 0):
        assert find_value(raw[:cut], "tokenizer.chat_template") is None
    assert find_value(raw, "tokenizer.ggml.tokens") is None  # a list
    assert find_value(raw, "llama.context_length") == 4096


def test_a_missing_template_is_read_when_it_is_there(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    assert "tools" in facts_of(tmp_path, path).ability.capabilities
    layout = ImageLayout(tmp_path / "store")
    stored = read_aimage(layout, Reference.parse("a"))
    other = ImageLayout(tmp_path / "empty")
    assert read_text_facts(other, stored.descriptor.digest, stored.aimage) == TextFacts(
        Ability(("completion",), "mlx-lm"), 512, "", is_final=False
    )
    again = read_text_facts(layout, stored.descriptor.digest, stored.aimage)
    assert "tools" in again.ability.capabilities


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({"format": "transformers", "architecture": "Qwen3ForCausalLM"}, TEXT),
        ({"format": "transformers", "architecture": "GPT2LMHeadModel"}, TEXT),
        ({"format": "transformers", "architecture": "BertModel"}, EMBEDDER),
        ({"format": "gguf", "architecture": "nomic-bert-moe"}, EMBEDDER),
        ({"format": "gguf", "architecture": "llama"}, TEXT),
        ({"format": "gguf"}, TEXT),
        ({"format": "gguf", "adapter": {"type": "lora"}}, "adapter"),
        ({"format": "lora"}, "adapter"),
        ({"format": "controlnet"}, "controlnet"),
        ({"family": "z-image"}, PICTURES),
        ({"format": "onnx"}, "other"),
    ],
    ids=str,
)
def test_kinds(properties: dict[str, Any], kind: str) -> None:
    assert classify_model(AImage(json.dumps(properties).encode(), ())) == kind


def test_the_kind_of_the_embedded_model(tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "store")
    create(layout, Reference.parse("tiny"), TINY)
    assert classify_model(read_aimage(layout, Reference.parse("tiny")).aimage) == PICTURES


def test_the_pooling_of_a_model_comes_back(tmp_path: Path) -> None:
    layout, path = ImageLayout(tmp_path / "store"), add_pooling(write_model(tmp_path / "model"))
    create(layout, Reference.parse("a"), path)
    export(layout, Reference.parse("a"), tmp_path / "out")
    name = "1_Pooling/config.json"
    assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()


def test_a_model_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = SimpleNamespace(load=lambda *_, **how: how["memory"], get_default_memory=lambda: 900)
    monkeypatch.setitem(runtime._MODULES, "llama.cpp", ("scripted_runtime", "llama"))
    monkeypatch.setitem(sys.modules, "scripted_runtime", scripted)
    aimage: Any = SimpleNamespace(properties={"format": "gguf"})
    files: Any = None
    shares: list[Any] = [
        runtime.load_language_model(files, aimage, memory=memory, reserved=reserved)
        for memory, reserved in ((None, 0), (600, 0), (None, 200), (600, 200), (600, 700))
    ]
    assert shares == [None, 600, 700, 400, 1]
