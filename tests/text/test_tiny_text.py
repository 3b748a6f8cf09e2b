from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from tests.text.tiny_text import KINDS, write_model


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_is_small_and_a_seed_decides_it(tmp_path: Path, kind: str) -> None:
    directory = write_model(tmp_path / "a", kind, 1)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= config["vocab_size"] <= 512
    text = "größer 🎈 red ball"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with safe_open(directory / "model.safetensors", "np") as file:
        assert ("lm_head.weight" in set(file.keys())) != config["tie_word_embeddings"]
    again = write_model(tmp_path / "b", kind, 1) / "model.safetensors"
    other = write_model(tmp_path / "c", kind, 2) / "model.safetensors"
    bytes_ = (directory / "model.safetensors").read_bytes()
    assert again.read_bytes() == bytes_ != other.read_bytes()
