"""Decisions on each weight: its type, its quantization or the reason against it; and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.errors import UsageError
from clowder_aimage.formats.codes.coded_tensor import CodedTensor, DecodedCount
from clowder_aimage.importer.recipe import AUTO, DTYPES, Recipe
from clowder_aimage.tensor import Quantization, compute_nbytes
from clowder_aimage.tensor.blob import BIAS, SCALE
from clowder_aimage.tensor.kept_weight import UNFIT, KeepRule
from clowder_aimage.tensor.weight import FLOATS, Weight

# The quantization of a component with different quantizations.
MIXED = "mixed"
_WIDE = ("F64", "F32")
# Name, dtype and shape of a tensor in a header.
Entry = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WeightDecision:
    """The type and quantization of a stored weight.

    Values are stored as ``dtype``, or quantized. ``reason`` is the reason against a requested
    quantization.
    """

    weight: Weight
    dtype: str
    quantization: Quantization | None = None
    reason: str | None = None

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.weight.dtype

    @property
    def changes(self) -> bool:
        """Return True if the stored bytes differ from the source."""
        return self.is_cast or self.quantization is not None

    @property
    def result(self) -> Quantization | None:
        """Return the quantization of the stored weight."""
        return self.quantization or self.weight.quantization

    @property
    def stored(self) -> str:
        """Return the dtype of the layer."""
        return self.result.type.name if self.result else self.dtype

    @property
    def nbytes(self) -> int:
        """Return the size of the stored weight in bytes."""
        return sum(compute_nbytes(dtype, shape) for _, dtype, shape in build_entries(self))


def decide(
    component: str, weights: Sequence[Weight], recipe: Recipe, exact: frozenset[tuple[str, str]]
) -> list[WeightDecision]:
    """Decide the type of each weight.

    ``exact`` has the (component, tensor) pairs of F32 tensors with only BF16 values.
    """
    requested = recipe.of(component)
    rule = KeepRule.of(requested, (weight.name for weight in weights)) if requested else None
    decisions = []
    for weight in weights:
        reason = rule.find_reason(weight.name, weight.dtype, weight.shape) if rule else None
        chosen = None if reason or weight.quantization else requested
        dtype = _choose_dtype(component, weight, recipe, exact)
        if reason and requested and requested.is_by_row and dtype in _WIDE and recipe.dtype is None:
            # Beside 8-bit floats, 32 bits would take much of the space that these save
            dtype = "BF16"
        decisions.append(WeightDecision(weight, dtype, chosen, reason))
    return decisions


def _choose_dtype(
    component: str, weight: Weight, recipe: Recipe, exact: frozenset[tuple[str, str]]
) -> str:
    if weight.dtype not in FLOATS or recipe.dtype is None:
        return weight.dtype
    if recipe.dtype == AUTO:
        return "BF16" if (component, weight.name) in exact else weight.dtype
    return DTYPES[recipe.dtype]


def build_entries(decision: WeightDecision) -> list[Entry]:
    """Return the entries of a weight in the blob's header."""
    weight, quantization = decision.weight, decision.quantization
    if quantization is None:
        cast = decision.dtype if weight.quantization is None else None
        return [
            (weight.name + chunk.suffix, cast or chunk.dtype, chunk.shape) for chunk in weight.parts
        ]
    dtypes = quantization.type.scale_dtypes
    dtype = get_value_dtype(decision) if len(dtypes) > 1 else dtypes[0]
    scales = quantization.compute_scales_shape(weight.shape)
    suffixes = (SCALE, BIAS) if quantization.type.has_bias else (SCALE,)
    return [
        (weight.name, "U32", quantization.compute_codes_shape(weight.shape)),
        *((weight.name + suffix, dtype, scales) for suffix in suffixes),
    ]


def get_value_dtype(decision: WeightDecision) -> str:
    """Return the dtype of the values that MLX quantizes: it has no float64."""
    return "F32" if decision.dtype == "F64" else decision.dtype


def check_quantized(
    component: str, decisions: Sequence[WeightDecision], requested: Quantization
) -> None:
    """Check that a component can be quantized and is not quantized yet. Raises UsageError."""
    weights = [decision.weight for decision in decisions]
    # Codes in separate layers, as in ollama's first generation, are U32.
    quantized = [weight for weight in weights if weight.quantization or weight.dtype == "U32"]
    if quantized:
        kinds = ", ".join(sorted({weight.dtype for weight in quantized}))
        count, are = (
            ("1 tensor", "is") if len(quantized) == 1 else (f"{len(quantized)} tensors", "are")
        )
        raise UsageError(
            f"{count} of the {component} {are} already quantized ({kinds}); quantizing again "
            "would lose more precision",
            hint="use the unquantized model",
        )
    if any(decision.quantization for decision in decisions):
        return
    raise UsageError(
        f"no tensor of the {component} can be quantized to {requested.type.name} in groups of "
        f"{requested.group_size}",
        hint=_format_hint(decisions, requested),
    )


