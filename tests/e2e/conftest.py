"""A model of few layers, which is faster to transfer than the shapes model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.importer.conftest import safetensors

LLM = [
    ("lm_head.weight", "BF16", (8, 64)),
    ("model.layers.0.self_attn.q_proj.weight", "BF16", (64, 64)),
    ("model.norm.weight", "F32", (64,)),
]


def write_llm(directory: Path) -> Path:
    """Write a transformers directory with three tensors."""
    model = directory / "llm"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama",\n "architectures": ["Llama"]}')
    (model / "tokenizer.json").write_text(json.dumps({}))
    (model / "model.safetensors").write_bytes(safetensors(LLM, format="pt"))
    return model


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llm(tmp_path_factory.mktemp("llm"))
