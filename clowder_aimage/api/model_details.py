"""Details of a model for ollama's API, from the AImage's config (ollama, docs/api.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def details(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``details`` of a model."""
    family = str(known.get("family") or known.get("architecture") or "")
    count = known.get("parameters")
    return {
        "parent_model": "",
        "format": str(known.get("format") or "safetensors"),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short(count) if type(count) is int else "",
        "quantization_level": _quantization(known),
    }


def _short(count: int) -> str:
    """Return a number of parameters as ``6.2B``."""
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _quantization(known: Mapping[str, Any]) -> str:
    """Return the quantization of the weights: ``Q4_K_M``, ``INT8``, else ``BF16``."""
    if isinstance(said := known.get("quantization"), str):
        return said
    parts = known.get("components")
    for part in parts.values() if isinstance(parts, dict) else ():
        facts = part.get("quantization") if isinstance(part, dict) else None
        if isinstance(facts, dict) and isinstance(facts.get("type"), str):
            return str(facts["type"]).upper()
    return str(known.get("dtype") or "").upper()


def capabilities(known: Mapping[str, Any]) -> list[str]:
    """Return ``image`` for a model that makes pictures: chat programs do not offer it then."""
    return ["image"] if "pipeline" in known and "format" not in known else []
