"""Tiny GGUF models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from clowder_aimage.model.llama import model as llama_model
from clowder_aimage.model.llama.model import LlamaModel
from clowder_aimage.model.text.language_model import Sampling, TextEnd, TextEvent, TextRequest
from tests.text.file_aimage import gguf_aimage
from tests.text.tiny_text import write_model

GREEDY = Sampling(temperature=0)


def load(*paths: Path, config: dict[str, Any] | None = None, **options: Any) -> LlamaModel:
    """Load an AImage of these files."""
    files, aimage = gguf_aimage(*paths, **(config or {}))
    return llama_model.load(files, aimage, **options)


def complete(prompt: str, count: int = 16, **fields: Any) -> TextRequest:
    """Return a request for a text of ``count`` tokens, the most probable ones by default."""
    return TextRequest(prompt=prompt, max_tokens=count, **{"sampling": GREEDY} | fields)


def text(events: Iterable[TextEvent]) -> str:
    """Return the text of all pieces."""
    return "".join(event.text for event in events if not isinstance(event, TextEnd))  # type: ignore[union-attr]


def write(model: LlamaModel, request: TextRequest) -> str:
    return text(model.generate(request))


def write_plain(directory: Path, kind: str = "qwen3", **fields: Any) -> Path:
    """Write a model of random text without bytes that are parts of characters.

    llama.cpp streams none of a character until it is whole.
    """
    write_model(directory, kind, **fields)
    vocabulary = json.loads((directory / "tokenizer.json").read_bytes())["model"]["vocab"]
    plain = {
        number
        for text, number in vocabulary.items()
        if text.isascii() or (text[0] == "Ġ" and text[1:].isascii())
    }
    weights = load_file(directory / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & weights.keys():
        others = [number for number in range(len(weights[name])) if number not in plain]
        weights[name][others] *= 0.01
    save_file(weights, directory / "model.safetensors")
    return directory
