"""Tiny models as AImages, loaded by the runtime of mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clowder_aimage.create import create
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.text.language_model import (
    LanguageModel,
    Sampling,
    TextDelta,
    TextEnd,
    TextEvent,
    TextRequest,
    ToolCall,
)
from clowder_aimage.model.text.runtime import load_language_model
from clowder_aimage.oci import Reference
from tests.text.tiny_text import write_model

GREEDY = Sampling(temperature=0)


def load(directory: Path, *, recipe: Recipe | None = None, whole: bool = False, **how: Any) -> Any:
    """Pack a Transformers directory beside itself, and load the AImage."""
    layout = ImageLayout(directory.parent / f"{directory.name}-store")
    form = ModelForm(whole_files=whole)
    packed = create(layout, Reference.parse("m"), directory, form=form, recipe=recipe)
    return load_language_model(layout, packed.aimage, **how)


def tiny(root: Path, kind: str = "qwen3", **config: Any) -> Any:
    """Write, pack and load a tiny model."""
    return load(write_model(root / kind, kind, **config), parallel=4)


def write(model: LanguageModel, prompt: str = "the red ball", **options: Any) -> list[TextEvent]:
    """Return the events of a greedy completion."""
    chosen: dict[str, Any] = {"sampling": GREEDY, "max_tokens": 16} | options
    return [*model.generate(TextRequest(prompt=prompt, **chosen))]


def chat(model: LanguageModel, text: str = "hello", **options: Any) -> list[TextEvent]:
    """Return the events of a greedy answer."""
    chosen: dict[str, Any] = {"sampling": GREEDY, "max_tokens": 32} | options
    message = {"role": "user", "content": text}
    return [*model.generate(TextRequest(messages=(message,), **chosen))]


def text_of(events: list[TextEvent], kind: str = "content") -> str:
    return "".join(one.text for one in events if isinstance(one, TextDelta) and one.kind == kind)


def calls_of(events: list[TextEvent]) -> list[ToolCall]:
    return [one for one in events if isinstance(one, ToolCall)]


def end_of(events: list[TextEvent]) -> TextEnd:
    end = events[-1]
    assert isinstance(end, TextEnd)
    return end
