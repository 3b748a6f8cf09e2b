"""The details of a model in ollama's form (ollama, docs/api.md, "Show Model Information")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import TypedDict

from clowder_aimage.api.model_kind import PICTURES
from clowder_aimage.layout.summary import find_weight_type
from clowder_aimage.model.text.language_model import COMPLETION, EMBEDDING, THINKING, TOOLS

# The largest integer of JavaScript; a larger number of parameters is not plausible
_MOST = (1 << 53) - 1
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
# Chat clients offer the models with ``completion``
_WORDS = (PICTURES, COMPLETION, EMBEDDING, TOOLS, THINKING)


class ModelDetails(TypedDict):
    """The family, the size and the precision of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


def build_details(properties: Mapping[str, Any]) -> ModelDetails:
    """Return the ``details`` of a model."""
    family = str(properties.get("family") or properties.get("architecture") or "")
    count = properties.get("parameters")
    return {
        "parent_model": "",
        "format": str(properties.get("format") or "safetensors"),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _format_count(count)
        if type(count) is int and 0 <= count <= _MOST
        else "",
        "quantization_level": str(find_weight_type(properties) or "").upper(),
    }


def _format_count(count: int) -> str:
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def list_capabilities(capabilities: Iterable[str]) -> list[str]:
    """Return ``image`` for an image model, and ollama's words for a language model."""
    return [word for word in _WORDS if word in capabilities]
