"""Decisions on each weight: its type, its quantization, and reasons against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clowder_aimage.errors import UsageError
from clowder_aimage.importer.recipe import AUTO, DTYPES, UNFIT, Recipe, reason_to_keep
from clowder_aimage.tensor import Quantization, nbytes
from clowder_aimage.tensor.tensor_blob import BIAS, SCALE
from clowder_aimage.tensor.weight import FLOATS, Weight

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype and shape in a header


@dataclass(frozen=True, slots=True)
class WeightDecision:
    """The type and the quantization of a stored weight.

    Its values are stored as ``dtype``, or quantized to ``quantization``; ``reason`` is why they are
    not, where that was asked for.
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
        """Return whether other bytes are stored than those that are there."""
        return self.is_cast or self.quantization is not None

    @property
    def result(self) -> Quantization | None:
        """Return the quantization of the stored weight."""
        return self.quantization or self.weight.quantization

    @property
    def stored(self) -> str:
        """Return the dtype of its layer."""
        return self.result.type.name if self.result else self.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the stored weight."""
        return sum(nbytes(dtype, shape) for _, dtype, shape in entries(self))


def decide(
    component: str, weights: Sequence[Weight], recipe: Recipe, exact: frozenset[tuple[str, str]]
) -> list[WeightDecision]:
    """Decide the type of each weight.

    ``exact`` names (component, tensor) the F32 ones whose values are BF16.
    """
    wanted = recipe.of(component)
    made = []
    for weight in weights:
        dtype = _dtype(component, weight, recipe, exact)
        reason = reason_to_keep(weight, wanted) if wanted else None
        chosen = None if reason or weight.quantization else wanted
        made.append(WeightDecision(weight, dtype, chosen, reason))
    return made


def _dtype(
    component: str, weight: Weight, recipe: Recipe, exact: frozenset[tuple[str, str]]
) -> str:
    if weight.dtype not in FLOATS or recipe.dtype is None:
        return weight.dtype
    if recipe.dtype == AUTO:
        return "BF16" if (component, weight.name) in exact else weight.dtype
    return DTYPES[recipe.dtype]


def entries(decision: WeightDecision) -> list[Entry]:
    """Return the entries of a weight in the blob's header."""
    weight, quantization = decision.weight, decision.quantization
    if quantization is None:
        return [
            (
                weight.name + part.suffix,
                decision.dtype if _is_plain(weight) else part.dtype,
                part.shape,
            )
            for part in weight.parts
        ]
    dtypes = quantization.type.scale_dtypes
    dtype = values_of(decision) if len(dtypes) > 1 else dtypes[0]
    scales = quantization.scales_shape(weight.shape)
    suffixes = (SCALE, BIAS) if quantization.type.has_bias else (SCALE,)
    return [
        (weight.name, "U32", quantization.codes_shape(weight.shape)),
        *((weight.name + suffix, dtype, scales) for suffix in suffixes),
    ]


def _is_plain(weight: Weight) -> bool:
    return weight.quantization is None


def values_of(decision: WeightDecision) -> str:
    """Return the dtype that values have right before they are quantized: MLX knows no float64."""
    return "F32" if decision.dtype == "F64" else decision.dtype


def check_quantized(
    component: str, decisions: Sequence[WeightDecision], wanted: Quantization
) -> None:
    """Check that a component can be quantized, and is not already. Raises UsageError."""
    weights = [decision.weight for decision in decisions]
    # codes that lie in layers of their own, as ollama's first generation wrote them, are U32
    there = [weight for weight in weights if weight.quantization or weight.dtype == "U32"]
    if there:
        kinds = ", ".join(sorted({weight.dtype for weight in there}))
        are = "1 tensor" if len(there) == 1 else f"{len(there)} tensors"
        are += f" of the {component} {'is' if len(there) == 1 else 'are'}"
        raise UsageError(
            f"{are} quantized already ({kinds}): once more would only lose more",
            hint="begin with the model as it was before it was quantized",
        )
    if any(decision.quantization for decision in decisions):
        return
    raise UsageError(
        f"no tensor of the {component} can be quantized to {wanted.type.name} in groups of "
        f"{wanted.group_size}",
        hint=_way_out(decisions, wanted),
    )


def _way_out(decisions: Sequence[WeightDecision], wanted: Quantization) -> str:
    """Return a hint for a model of which nothing can be quantized."""
    kept = Counter[str]()
    for decision in decisions:
        kept[decision.reason or ""] += decision.weight.elements
    ((reason, _),) = kept.most_common(1)
    if reason.startswith(UNFIT) and wanted.type.has_bias:
        return "a group must fit the rows: try another group size"
    return f"most of its values are kept for this reason: {reason}"
