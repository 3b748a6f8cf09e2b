"""Summary of weights for config and output: counts, types, quantized and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.importer.decision import WeightDecision
from clowder_aimage.importer.planned_layer import PlannedLayer

MIXED = "mixed"  # what a component is quantized to where its tensors differ


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Totals of a plan: ``tensors``, with ``parameters`` values in all.

    ``quantized`` has the config's facts by component, ``cast`` counts the tensors that are not
    quantized by their dtypes (from, to). All of them together take ``saved`` bytes less than in the
    source. ``ignored`` scales of activations are left out.
    """

    tensors: int = 0
    parameters: int = 0
    quantized: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cast: Mapping[tuple[str, str], int] = field(default_factory=dict)
    saved: int = 0
    ignored: int = 0


def report(
    decided: Mapping[str, Sequence[WeightDecision]], config: Mapping[str, Any], ignored: int = 0
) -> WeightReport:
    """Return the report of decisions, by component, and of the config that they lead to."""
    decisions = [decision for members in decided.values() for decision in members]
    said = {
        name: config["components"][name].get("quantization") if name else quantization(members)
        for name, members in decided.items()
    }
    return WeightReport(
        len(decisions),
        sum(decision.weight.elements for decision in decisions),
        {name: facts for name, facts in said.items() if isinstance(facts, dict)},
        Counter((d.weight.dtype, d.dtype) for d in decisions if d.is_cast and not d.result),
        sum(d.weight.nbytes - d.nbytes for d in decisions if d.changes),
        ignored,
    )


def describe_component(
    known: Mapping[str, Any],
    name: str,
    decisions: Sequence[WeightDecision],
    layers: Iterable[PlannedLayer],
) -> dict[str, Any]:
    """Return a component's entry in the config, beginning with what is ``known`` of it."""
    described = dict(known)
    if decisions:
        described |= {"tensors": len(decisions), **totals(decisions)}
        if facts := quantization(decisions):
            described["quantization"] = facts
    size = sum(layer.size for layer in layers if layer.name.startswith(f"{name}/"))
    return described | {"size": size}


def whole_model(decided: Mapping[str, Sequence[WeightDecision]]) -> dict[str, Any]:
    """Return the quantization of a model that is a single part, if it has one."""
    facts = quantization(decided.get("", ()))
    return {"quantization": facts["type"]} if facts else {}


def totals(decisions: Iterable[WeightDecision]) -> dict[str, Any]:
    """Return the number of parameters, and the dtype that most bytes have."""
    parameters, count = 0, Counter[str]()
    for decision in decisions:
        parameters += decision.weight.elements
        count[decision.stored] += decision.nbytes
    dtype = max(sorted(count), key=lambda name: count[name], default=None)
    return {"parameters": parameters} | ({"dtype": dtype} if dtype else {})


def quantization(decisions: Sequence[WeightDecision]) -> dict[str, Any] | None:
    """Return the quantization of a component and the reasons of the rest, or None."""
    found = [decision.result for decision in decisions if decision.result]
    if not found:
        return None
    kinds = set(found)
    if len(kinds) == 1:
        kind = kinds.pop()
        facts: dict[str, Any] = {"type": kind.type.name, "group_size": kind.group_size}
    else:
        facts = {"type": MIXED}
    kept = Counter(d.reason or "as in the source" for d in decisions if not d.result)
    return facts | {"tensors": len(found), "kept": dict(sorted(kept.items()))}