def _format_hint(decisions: Sequence[WeightDecision], requested: Quantization) -> str:
    elements = Counter[str]()
    for decision in decisions:
        elements[decision.reason or ""] += decision.weight.elements
    ((reason, _),) = elements.most_common(1)
    if reason.startswith(UNFIT) and requested.type.has_bias:
        return "rows must be a multiple of the group size: try another group size"
    return f"most of its values are not quantized because of: {reason}"


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Totals of a plan: ``tensors``, with ``parameters`` values in total.

    ``quantized`` has the quantization of each component as in the config; ``cast`` counts the
    unquantized tensors by their dtypes (from, to). ``saved`` is in bytes, relative to the source;
    ``ignored`` counts scales of activations, which are not stored.
    """

    tensors: int = 0
    parameters: int = 0
    quantized: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cast: Mapping[tuple[str, str], int] = field(default_factory=dict)
    decoded: DecodedCount = field(default_factory=dict)
    saved: int = 0
    ignored: int = 0


def report(
    decided: Mapping[str, Sequence[WeightDecision]], config: Mapping[str, Any], ignored: int = 0
) -> WeightReport:
    """Return the report on the decisions, by component, and the resulting config."""
    decisions = [decision for members in decided.values() for decision in members]
    quantized = {
        name: config["components"].get(name, {}).get("quantization")
        if name
        else describe_quantization(members)
        for name, members in decided.items()
    }
    return WeightReport(
        len(decisions),
        sum(decision.weight.elements for decision in decisions),
        {name: facts for name, facts in quantized.items() if isinstance(facts, dict)},
        Counter((d.weight.dtype, d.dtype) for d in decisions if d.is_cast and not d.result),
        _count_decoded(decisions),
        sum(d.weight.nbytes - d.nbytes for d in decisions if d.changes),
        ignored,
    )


def _count_decoded(decisions: Iterable[WeightDecision]) -> DecodedCount:
    """Count the decoded tensors, by format and dtype of the values."""
    rows = (chunk.tensor.decoded for decision in decisions for chunk in decision.weight.parts)
    decoders = (decoder.decoder for decoder in rows if decoder is not None)
    return Counter(
        (decoder.format, decoder.dtype) for decoder in decoders if isinstance(decoder, CodedTensor)
    )


def describe_component(
    properties: Mapping[str, Any], decisions: Sequence[WeightDecision]
) -> dict[str, Any]:
    """Return a component's entry in the config: ``properties``, then its totals."""
    if not decisions:
        return dict(properties)
    summary = describe_quantization(decisions)
    entry = {**properties, "tensors": len(decisions), **compute_totals(decisions)}
    formats = Counter[str]()
    for (kind, _), count in _count_decoded(decisions).items():
        formats[kind] += count
    decoded = {"decoded": dict(sorted(formats.items()))} if formats else {}
    return entry | decoded | ({"quantization": summary} if summary else {})


def describe_model_quantization(decided: Mapping[str, Sequence[WeightDecision]]) -> dict[str, Any]:
    """Return the quantization of a model with a single component; empty if it is unquantized."""
    facts = describe_quantization(decided.get("", ()))
    return {"quantization": facts["type"]} if facts else {}


def compute_totals(decisions: Iterable[WeightDecision]) -> dict[str, Any]:
    """Return the number of parameters, and the dtype of most bytes."""
    parameters, count = 0, Counter[str]()
    for decision in decisions:
        parameters += decision.weight.elements
        count[decision.stored] += decision.nbytes
    dtype = max(sorted(count), key=lambda name: count[name], default=None)
    return {"parameters": parameters} | ({"dtype": dtype} if dtype else {})


def describe_quantization(decisions: Sequence[WeightDecision]) -> dict[str, Any] | None:
    """Return the quantization of a component with the reasons for unquantized tensors, or None."""
    quantizations = [decision.result for decision in decisions if decision.result]
    if not quantizations:
        return None
    summary: dict[str, Any] = {"type": MIXED}
    if len(set(quantizations)) == 1:
        kind = quantizations[0]
        summary = {"type": kind.type.name, "group_size": kind.group_size}
        if kind.is_by_row:
            summary["scales"] = "row"
    reasons = Counter(d.reason or "as in the source" for d in decisions if not d.result)
    return summary | {"tensors": len(quantizations), "kept": dict(sorted(reasons.items()))}
