"""The claim about a picture: what was done, with which inputs, and how it can be repeated.

C2PA Technical Specification 2.2: actions (18.15), ingredients (18.16), and an assertion of this
project, whose values repeat the picture. There is no thumbnail in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clowder_aimage import __version__
from clowder_aimage.model.picture_mark import AGENT_NAME, PictureMark
from clowder_aimage.pictures.provenance.marked_input import MarkedInput

# The label of the project's assertion (6.2.1, entity-specific), and the version of its fields
GENERATION = "dev.clowder.aimage.generation"
_VERSION = 1
# Facts of a picture that are fields of the assertion, or state what is elsewhere
_FIELDS = ("reference", "digest", "backend", "dtype", "seed", "loras")
_OTHERS = (*_FIELDS, "warnings", "mark")
_AGENT = {"name": AGENT_NAME, "version": __version__}


def build_claim(
    mark: PictureMark, inputs: Sequence[MarkedInput], facts: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the definition of a manifest; ``facts`` are those of a picture, None to state none.

    The ingredients are added with the labels of ``label_input``.
    """
    labels = {label_input(index): entry for index, entry in enumerate(inputs)}
    assertions = [{"label": "c2pa.actions.v2", "data": {"actions": _build_actions(mark, labels)}}]
    if facts is not None:
        assertions.append({"label": GENERATION, "data": describe_generation(facts)})
    return {"claim_generator_info": [_AGENT], "assertions": assertions}


def label_input(index: int) -> str:
    """Return the label of an ingredient, by which actions refer to it."""
    return f"input-{index + 1}"


def describe_ingredient(index: int, entry: MarkedInput) -> dict[str, Any]:
    """Return the definition of an ingredient. The first picture that is shown is the parent."""
    relationship = "parentOf" if index == 0 else "componentOf"
    return {
        "title": entry.role,
        "label": label_input(index),
        "relationship": relationship if entry.is_part else "inputTo",
    }


def _build_actions(mark: PictureMark, labels: Mapping[str, MarkedInput]) -> list[dict[str, Any]]:
    """Return the actions: made of nothing, or opened, with others placed, and edited."""
    by_model = {"digitalSourceType": mark.source_type, "softwareAgent": _AGENT}
    parts = [label for label, entry in labels.items() if entry.is_part]
    if not parts:
        return [{"action": "c2pa.created", **by_model}]
    opened = [
        {"action": action, "parameters": {"ingredientIds": [label]}}
        for action, label in zip(
            ["c2pa.opened", *["c2pa.placed"] * (len(parts) - 1)], parts, strict=True
        )
    ]
    return [*opened, {"action": "c2pa.edited", **by_model}]


def describe_generation(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the project's assertion about a picture with these facts.

    The seed is a text: numbers of C2PA's library have 63 bits.
    """
    return {
        "schemaVersion": _VERSION,
        "reference": facts.get("reference"),
        "digest": facts.get("digest"),
        "adapters": list(facts.get("loras", ())),
        "library": facts.get("backend"),
        "dtype": facts.get("dtype"),
        "seed": str(facts.get("seed")),
        "parameters": {name: value for name, value in facts.items() if name not in _OTHERS},
    }


def restore_facts(generation: object) -> dict[str, Any]:
    """Return the facts that the project's assertion states; empty if it has another form."""
    if not isinstance(generation, dict) or generation.get("schemaVersion") != _VERSION:
        return {}
    parameters, seed = generation.get("parameters"), str(generation.get("seed"))
    if not isinstance(parameters, dict) or not (seed.isascii() and seed.isdecimal()):
        return {}
    stated = {
        "reference": generation.get("reference"),
        "digest": generation.get("digest"),
        "backend": generation.get("library"),
        "dtype": generation.get("dtype"),
    }
    facts = {name: value for name, value in stated.items() if value is not None}
    adapters = generation.get("adapters")
    return {**parameters, **facts, "seed": int(seed), **({"loras": adapters} if adapters else {})}
